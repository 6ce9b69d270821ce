"""Decodes in graphs: the size for each batch, and the same tokens as with single launches."""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.recording import (
    VOCAB,
    FakeRecorder,
    GraphBench,
    StepBench,
    WeighedSum,
    expected_sums,
    next_token,
    small_decoder,
)
from tiercel.device.cpu import CpuDevice, Done, InlineLane
from tiercel.device.pinned import PinnedMemory
from tiercel.engine.assembly import assemble
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.step.graphs import MAX_GRAPH_ROWS, graph_sizes, record_graphs
from tiercel.engine.step.mixed_graphs import mixed_sizes
from tiercel.engine.step.staging import KernelCarrier
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import Slice
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import FromEngine, Loading, Report, Submit


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- sizes


def test_large_sizes_differ_by_an_eighth_at_most() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(100)[-5:] == (56, 64, 80, 96, 100)
    assert len(graph_sizes(256)) == 23
    assert graph_sizes(65_536) == graph_sizes(MAX_GRAPH_ROWS)


def test_every_batch_has_a_slightly_larger_size() -> None:
    for most in range(1, MAX_GRAPH_ROWS + 1):
        sizes = graph_sizes(most)
        assert sizes[-1] == most
        assert all(low < high <= 2 * low and (low < 32 or high <= 1.25 * low) for low, high in pairwise(sizes))


# ---- the loop through graphs


@pytest.mark.parametrize("room", [2, 1000])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(6)
def test_random_work_in_graphs_gives_the_right_tokens(seed: int, depth: int, room: int) -> None:
    rng = random.Random(seed)
    recorder = FakeRecorder(room)
    seqs = rng.choice([1, 3, 9, 20])
    tokens, blocks = rng.choice([3, 8, 64]) + seqs, rng.choice([24, 60, 200])
    bench = GraphBench(
        recorder, CpuDevice(1), depth=depth, seqs=seqs, tokens=tokens, blocks=blocks, splits=rng.random() < 0.4
    )
    bench.run_random(rng)
    has_graphs = len(graph_sizes(seqs)) <= room  # one failed recording, and there are none
    assert recorder.recorded == [(size, VOCAB) for size in reversed(graph_sizes(seqs))][:room]
    assert bench.sizes == (graph_sizes(seqs) if has_graphs else ())
    assert (recorder.replays > 0) == has_graphs


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.sampled(1)
def test_kernels_that_move_inputs_and_results_give_the_right_tokens(depth: int, records: bool) -> None:
    rng, recorder = random.Random(depth), FakeRecorder() if records else None
    bench = GraphBench(
        recorder, CpuDevice(1), depth=depth, seqs=9, tokens=20, blocks=40, splits=True, carrier=KernelCarrier()
    )
    bench.run_random(rng)
    assert recorder is None or recorder.replays > 0


# ---- one step at a time

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
PROMPTS = [[3, 1, 4], [1, 5], [9], [2, 6, 5]]


def test_padding_writes_nothing_but_the_null_block() -> None:
    recorder = FakeRecorder()
    bench = StepBench(WeighedSum(), 4, recorder, InlineLane())
    output = bench.prefill(PROMPTS, GREEDY).result().tokens
    assert output == tuple(next_token(prompt) for prompt in PROMPTS)
    before = bench.kv.clone()
    outcome = bench.decode({1: 3, 2: 2, 4: 3}).result()
    assert outcome.tokens == tuple(next_token([*PROMPTS[at], output[at]]) for at in (0, 1, 3))
    assert recorder.replays == 1
    changed = {(slot, at) for slot, _, at, *_ in (bench.kv != before).nonzero().tolist()}
    assert changed - {(0, 0)} == {(2, 3), (4, 2), (8, 3)}


@pytest.mark.parametrize("room", [0, 1, 2])
def test_after_a_failed_recording_there_are_no_graphs_and_one_line_says_so(
    room: int, caplog: pytest.LogCaptureFixture
) -> None:
    kv, recorder = torch.zeros(1, 1, 4, 1, 2), FakeRecorder(capacity=room)
    arguments = (WeighedSum(), kv, 4, 24, InlineLane(), recorder, (1, 2, 4))
    assert record_graphs(*arguments, on_progress=lambda done, total: None) is None
    (line,) = caplog.messages
    assert line.startswith("no graphs: every step is launched kernel by kernel failed_rows=")
    assert f"failed_rows={(4, 2, 1)[room]} " in line


def test_more_rows_than_the_largest_graph_has_are_launched_kernel_by_kernel() -> None:
    recorder = FakeRecorder()
    bench = StepBench(WeighedSum(), 4, recorder, InlineLane(), sizes=(1, 2))
    assert [size for size, _ in recorder.recorded] == [2, 1]
    output = bench.prefill(PROMPTS, GREEDY).result().tokens
    outcome = bench.decode({1: 3, 2: 2, 4: 3}).result()
    assert outcome.tokens == tuple(next_token([*PROMPTS[at], output[at]]) for at in (0, 1, 3))
    assert recorder.replays == 0


def test_without_room_for_their_inputs_there_are_no_graphs() -> None:
    kv, recorder = torch.zeros(1, 1, 4, 1, 2), FakeRecorder()
    found = record_graphs(
        WeighedSum(), kv, 4, 1 << 44, InlineLane(), recorder, (1, 2), on_progress=lambda done, total: None
    )
    assert found is None
    assert not recorder.recorded


def test_a_step_that_is_not_all_decode_is_launched_kernel_by_kernel() -> None:
    recorder = FakeRecorder()
    bench = StepBench(WeighedSum(), 4, recorder, InlineLane())
    bench.prefill(PROMPTS, GREEDY)
    assert recorder.replays == 0
    bench.launch([Slice(SeqId(1), 1, 1, False)])
    assert recorder.replays == 0
    bench.launch([Slice(SeqId(1), 2, 1, True)])  # for the device the last token of a prompt is a decode
    assert recorder.replays == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_kernels_give_the_same_in_graphs() -> None:
    from tiercel.engine.attention.triton import TritonAttention  # lazy: the interpreter must have been chosen

    model = small_decoder(TorchOps(TritonAttention(4)), "cpu")
    output: list[list[tuple[int, ...]]] = []
    for recorder in (FakeRecorder(), None):
        bench = StepBench(model, 4, recorder, InlineLane())
        flights = [bench.prefill(PROMPTS, GREEDY)]
        flights += [bench.decode({1: 3 + at, 2: 2 + at, 4: 3 + at}) for at in range(2)]
        output.append([flight.result().tokens for flight in flights])
    assert output[0] == output[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.slow
def test_padding_may_read_nan_without_effect() -> None:
    from tiercel.engine.attention.triton import TritonAttention  # lazy: the interpreter must have been chosen

    model = small_decoder(TorchOps(TritonAttention(4)), "cpu")
    outcomes: list[StepOutcome] = []
    for recorder in (FakeRecorder(), None):
        bench = StepBench(model, 4, recorder, InlineLane())
        bench.prefill(PROMPTS, GREEDY)
        bench.decode({1: 3, 2: 2, 3: 1, 4: 3})
        bench.kv[[0, 7, 8]] = (
            torch.nan
        )  # the null block, and the blocks of the fourth sequence, whose row becomes padding
        outcomes.append(bench.decode({1: 4, 2: 3, 3: 2}).result())
        assert recorder is None or recorder.replays == 2
    assert outcomes[0].tokens == outcomes[1].tokens
    assert outcomes[0].bad == outcomes[1].bad == ()


# ---- no operator waits


class Hasty(TorchDispatchMode):
    """Raises for operators that wait for a device, and counts copies of bytes, which are those of the staging."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.waiting, name
        if name.startswith("index"):
            places = [place for place in args[1] if place is not None] if isinstance(args[1], list | tuple) else []
            assert all(place.dtype is torch.int64 for place in places), "a mask has as many places as it has ones"
        if name == "copy_" and args[0].dtype is torch.uint8:
            self.uploads += 1
        return func(*args, **(kwargs or {}))


class HastyLane(InlineLane):
    """A lane whose jobs must not wait."""

    def __init__(self) -> None:
        self.uploads: list[int] = []

    def run(self, job: Callable[[], Any]) -> Done[Any]:
        with Hasty() as mode:
            done = Done(job())
        self.uploads.append(mode.uploads)
        return done


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(top_k=3, top_p=0.9, seed=1, frequency_penalty=0.5, logprobs=2)]
)
@pytest.mark.parametrize("records", [True, False])
def test_a_launch_does_not_wait(records: bool, params: SamplingParams) -> None:
    lane = HastyLane()
    bench = StepBench(WeighedSum(), 4, FakeRecorder() if records else None, lane)
    bench.prefill(PROMPTS, params)
    bench.decode({1: 3, 2: 2, 4: 3})
    if params is GREEDY:  # without kernels that read host memory: one copy for a step, and one for its new tables
        assert lane.uploads[records:] == [2, 1]


# ---- the engine's start


class Outbox:
    """The messages to the HTTP process."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []

    def post(self, message: FromEngine) -> None:
        self.messages.append(message)


class RecordingDevice(CpuDevice):
    """A CPU with a recorder of graphs."""

    def __init__(self) -> None:
        super().__init__(1)
        self.recorder = FakeRecorder()

    def open_recorder(self) -> FakeRecorder:  # type: ignore[override]
        return self.recorder


def test_nothing_is_locked_beside_a_recording(tmp_path: Path) -> None:
    """The driver may refuse one of the two during the other."""
    device, done, ranges = RecordingDevice(), list[str](), list[PinnedMemory]()
    record = device.recorder.record
    device.recorder.record = lambda job: (done.append("recorded"), record(job))[1]  # type: ignore[method-assign]

    def pin(address: int, size: int, block_bytes: int) -> PinnedMemory:
        ranges.append(PinnedMemory(address, size, block_bytes, lambda *slab: done.append("locked"), lambda slab: None))
        return ranges[-1]

    device.pin = pin  # type: ignore[method-assign]
    settings = EngineSettings(
        model=str(tmp_path), block_size=4, max_num_seqs=2, num_gpu_blocks_override=60, cpu_device_pool=True,
        kv_host_bytes=1 << 16,
    )  # fmt: skip
    engine = assemble(settings, WeighedSum(), device, Outbox(), MonotonicClock())  # type: ignore[arg-type]
    end_s = time.monotonic() + 10
    while not ranges[0].pinned_bytes:  # of the host tier; the others were locked and unlocked for measuring copies
        assert time.monotonic() < end_s
        time.sleep(0.001)
    engine.close()
    assert done[-3:] == ["recorded", "recorded", "locked"]
    assert done.count("recorded") == 2 + len(mixed_sizes(256))


@pytest.mark.parametrize(
    ("enforce_eager", "is_capturable", "sizes"), [(False, True, (1, 2, 4, 6)), (True, True, ()), (False, False, ())]
)
def test_graphs_are_recorded_at_the_start_if_possible_and_wanted(
    tmp_path: Path, enforce_eager: bool, is_capturable: bool, sizes: tuple[int, ...]
) -> None:
    settings = EngineSettings(
        model=str(tmp_path), block_size=4, max_num_seqs=6, num_gpu_blocks_override=60, enforce_eager=enforce_eager,
        calibration_s=0.2, cache_folder=str(tmp_path / "cache"),
    )  # fmt: skip
    model, device, outbox = WeighedSum(), RecordingDevice(), Outbox()
    model.is_capturable = is_capturable
    engine = assemble(settings, model, device, outbox, MonotonicClock())  # type: ignore[arg-type]
    reported = [message.stage for message in outbox.messages if isinstance(message, Loading)]
    tokens = mixed_sizes(256) if sizes else ()  # the default budget on a CPU
    count = len(sizes) + len(tokens)
    assert [stage for stage in reported if "graphs" in stage] == [
        f"recording CUDA graphs {done} of {count}" for done in range(count)
    ]
    recorded = [(size, VOCAB) for size in reversed(sizes)] + [(size, 1) for size in reversed(tokens)]
    assert device.recorder.recorded == recorded
    assert (device.recorder.replays > 0) == bool(sizes)  # step times are measured in the graphs
    device.recorder.replays = 0
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    request = Request(id=SeqId(1), prompt=pack_tokens([3, 1, 4]), params=params, arrival_s=0.0)
    engine.loop.take([Submit(request)])
    while not engine.loop.is_idle:
        engine.loop.step()
    engine.close()
    tokens = [
        token
        for reported in outbox.messages
        if isinstance(reported, Report)
        for token in memoryview(reported.tokens).cast("I")
    ]
    assert tokens == expected_sums(request, frozenset(), 96)
    assert (device.recorder.replays > 0) == bool(sizes)
