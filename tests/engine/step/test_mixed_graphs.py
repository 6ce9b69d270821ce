"""Small mixed steps in graphs: the same tokens and reads as launched kernel by kernel, on ragged batches."""

import random
from itertools import pairwise

import pytest
import torch

from tests.engine.recording import (
    VOCAB,
    FakeRecorder,
    GraphBench,
    StepBench,
    WeighedSum,
    next_token,
    small_decoder,
)
from tests.seeds import fast_and_slow
from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.step.mixed_graphs import MAX_MIXED_TOKENS, MixedInputs, mixed_sizes, record_mixed_graphs
from tiercel.scheduler.prompt_lookup import PromptLookup
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import Slice, TableUpdate
from tiercel.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- sizes


def test_sizes_differ_by_32_tokens_at_most() -> None:
    for step_tokens in (1, 7, 16, 17, 40, 511, 512, 2048):
        sizes = mixed_sizes(step_tokens)
        assert sizes[-1] == min(step_tokens, MAX_MIXED_TOKENS)
        assert all(0 < high - low <= 32 for low, high in pairwise((0, *sizes)))
    assert mixed_sizes(100) == (16, 32, 64, 96, 100)


@pytest.mark.parametrize(("size", "max_rows"), [(1, 1), (16, 3), (16, 16), (48, 200)])
def test_the_host_side_of_a_recording_bounds_every_batch(size: int, max_rows: int) -> None:
    """Backends compute grids from it: at any tile, no batch may have more tiles of slices of several tokens."""
    inputs = MixedInputs.open(size, max_rows, 2, torch.device("cpu"))
    state = inputs.state(size)
    lengths = [end - start for start, end in pairwise(state.query_starts)]
    assert len(lengths) == state.num_sequences == len(state.device_context_lengths) == min(size, max_rows) + 1
    assert max(lengths) == size and min(lengths) == 1
    assert state.is_decode == (size == 1)
    rng = random.Random(size)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, size), rng.randrange(0, min(size, max_rows))))
        real = [end - start for start, end in pairwise((0, *cuts, size))]
        for tile in (1, 2, 8, 16, 64):
            tiles, room = (
                sum(-(-length // tile) for length in some if length > 1) for some in (real, lengths)
            )  # fmt: skip
            assert tiles <= room


# ---- the loop through graphs


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(5)
def test_random_work_in_mixed_graphs_gives_the_right_tokens(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    recorder = FakeRecorder()
    seqs = rng.choice([1, 3, 9, 20])
    tokens = rng.choice([3, 8, 40]) + seqs
    has_all = rng.random() < 0.5
    bench = GraphBench(
        recorder, CpuDevice(1), depth=depth, seqs=seqs, tokens=tokens, blocks=rng.choice([24, 60, 200]),
        splits=rng.random() < 0.4, mixed_sizes=mixed_sizes(tokens if has_all else tokens // 2),
        lookup=PromptLookup() if seed % 2 else None, lookup_tokens=4 if seed % 2 else 0,
    )  # fmt: skip
    bench.run_random(rng)
    assert recorder.replays > 0
    assert (bench.eager.forwards == 0) == has_all


# ---- one step at a time

PROMPTS = [[3, 1, 4], [1, 5], [9], [2, 6, 5]]


def test_padding_writes_nothing_but_the_null_block() -> None:
    recorder, model = FakeRecorder(), WeighedSum()
    bench = StepBench(model, 4, recorder, InlineLane(), mixed_sizes=(4, 16))
    before = bench.kv.clone()
    recorded = model.forwards
    assert bench.prefill(PROMPTS, GREEDY).result().tokens == tuple(next_token(prompt) for prompt in PROMPTS)
    assert recorder.replays == 1
    assert model.forwards == recorded + 1  # the replay
    changed = {(slot, at) for slot, _, at, *_ in (bench.kv != before).nonzero().tolist()}
    # Sequence n writes block 2n at its first positions.
    assert changed - {(0, 0)} == {(2 * n, at) for n, prompt in enumerate(PROMPTS, 1) for at in range(len(prompt))}


def test_more_tokens_than_the_largest_graph_has_are_launched_kernel_by_kernel() -> None:
    recorder = FakeRecorder()
    bench = StepBench(WeighedSum(), 4, recorder, InlineLane(), mixed_sizes=(4, 8))
    assert bench.prefill(PROMPTS, GREEDY).result().tokens == tuple(next_token(prompt) for prompt in PROMPTS)  # 9
    assert recorder.replays == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=0, pooling="mean"),
        SamplingParams(temperature=0.0, max_tokens=0, pooling="last"),
    ],
)
def test_states_of_prompts_are_read_from_graphs(params: SamplingParams) -> None:
    outcomes: list[StepOutcome] = []
    for sizes in ((16,), ()):
        recorder = FakeRecorder()
        bench = StepBench(WeighedSum(), 4, recorder, InlineLane(), mixed_sizes=sizes)
        outcomes.append(bench.prefill(PROMPTS, params).result())
        assert recorder.replays == len(sizes)
    assert len(outcomes[0].prompts) >= 3
    assert outcomes[0].prompts == outcomes[1].prompts


@pytest.mark.parametrize("room", [0, 1, 2])
def test_if_a_recording_fails_there_are_none(room: int) -> None:
    kv = torch.zeros(3, 1, 4, 1, 2)
    found = record_mixed_graphs(
        *(WeighedSum(), kv, torch.zeros(4, dtype=torch.int64), 2, InlineLane(), FakeRecorder(room), (4, 8, 16)),
        on_progress=lambda done, total: None,
    )
    assert found is None


def test_without_room_for_their_inputs_there_are_none() -> None:
    kv, recorder = torch.zeros(3, 1, 4, 1, 2), FakeRecorder()
    found = record_mixed_graphs(
        *(WeighedSum(), kv, torch.zeros(4, dtype=torch.int64), 1 << 44, InlineLane(), recorder, (4, 8)),
        on_progress=lambda done, total: None,
    )
    assert found is None
    assert not recorder.recorded


# ---- the kernels


@INTERPRETED
def test_the_kernel_that_draws_gets_the_parameters_of_each_row() -> None:
    from tiercel.engine.kernels.sampling import draw_no_sync  # lazy: the interpreter must have been chosen

    tokens: list[list[tuple[int, ...]]] = []
    for sizes in ((16,), ()):
        recorder, drawn = FakeRecorder(), list[tuple[int, ...]]()
        for seed in range(8):
            params = SamplingParams(temperature=9.0, seed=seed, max_tokens=5)
            bench = StepBench(
                WeighedSum(), 4, recorder, InlineLane(), mixed_sizes=sizes, kernel=draw_no_sync
            )  # fmt: skip
            drawn.append(bench.prefill(PROMPTS, params).result().tokens)
        assert recorder.replays == 8 * len(sizes)
        tokens.append(drawn)
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1  # the noise of the seeds


class RaggedBench(StepBench):
    """Random mixes of prompts and decodes of sequences with 14 blocks of four tokens each."""

    def __init__(self, seed: int, recorder: FakeRecorder | None, quantization: str) -> None:
        from tiercel.engine.attention.triton import TritonAttention  # lazy: the interpreter must have been chosen
        from tiercel.engine.models.triton_ops import TritonOps  # lazy: as above

        attention = TritonAttention(4)
        ops = TorchOps(attention) if quantization == "auto" else TritonOps(attention)
        ops.is_capturable = True
        model = small_decoder(ops, "cpu", quantization)
        sizes = () if recorder is None else (16, 32, 48)
        super().__init__(model, 6, recorder, InlineLane(), mixed_sizes=sizes, blocks=14)
        self._rng = random.Random(seed)

    def run(self, poison: bool) -> list[tuple[int, ...]]:
        """Return the tokens of some steps. `poison`: the null block is NaN before each of them."""
        rng, tokens = self._rng, list[tuple[int, ...]]()
        done = dict.fromkeys(range(1, 7), 0)
        self.open([[rng.randrange(64) for _ in range(40)] for _ in done], GREEDY)
        updates = tuple(TableUpdate(SeqId(n), 0, tuple(SlotId(14 * n - at) for at in range(14))) for n in done)
        for _ in range(5):
            slices: list[Slice] = []
            left = rng.choice([9, 16, 30, 48])
            for number in rng.sample(sorted(done), rng.randrange(1, 7)):
                length = min(left, rng.choice([1, 1, 2, 5, 17]), 40 - done[number])
                if length:
                    slices.append(Slice(SeqId(number), done[number], length, True))
                    done[number], left = done[number] + length, left - length
            if poison:
                self.kv[0] = torch.nan
            tokens.append(self.launch(slices, updates).result().tokens)
            updates = ()
        return tokens


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # attention leaves the states of padding as memory had them
@pytest.mark.parametrize(
    "case",
    fast_and_slow([("auto", 0), ("auto", 1), ("int4", 2)], [("auto", 2), ("int8", 0), ("int8", 1), ("int4", 1)]),
)
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_the_kernels_give_the_same_in_graphs(case: tuple[str, int]) -> None:
    quantization, seed = case
    recorder = FakeRecorder()
    found, expected = RaggedBench(seed, recorder, quantization), RaggedBench(seed, None, quantization)
    assert found.run(poison=True) == expected.run(poison=False)
    assert recorder.replays == 5
    assert torch.allclose(found.kv[1:], expected.kv[1:], atol=1e-5)
    assert expected.kv[1:].any()


def test_the_vocabulary_of_the_fake_is_narrower_than_its_memory() -> None:
    assert FakeRecorder().memory.numel() >= 48 * max(VOCAB, 64)
