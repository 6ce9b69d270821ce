"""Requests that share a cold prefix, on a real model: the prefix is computed once, and no token differs."""

import random
from collections.abc import Iterable

import pytest

from tests.conformance.bench import EngineBench
from tiercel.embedded import MODEL_DIR
from tiercel.engine.step.flight import Flight, StepRunner
from tiercel.values.ids import SeqId
from tiercel.values.plan import StepPlan, whole_slices

COUNT, SHARED, OWN = 32, 512, 64


class CountingRunner:
    """A runner that counts the prompt tokens of its steps."""

    def __init__(self, runner: StepRunner) -> None:
        self.prompt_tokens: list[int] = []
        self._runner = runner

    def launch(self, plan: StepPlan) -> Flight:
        pieces = whole_slices(plan.nano_batches)
        self.prompt_tokens.append(sum(max(0, min(one.length, SHARED + OWN - one.start)) for one in pieces))
        return self._runner.launch(plan)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self._runner.forget(seqs)


def answers(*, shares: bool) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of all requests, and the prompt tokens of each step."""
    counting: list[CountingRunner] = []

    def wrap(runner: StepRunner) -> StepRunner:
        counting.append(CountingRunner(runner))
        return counting[0]

    bench = EngineBench(
        MODEL_DIR, wrap=wrap, max_num_seqs=COUNT, max_model_len=768, num_gpu_blocks_override=2048,
        enable_prefix_caching=shares, log_level="error",
    )  # fmt: skip
    bench.is_checked = False
    rng = random.Random(5)
    prefix = rng.choices(range(1792), k=SHARED)
    try:
        found = bench.greedy([prefix + rng.choices(range(1792), k=OWN) for _ in range(COUNT)], 4)
    finally:
        bench.close()
    return found, counting[0].prompt_tokens


@pytest.mark.slow
def test_without_the_cache_every_request_computes_the_prefix_and_gets_the_same_tokens() -> None:
    tokens, computed = answers(shares=False)
    assert sum(computed) == COUNT * (SHARED + OWN)
    assert tokens == answers(shares=True)[0]


def test_a_cold_prefix_is_computed_once() -> None:
    _, computed = answers(shares=True)
    assert sum(computed) == SHARED + COUNT * OWN
