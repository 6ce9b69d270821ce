"""Proposed tokens never change a text: on the simulated machine, which checks every KV row, and on the real runner."""

import random
from array import array
from collections.abc import Callable

import pytest

from tests.engine.recording import FakeRecorder, GraphBench, next_token
from tests.engine.test_loop import VOCAB, Bench, walk
from tests.seeds import fresh_seeds
from tiercel.device.cpu import CpuDevice
from tiercel.device.sim import expected_outputs
from tiercel.scheduler.prompt_lookup import PromptLookup
from tiercel.values.ids import SeqId
from tiercel.values.request import Request, SamplingParams, pack_tokens

SEEDS = (*range(12), *fresh_seeds(4))


def sim_continuation(tokens: list[int], count: int) -> list[int]:
    """Return the tokens that the simulated model generates behind these."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    request = Request(id=SeqId(1), prompt=pack_tokens(tokens), params=params, arrival_s=0.0)
    return expected_outputs(request, VOCAB, frozenset(), len(tokens) + count)


def sum_continuation(tokens: list[int], count: int) -> list[int]:
    """Return the tokens that `WeighedSum` generates behind these."""
    for _ in range(count):
        tokens = [*tokens, next_token(tokens)]
    return tokens[len(tokens) - count :]


def oracle(rng: random.Random, right: Callable[[list[int], int], list[int]]) -> PromptLookup:
    """Return a lookup that proposes the right tokens, fewer of them, or wrong ones from a random place on."""

    def find(tokens: "array[int]", skip: int, count: int) -> tuple[int, ...]:
        found = right(list(tokens), skip + count)[skip : skip + rng.randrange(count + 1)]
        if found and rng.random() < 0.5:
            at = rng.randrange(len(found))
            found[at:] = [rng.randrange(VOCAB) for _ in found[at:]]
        return tuple(found)

    return PromptLookup(find)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(12)
def test_any_proposals_give_exactly_the_right_tokens(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        blocks=rng.choice([24, 30, 60]), depth=depth, seqs=rng.choice([1, 3, 6]), tokens=rng.choice([8, 16, 40]),
        lookup=oracle(rng, sim_continuation), lookup_tokens=rng.randrange(1, 8),
    )  # fmt: skip
    walk(bench, seed, rng, refusals=0.1)
    counts = bench.book.speculation
    assert 0 <= counts.accepted <= counts.proposed


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(4)
def test_the_runner_checks_any_proposals(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    bench = GraphBench(
        FakeRecorder(), CpuDevice(), depth=depth, seqs=rng.choice([1, 4, 8]), tokens=rng.choice([16, 40]),
        blocks=rng.choice([24, 60]), splits=rng.random() < 0.5, lookup=oracle(rng, sum_continuation),
        lookup_tokens=rng.randrange(1, 8),
    )  # fmt: skip
    bench.run_random(rng)


@pytest.mark.parametrize("depth", [0, 1])
def test_right_proposals_save_steps_and_wrong_ones_cost_none(depth: int) -> None:
    steps: list[int] = []
    for lookup_tokens, shift in ((0, 0), (5, 0), (5, 1)):
        lookup = PromptLookup(
            lambda tokens, skip, count, shift=shift: tuple(
                (token + shift) % VOCAB for token in sim_continuation(list(tokens), skip + count)[skip:]
            )
        )
        bench = Bench(depth=depth, lookup=lookup, lookup_tokens=lookup_tokens)
        bench.submit([1, 2, 3], max_tokens=37, ignore_eos=True)
        bench.run()
        bench.assert_all_right()
        steps.append(bench.loop.gauges.num_steps)
        counts = bench.book.speculation
        assert counts.accepted == (0 if shift else counts.proposed)
    alone, right, wrong = steps
    assert alone == 37
    assert right == 1 + 36 // 6
    assert wrong == alone
