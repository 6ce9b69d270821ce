"""The memory of steps: which steps are run, how peaks are used, and the errors of steps that do not fit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engine.memory.test_capacity import Machine
from tiercel.device.cpu import CpuDevice, Done, InlineLane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.measure.footprint import Footprint, measure_footprint
from tiercel.engine.memory.capacity import show_arithmetic, size_pool
from tiercel.engine.models.precision import Precision
from tiercel.engine.sampling import Sampled, Sampler
from tiercel.engine.step.graphs import StaticInputs
from tiercel.engine.step.mixed_graphs import MixedInputs
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError
from tiercel.values.tier import KVSpec
from tiercel.values.units import GIB, MIB

SPEC = KVSpec(layers=1, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
VOCAB = 50
HERE = torch.device("cpu")


class Watched:
    """A model that notes the slices of every forward, and the rows that its head computes."""

    layers, kv_heads, head_dim, vocab_size, max_model_len = 1, 1, 4, VOCAB, 1000
    precision = Precision.of(torch.float32)
    impl, weights_bytes, fingerprint = "native", 3 * GIB, bytes(32)

    def __init__(self, *, is_capturable: bool = True, error: Exception | None = None) -> None:
        self.is_capturable = is_capturable
        self.steps: list[list[tuple[int, int]]] = []
        self.heads: list[int] = []
        self._error = error

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        if self._error is not None:
            raise self._error
        assert kv.shape == (1, 1, 16, 1, 8)
        assert not state.slot_ids.any() and not state.block_tables.any()
        assert len(tokens) == len(state.positions) == state.query_starts[-1]
        lengths = [end - start for start, end in zip(state.query_starts, state.query_starts[1:], strict=False)]
        self.steps.append([(end - length, end) for length, end in zip(lengths, state.context_lengths, strict=True)])
        return torch.zeros(len(tokens), 3)

    def logits(self, hidden: Tensor) -> Tensor:
        self.heads.append(len(hidden))
        return torch.randn(len(hidden), VOCAB, generator=torch.Generator().manual_seed(1))


class ScriptedDevice(CpuDevice):
    """A GPU with scripted peaks, one per step."""

    name = "cuda"

    def __init__(self, *peaks: int) -> None:
        super().__init__(threads=1)
        self._peaks = list(peaks)
        self.calls: list[str] = []

    def free_bytes(self) -> int:
        return 7 * GIB

    def give_back_cached(self) -> None:
        self.calls.append("give back")

    def reset_peak(self) -> None:
        self.calls.append("reset")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return self._peaks.pop(0)


class CountingSampler(Sampler):
    """A sampler that notes the number of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, VOCAB, HERE)
        self.sampled: list[int] = []

    def sample_no_sync(self, logits: Tensor, rows: object, positions: object, output_index: object) -> Sampled:
        self.sampled.append(len(logits))
        return super().sample_no_sync(logits, rows, positions, output_index)  # type: ignore[arg-type]


def measure(
    device: CpuDevice, model: Watched, lane: object | None = None, **changes: object
) -> tuple[Footprint, CountingSampler]:
    settings = EngineSettings(model="unused", **changes)  # type: ignore[arg-type]
    sampler = CountingSampler(settings.sequences + 1)
    used = lane or InlineLane()
    return measure_footprint(settings, model, sampler, SPEC, device, used, HERE), sampler  # type: ignore[arg-type]


def test_the_largest_steps_are_run_on_the_null_block_and_drawn_from() -> None:
    device, model = ScriptedDevice(500 * MIB, 800 * MIB, 100 * MIB, 40 * MIB), Watched()
    found, sampler = measure(device, model, max_num_seqs=6, max_num_batched_tokens=64)
    crowd, prompt, decode, mixed = model.steps
    assert len(crowd) == 6 and sum(end - start for start, end in crowd) == 64 and {start for start, _ in crowd} == {0}
    assert prompt == [(936, 1000)]
    assert decode == [(0, 1)] * 6
    assert mixed == [(0, 64)]
    assert model.heads == sampler.sampled == [6, 1, 6, 1]
    assert found.step_bytes == 800 * MIB
    inputs = StaticInputs.open(6, 63, HERE)  # 63 blocks of 16 tokens hold the longest context
    small = MixedInputs.open(64, 7, 63, HERE)  # one suspect is admitted beyond the limit
    tensors = (inputs.buffer, inputs.starts, inputs.tables, small.buffer, small.tables)
    inputs_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert inputs_bytes > (6 + 8) * 63 * 8  # block tables
    # Graphs of 1, 2, 4 and 6 rows, and of 16, 32 and 64 tokens.
    assert found.graph_bytes == 140 * MIB + inputs_bytes + 2 * 32 * MIB + (4 + 3) * 16 * MIB
    assert found.table_bytes == 7 * 63 * 8  # of the rows of the runner
    assert found.reserved_bytes == 800 * MIB + found.graph_bytes + found.table_bytes + 80 * MIB + 128 * MIB
    # Memory that a step left in torch's cache counts neither for the next step nor for the pool.
    assert device.calls == ["give back", "reset", "peak"] * 4 + ["give back"]


def test_a_context_shorter_than_a_step_bounds_its_slices() -> None:
    model = Watched()
    measure(ScriptedDevice(1, 1, 1, 1), model, max_num_seqs=3, max_num_batched_tokens=512, max_model_len=100)
    assert model.steps[:2] == [[(0, 100)] * 3, [(0, 100)]]


@pytest.mark.parametrize(("is_capturable", "enforce_eager"), [(False, False), (True, True)])
def test_without_graphs_nothing_is_kept_for_them(is_capturable: bool, enforce_eager: bool) -> None:
    model = Watched(is_capturable=is_capturable)
    found, _ = measure(ScriptedDevice(10 * MIB, 5 * MIB), model, enforce_eager=enforce_eager)
    assert len(model.steps) == 2
    assert (found.step_bytes, found.graph_bytes) == (10 * MIB, 0)


def test_on_the_cpu_no_step_is_run() -> None:
    model = Watched()
    found, _ = measure(CpuDevice(threads=1), model)
    assert (found.reserved_bytes, model.steps) == (0, [])


class LateLane(InlineLane):
    """A lane whose jobs fail when their results are requested, as on a worker thread."""

    def run(self, job: Callable[[], object]) -> Done[object]:  # type: ignore[override]
        try:
            return super().run(job)
        except RuntimeError as exc:
            return Late(exc)


class Late(Done[object]):
    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        self._error = error

    def result(self) -> object:
        raise self._error


@pytest.mark.parametrize("lane", [InlineLane(), LateLane()])
def test_the_error_of_a_step_that_does_not_fit_has_its_numbers(lane: InlineLane) -> None:
    device = ScriptedDevice()
    with pytest.raises(ConfigError) as caught:
        measure(device, Watched(error=torch.OutOfMemoryError("CUDA out of memory")), lane, max_num_seqs=6)
    for part in ("2048 tokens", "6 sequences", "1000 tokens", "7.0 GiB", "3.0 GiB", "--max-num-batched-tokens"):
        assert part in caught.value.message
    assert device.calls[-1] == "give back"


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(ScriptedDevice(), Watched(error=RuntimeError("no kernel")))


def test_the_memory_of_steps_is_left_out_of_the_pool_and_reported() -> None:
    spec, device = KVSpec(layers=4, kv_heads=2, head_dim=32, block_size=16, dtype="float32"), Machine("cuda", 10 * GIB)
    settings = EngineSettings(model="unused", max_num_seqs=10_000)
    without = size_pool(settings, spec, device, 4096, 3 * GIB)
    capacity = size_pool(settings, spec, device, 4096, 3 * GIB, reserved_bytes=2 * GIB)
    assert (without.blocks - capacity.blocks) * spec.block_bytes == pytest.approx(2 * GIB, abs=spec.block_bytes)
    assert "2.0 GiB left to steps" in show_arithmetic(capacity, spec, device)
    assert "left to steps" not in show_arithmetic(without, spec, device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"0 B free for it beside the 9\.0 GiB that the largest steps take.*--max-num-batched-tokens"),
        ({"kv_cache_memory_bytes": 2 * GIB}, r"is more than the 1\.0 GiB that are free beside the 9\.0 GiB"),
        ({"num_gpu_blocks_override": 40_000}, r"no room for KV.*beside the 9\.0 GiB that the largest steps take"),
    ],
)
def test_a_pool_that_does_not_fit_beside_the_steps_is_refused_with_the_numbers(
    changes: dict[str, object], message: str
) -> None:
    spec, device = KVSpec(layers=4, kv_heads=2, head_dim=32, block_size=16, dtype="float32"), Machine("cuda", 10 * GIB)
    settings = EngineSettings(model="unused", **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        size_pool(settings, spec, device, 4096, 0, reserved_bytes=9 * GIB)
