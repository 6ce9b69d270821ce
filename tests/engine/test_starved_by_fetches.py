"""Fetches that wait for the disk do not use up the lookups of a step."""

import random

from tests.engine.test_loop import VOCAB
from tests.engine.test_loop_tiers import TierBench
from tiercel.kvcache.slot_index import as_slots
from tiercel.values.ids import SeqId
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import Submit

BLOCKS = 12  # of each document: more than one lookup of a fetch in the device tier
LOW, HIGH = 128, 64  # documents requested in the last band and in the one before it: more than the maximum of fetches


class Library:
    """An engine without DDR, with very many documents that are on the disk only."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.documents = [[rng.randrange(VOCAB) for _ in range(BLOCKS)] for _ in range(LOW + HIGH)]
        blocks = len(self.documents) * BLOCKS
        self.bench = TierBench(
            blocks=2 * blocks, host=0, disk=blocks + 100, seqs=8, tokens=64, mode="swap", block=1, policy="priority"
        )
        check, self.bench.loop.check_integrity = (
            self.bench.loop.check_integrity,
            lambda: None,
        )  # slow, and not the point
        for document in self.documents:
            self.bench.submit(document, max_tokens=1)
            self.bench.run()
        self.bench.loop.check_integrity = check
        check()
        device = self.bench.cache.tiers.device
        device.evict_many(as_slots(tuple(device.copies)))
        self.bench.loop.check_integrity = lambda: None

    def submit(self, prompt: list[int], band: int, scope: bytes = b"") -> SeqId:
        bench, seq = self.bench, SeqId(len(self.bench.requests) + 1)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        bench.requests[seq] = Request(
            id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=bench.clock.now_s(), scope=scope, band=band
        )
        bench.loop.take([Submit(bench.requests[seq])])
        return seq

    def ask_for_all(self) -> None:
        for document in self.documents[:LOW]:
            self.submit([*document, 1, 2], band=2)
        for _ in range(5):  # they become fetches
            self.bench.loop.step()
        for document in self.documents[LOW:]:
            self.submit([*document, 1, 2], band=1)


def test_a_loop_that_only_waits_for_reads_reports_nothing_to_do() -> None:
    """Otherwise the loop would plan without pause; in a simulation, where planning takes no time, for ever."""
    library = Library()
    library.ask_for_all()
    steps = 0
    while library.bench.loop.step():  # the clock is not advanced
        steps += 1
        assert steps < 300, "busy with nothing"


def test_the_first_in_rank_with_nothing_on_the_disk_does_not_wait_for_fetches_of_others() -> None:
    library = Library()
    library.ask_for_all()
    for _ in range(3):
        library.bench.loop.step()
    urgent = library.submit([7] * 5, band=0, scope=b"other")
    for _ in range(3):
        library.bench.loop.step()
        library.bench.clock.advance(0.002)  # the time of a step
    book = library.bench.book
    assert urgent not in book or book[urgent].first_launch_s is not None
