"""A decode step beside a swap: its stream has no copy that would wait for the copy engines."""

import pytest
import torch
from msgspec.structs import replace

from tests.device.copy_engines import PIECE_BYTES, CopyEngine, EngineCopy, Launch, Way, copies, step_s
from tests.engine.recording import VOCAB, StepBench, WeighedSum, next_token, small_decoder
from tests.engine.simulated_gpu import PLACE, SimulatedRecorder, simulated_gpu, values_of
from tiercel.device.cpu import InlineLane
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.kernels.sampling import draw_no_sync
from tiercel.engine.models.triton_ops import TritonOps
from tiercel.engine.models.weights import fill_dummy
from tiercel.engine.step.staging import Carrier, CopyCarrier
from tiercel.values.request import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

SWAP_BYTES = 512 << 20
DECODE_S = 5e-3  # of the graph
PROMPTS = [[3, 1, 4], [1, 5], [9], [2, 6, 5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=5)
FILTERED = SamplingParams(temperature=0.8, top_p=0.9, top_k=4, min_p=0.01, logprobs=3, seed=3, max_tokens=5)
PENALISED = SamplingParams(
    frequency_penalty=0.5, presence_penalty=0.1, logit_bias=((3, 1.0),), allowed_token_ids=(1, 2, 3, 4, 5),
    min_tokens=2, stop_token_ids=(7,), prompt_logprobs=2, max_tokens=5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- the model of copy engines


def test_a_copy_waits_for_the_queued_pieces_of_its_direction_only() -> None:
    up, down = CopyEngine(), CopyEngine()
    up.begin_swap(0.0, SWAP_BYTES)
    assert up.copy(0.0, 100) > 2 * PIECE_BYTES / 50e9
    assert down.copy(0.0, 100) < 1e-5


def test_pieces_that_are_not_queued_yet_come_behind_a_copy() -> None:
    engine, piece_s = CopyEngine(), PIECE_BYTES / 50e9
    engine.begin_swap(0.0, 10 * PIECE_BYTES)
    engine.copy(0.5 * piece_s, 0)
    assert engine.copy(1.5 * piece_s, 0) == pytest.approx(3 * piece_s, rel=0.01)  # the piece behind the first copy
    assert engine.is_swapping(9.5 * piece_s) and not engine.is_swapping(10.5 * piece_s)


def test_a_step_that_copies_waits_for_a_swap() -> None:
    """The reason why a decode step has no copies: these are four, as small as they may be."""
    four = [EngineCopy(Way.UP, 64), EngineCopy(Way.UP, 64), Launch(DECODE_S), *[EngineCopy(Way.DOWN, 64)] * 2]
    assert step_s(four, SWAP_BYTES) > 1.5 * step_s(four)
    assert step_s([Launch(DECODE_S)], SWAP_BYTES) == step_s([Launch(DECODE_S)])


# ---- real steps


def decode_operations(
    params: SamplingParams, recorded: bool, carrier: Carrier | None = None
) -> list[EngineCopy | Launch]:
    """Return what a decode step of three sequences queues on its stream."""
    with simulated_gpu() as gpu:
        recorder = SimulatedRecorder(gpu, DECODE_S) if recorded else None
        bench = StepBench(WeighedSum(), 4, recorder, InlineLane(), PLACE.type, kernel=draw_no_sync, carrier=carrier)
        output = bench.prefill(PROMPTS, params).result().tokens
        # Neither has the step of the prompts, beside what stays on the device.
        assert carrier is not None or {copy.way for copy in copies(gpu.operations)} <= {Way.WITHIN}
        gpu.operations.clear()
        outcome = bench.decode({1: 3, 2: 2, 4: 3}).result()
        if params is GREEDY:
            assert outcome.tokens == tuple(next_token([*PROMPTS[at], output[at]]) for at in (0, 1, 3))
        assert all(0 <= token < VOCAB for token in outcome.tokens)
    return gpu.operations if recorded else [*gpu.operations, Launch(DECODE_S)]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, FILTERED, PENALISED], ids=["greedy", "drawn", "filtered", "penalised"]
)
@pytest.mark.sampled(4)
def test_a_decode_step_has_no_copy(params: SamplingParams, recorded: bool) -> None:
    assert copies(decode_operations(params, recorded)) == []


@pytest.mark.parametrize("recorded", [True, False])
def test_a_swap_does_not_hold_a_decode_step(recorded: bool) -> None:
    operations = decode_operations(DRAWN, recorded)
    assert step_s(operations, SWAP_BYTES) <= 1.03 * step_s(operations)


def test_without_kernels_for_host_memory_a_decode_step_waits_for_a_swap() -> None:
    operations = decode_operations(DRAWN, recorded=True, carrier=CopyCarrier())
    assert [copy.way for copy in copies(operations)] == [Way.UP, Way.DOWN, Way.DOWN]
    assert step_s(operations, SWAP_BYTES) > 1.5 * step_s(operations)


def test_two_kernels_of_a_decode_step_use_host_memory() -> None:
    """One reads inputs, changes of tables and parameters of draws, one writes tokens and flags."""
    operations = decode_operations(DRAWN, recorded=True)
    assert [type(one) is Launch and one.mapped_bytes > 0 for one in operations].count(True) == 2


def test_draws_that_are_held_for_a_grammar_have_no_copy() -> None:
    with simulated_gpu() as gpu:
        bench = StepBench(
            WeighedSum(), 4, SimulatedRecorder(gpu, DECODE_S), InlineLane(), PLACE.type, kernel=draw_no_sync
        )
        constrained = replace(DRAWN, grammar="-")  # not compiled: it allows every token
        bench.prefill(PROMPTS, constrained).result()
        gpu.operations.clear()
        assert len(bench.decode({1: 3, 2: 2, 4: 3}).result().tokens) == 3
        assert copies(gpu.operations) == []


@pytest.mark.parametrize("recorded", [True, False])
def test_a_decoder_with_the_kernels_of_a_gpu_has_no_copy(recorded: bool) -> None:
    with simulated_gpu() as gpu:
        model = small_decoder(TritonOps(TritonAttention(4)), PLACE.type, fills=False)
        fill_dummy({name: values_of(target) for name, target in model.targets()}, 3)
        recorder = SimulatedRecorder(gpu, DECODE_S) if recorded else None
        bench = StepBench(model, 4, recorder, InlineLane(), PLACE.type, kernel=draw_no_sync)
        bench.prefill(PROMPTS, DRAWN).result()
        gpu.operations.clear()
        assert len(bench.decode({1: 3, 2: 2, 4: 3}).result().tokens) == 3
        assert copies(gpu.operations) == []
