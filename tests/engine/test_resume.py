"""Sequences that go on in a new engine: with the tokens that the client has, suspects alone, others after them."""

import random

import pytest
from msgspec.structs import replace

from tests.engine.test_loop import END, VOCAB, expected_outputs
from tests.engine.test_loop_tiers import TierBench
from tests.seeds import fresh_seeds
from tiercel.kvcache.slot_index import as_slots
from tiercel.values.ids import SeqId
from tiercel.values.plan import StepPlan, whole_slices
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import Submit
from tiercel.wire.step_record import ANY_SEQ, EngineTrail


class SuspectWatch:
    """Checks at each launch that a suspect has the step for itself, and that no other step is in flight."""

    def __init__(self, bench: TierBench) -> None:
        self._launch = bench.machine.launch
        self._bench = bench
        self.order: list[SeqId] = []  # of first slices
        bench.machine.launch = self.launch

    def launch(self, plan: StepPlan) -> object:
        slices = whole_slices(plan.nano_batches)
        for piece in slices:
            if piece.seq not in self.order:
                self.order.append(piece.seq)
            until = self._bench.requests[piece.seq].suspect_until
            if piece.start < until and self._bench.book[piece.seq].is_suspect:
                assert len(slices) == 1, "a suspect with others in its step"
                assert all(one.in_flight == 0 for one in self._bench.book.running)
        return self._launch(plan)


def resume(before: TierBench, after: TierBench, trail: EngineTrail) -> None:
    """Submit what the dead engine left unfinished, as the HTTP process does."""
    for seq, request in before.requests.items():
        if seq in before.client.finished:
            continue
        after.requests[seq] = Request(
            id=seq,
            prompt=request.prompt,
            params=request.params,
            arrival_s=request.arrival_s,
            scope=request.scope,
            outputs=pack_tokens(before.client.tokens.get(seq, [])),
            suspect_until=trail.end_by_seq.get(seq, 0),
        )
        after.loop.take([Submit(after.requests[seq])])


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", [*range(6), *fresh_seeds(2)])
def test_whatever_an_engine_left_is_finished_by_the_next_one(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    before = TierBench(depth=depth, blocks=rng.choice([18, 40]), policy=rng.choice(["fcfs", "fair", "priority"]))
    documents = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    for _ in range(rng.randrange(2, 10)):
        prompt = [*rng.choice(documents), *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6)))]
        before.submit(prompt, max_tokens=rng.randrange(1, 24), ignore_eos=False)
    for _ in range(rng.randrange(40)):
        before.step()
    trail = before.record.read()
    after = TierBench(depth=depth, blocks=rng.choice([18, 40]))
    watch = SuspectWatch(after)
    resume(before, after, trail)
    after.run()
    suspects = [seq for seq in trail.end_by_seq if seq in after.requests]
    assert set(watch.order[: len(suspects)]) == set(suspects), "suspects go first"
    for seq, request in after.requests.items():
        tokens = [*before.client.tokens.get(seq, []), *after.client.tokens.get(seq, [])]
        assert tokens == expected_outputs(before.requests[seq], VOCAB, END, before.max_len), seq
        assert after.client.finished[seq].num_outputs == len(tokens)
        assert len(request.outputs) // 4 + len(after.client.tokens.get(seq, [])) == len(tokens)
    assert after.cache.blocks_used == 0
    assert after.record.read().is_empty


def test_a_suspect_takes_its_blocks_from_ddr() -> None:
    bench = TierBench(blocks=40, host=80)
    bench.loop.check_integrity()
    prompt = [number % VOCAB for number in range(41)]
    bench.submit(prompt, max_tokens=1)
    bench.run()
    for _ in range(20):
        bench.step()
        bench.clock.advance(0.1)
    device = bench.cache.tiers.device
    device.evict_many(as_slots(tuple(device.copies)))  # as in a new engine: the blocks are in DDR only
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    request = Request(
        id=SeqId(90), prompt=pack_tokens(prompt), params=params, arrival_s=bench.clock.now_s(), suspect_until=41
    )
    bench.requests[90] = request
    other = bench.submit([1, 2, 3], max_tokens=4)
    bench.loop.take([Submit(request)])
    bench.run()
    assert bench.client.finished[SeqId(90)].num_cached == 40
    assert bench.client.finished[SeqId(90)].num_cached_ddr == 40
    assert bench.client.tokens[90] == expected_outputs(request, VOCAB, END, bench.max_len)
    assert bench.client.finished[other].error is None


def test_the_suspects_that_have_tokens_run_before_those_in_their_prompts() -> None:
    """The client of one of them gets its next token after one step, and nobody gets one while a prompt is repeated."""
    bench = TierBench(blocks=40, host=80)
    watch = SuspectWatch(bench)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    long = Request(id=SeqId(90), prompt=pack_tokens(range(30)), params=params, arrival_s=0.0, suspect_until=30)
    short = Request(
        id=SeqId(91),
        prompt=pack_tokens(range(5)),
        params=params,
        arrival_s=0.0,
        outputs=pack_tokens([1, 2]),
        suspect_until=7,
    )
    bench.requests |= {90: long, 91: short}
    bench.loop.take([Submit(long), Submit(short)])
    bench.run()
    assert watch.order[:2] == [91, 90]


def test_a_request_is_named_in_the_record_while_it_is_taken_in() -> None:
    bench = TierBench()
    seen: list[SeqId | None] = []
    open_table = bench.cache.open
    bench.cache.open = lambda *given: (seen.append(bench.record.read().entering), open_table(*given))[1]
    seq = bench.submit([1, 2, 3])
    assert seen == [seq]
    assert bench.record.read().entering is None
    bench.run()


def test_those_for_whom_a_step_is_planned_are_named_in_the_record() -> None:
    bench = TierBench()
    seen: list[SeqId | None] = []
    ledger = bench.cache.ledger
    bench.cache.ledger = lambda: (seen.append(bench.record.read().entering), ledger())[1]
    bench.submit([1, 2, 3], max_tokens=3)
    bench.run()
    assert set(seen) == {ANY_SEQ}
    seen.clear()
    bench.requests[9] = replace(bench.requests[1], id=SeqId(9), suspect_until=3)
    bench.loop.take([Submit(bench.requests[9])])
    bench.run()
    assert seen[0] == SeqId(9), "a suspect is planned alone"
    assert seen[-1] == ANY_SEQ, "it is cleared"
    assert bench.record.read().is_empty


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_resumed_sequences_go_before_waiting_ones(policy: str) -> None:
    bench = TierBench(seqs=1, policy=policy)  # pyright: ignore[reportArgumentType]
    watch = SuspectWatch(bench)
    bench.clock.advance(10.0)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first = bench.submit([1, 2, 3], max_tokens=2)
    for seq, arrival_s, outputs in ((50, 105.0, []), (51, 109.0, [4, 5])):
        request = Request(
            id=SeqId(seq),
            prompt=pack_tokens([1, 2, 3]),
            params=params,
            arrival_s=arrival_s,
            outputs=pack_tokens(outputs),
        )
        bench.requests[seq] = request
        bench.loop.take([Submit(request)])
    bench.loop.check_integrity()
    while bench.book.waiting:
        bench.step()
    order = [seq for seq in watch.order if seq != first]
    # The other policies keep to the order of arrival.
    assert order == ([51, 50] if policy == "fair" else [50, 51])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_suspects_find_rows_when_all_are_taken(depth: int) -> None:
    bench = TierBench(seqs=2, depth=depth, blocks=60)
    running = [bench.submit([number, 2, 3], max_tokens=40) for number in (1, 4)]
    for _ in range(4):
        bench.step()
    assert len(bench.book.running) == 2
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for seq in range(50, 54):
        request = Request(
            id=SeqId(seq),
            prompt=pack_tokens([7, 8, seq % VOCAB]),
            params=params,
            arrival_s=bench.clock.now_s(),
            suspect_until=3,
        )
        bench.requests[seq] = request
        bench.loop.take([Submit(request)])
    bench.run()
    for seq in (*running, *range(50, 54)):
        assert bench.client.tokens[seq] == expected_outputs(bench.requests[seq], VOCAB, END, bench.max_len)
