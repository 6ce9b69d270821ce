"""Rows with grammars are drawn after the commit of the step before, and get the same tokens as if drawn at once."""

import random
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
import torch
from llguidance import LLMatcher

from tests.engine.recording import VOCAB, FakeRecorder, GraphBench, expected_sums, next_token
from tests.engine.small_grammars import END_TOKEN, compiled, token_of
from tests.engine.test_loop import END, MAX_MODEL_LEN, random_prompt
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.values.grammar import NOTHING_LEFT
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import Request, SamplingParams, pack_tokens, unpack_tokens
from tiercel.wire.frames import Abort, Submit

R = TypeVar("R")
REGEXES = ("(ab|ce){1,3}(f|gh)?", "[a-e]{4,9}", "(a|bc*d)+j", "a", "[a-j]*")
TEXTS = tuple(map(LLMatcher.grammar_from_regex, REGEXES))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class LatePending(Generic[R]):
    """A job of a `LateLane`."""

    def __init__(self, lane: "LateLane", job: Callable[[], R]) -> None:
        self._lane = lane
        self._job = job
        self._value: list[R] = []

    def run(self) -> None:
        self._value.append(self._job())

    def result(self) -> R:
        while not self._value:
            self._lane.run_next()
        return self._value[0]


class LateLane(InlineLane):
    """A lane as slow as possible: a job runs when its result, or that of a later job, is requested."""

    def __init__(self) -> None:
        self._queue: deque[LatePending[object]] = deque()

    def run(self, job: Callable[[], R]) -> LatePending[R]:  # type: ignore[override]
        pending = LatePending(self, job)
        self._queue.append(pending)  # type: ignore[arg-type]
        return pending

    def run_next(self) -> None:
        self._queue.popleft().run()


LANES = {"inline": InlineLane, "late": LateLane, "thread": lambda: CpuDevice(1).open_lane()}


def expected(request: Request) -> list[int]:
    """Return the tokens of a request, each computed from the beginning."""
    if not request.params.grammar:
        return expected_sums(request, END, MAX_MODEL_LEN)
    tokens = list(unpack_tokens(request.prompt))
    num_prompt = len(tokens)
    while len(tokens) < min(num_prompt + request.params.max_tokens, MAX_MODEL_LEN):
        words = torch.zeros(1, dtype=torch.int32).numpy()
        compiled(request.params.grammar).open_row(tokens[num_prompt:]).fill(words)
        wanted = next_token(tokens)
        allowed = [token for token in range(VOCAB) if int(words[0]) >> token & 1]
        tokens.append(wanted if wanted in allowed else allowed[0])  # one-hot logits: the lowest id of equal ones
        if tokens[-1] == END_TOKEN and not request.params.ignore_eos:
            break
    return tokens[num_prompt:]


class HeldBench(GraphBench):
    """The loop on a real runner, with requests of which some have grammars."""

    def expected(self, seq: int) -> list[int]:
        return expected(self.requests[seq])

    def ask(self, prompt: list[int], grammar: str, **fields: object) -> SeqId:
        seq = SeqId(len(self.requests) + 1)
        params = SamplingParams(temperature=0.0, grammar=grammar, **fields)  # type: ignore[arg-type]
        self.requests[seq] = Request(id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=self.clock.now_s())
        self.loop.take([Submit(self.requests[seq])])
        return seq

    def run_random(self, rng: random.Random) -> None:
        shared = [rng.randrange(VOCAB) for _ in range(40)]
        for _ in range(rng.randrange(5, 25)):
            grammar = rng.choice(TEXTS) if rng.random() < 0.6 else ""
            prompt, lookup = random_prompt(rng, shared), rng.choice((0, 0, 4))
            self.ask(
                prompt, grammar, max_tokens=rng.randrange(1, 30), ignore_eos=rng.random() < 0.4,
                prompt_lookup_num_tokens=lookup,
            )  # fmt: skip
            for _ in range(rng.randrange(0, 4)):
                self.loop.step()
            if rng.random() < 0.2:
                self.loop.take([Abort((SeqId(rng.randrange(1, len(self.requests) + 1)),))])
        self.run()
        self.lane.close()
        self.assert_all_right()
        assert not self.grammars.in_use


@pytest.mark.parametrize("seed", fast_and_slow([1, *fresh_seeds(1)], range(100, 106)))
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("holds", "lane"), [(False, "inline"), (True, "inline"), (True, "late"), (True, "thread")])
@pytest.mark.sampled(5)
def test_random_loads_get_the_tokens_of_each_request_alone(seed: int, depth: int, holds: bool, lane: str) -> None:
    rng = random.Random(seed)
    bench = HeldBench(
        FakeRecorder() if rng.random() < 0.5 else None,
        CpuDevice(1),
        depth=depth,
        seqs=rng.randrange(1, 7),
        tokens=rng.randrange(7, 24),
        blocks=rng.randrange(24, 40),  # so few that sequences are preempted
        splits=rng.random() < 0.5,
        lane=LANES[lane](),
        holds=holds,
    )
    bench.run_random(rng)


def test_random_loads_preempt_sequences_with_grammars() -> None:
    bench = HeldBench(None, CpuDevice(1), depth=1, seqs=6, tokens=16, blocks=24, splits=False, lane=InlineLane(),
                      holds=True)  # fmt: skip
    for number in range(8):
        bench.ask([number] * 12, TEXTS[4], max_tokens=40, ignore_eos=True)
    bench.run()
    bench.assert_all_right()
    assert bench.loop.gauges.read().preemptions > 0


def test_a_grammar_that_cannot_be_compiled_fails_its_request() -> None:
    bench = HeldBench(None, CpuDevice(1), depth=1, seqs=4, tokens=16, blocks=24, splits=False)
    bench.grammars.get = lambda request: None  # type: ignore[method-assign]
    bench.ask([1, 2], "", max_tokens=5)
    failing = bench.ask([1, 2], TEXTS[0], max_tokens=5)
    bench.run()
    bench.lane.close()
    end = bench.client.finished[failing]
    assert (end.reason, end.error) == (FinishReason.ERROR, "the grammar of the request failed: it is not compiled")
    assert bench.client.tokens[1] == expected(bench.requests[1])


@pytest.mark.parametrize("lane", LANES)
def test_a_request_to_which_bad_words_leave_nothing_fails_alone(lane: str) -> None:
    """With a grammar, whose draws are held, and with allowed tokens, whose draws are not."""
    bench = HeldBench(
        None, CpuDevice(1), depth=1, seqs=4, tokens=16, blocks=24, splits=False, lane=LANES[lane](), holds=True
    )
    a, b = token_of("a"), token_of("b")
    held = bench.ask([3, 4], LLMatcher.grammar_from_regex("ab"), bad_words=((a, b),), max_tokens=9)
    plain = bench.ask([3, 4], "", allowed_token_ids=(a,), bad_words=((a, a),), max_tokens=9)
    other = bench.ask([3, 4], "", max_tokens=3, ignore_eos=True)
    bench.run()
    bench.lane.close()
    for end in (bench.client.finished[seq] for seq in (held, plain)):
        assert (end.reason, end.error) == (FinishReason.ERROR, NOTHING_LEFT)
    assert bench.client.finished[other].reason is FinishReason.LENGTH
