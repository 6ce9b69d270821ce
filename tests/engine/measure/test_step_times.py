"""The table of step times: from forwards on a manual clock, from damaged files, under a budget."""

import json
import logging
import os
import random
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.engine.recording import FakeRecorder, WeighedSum
from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.measure.step_grid import GridLimits, Slices, StepGrid, StepShape
from tiercel.engine.measure.step_times import TrialForward, measure_step_times, open_step_times, open_trial_arena
from tiercel.engine.measure.stored_times import StoredTimes, open_times_file, read_times, write_times
from tiercel.engine.models.precision import Precision
from tiercel.engine.native.library import load_library
from tiercel.engine.step.graphs import graph_sizes, record_graphs
from tiercel.engine.step.mixed_graphs import mixed_sizes, record_mixed_graphs
from tiercel.scheduler.cost import StepCosts, StepTimes, linear_times
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import ManualClock
from tiercel.values.errors import DeviceError
from tiercel.values.facts import Facts
from tiercel.values.tier import Capacity, KVSpec

SPEC = KVSpec(layers=1, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
LIMITS = GridLimits(max_num_seqs=64, step_tokens=256, max_model_len=4096, kv_tokens=100_000)
NOWHERE = open_times_file(None, {})


def linear_ms(tokens: int, decodes: int, context: int, pairs: int) -> float:
    """The time of a step by a formula."""
    return 2 + 0.05 * tokens + 0.1 * decodes + 0.0004 * context + 0.00002 * pairs


class TimedModel:
    """A model that advances the clock by the formula in every forward."""

    layers, kv_heads, head_dim, vocab_size, max_model_len = 1, 1, 4, 50, 4096
    precision = Precision.of(torch.float32)
    impl, weights_bytes, fingerprint, is_capturable = "native", 0, bytes(32), False

    def __init__(
        self, clock: ManualClock, formula: Callable[[int, int, int, int], float] = linear_ms, noise: float = 0.0
    ) -> None:
        self.clock = clock
        self._formula = formula
        self._noise = noise
        self._rng = random.Random(1)
        self.forwards = 0

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        self.forwards += 1
        starts = state.query_starts
        lengths = [end - start for start, end in pairwise(starts)]
        befores = [total - length for total, length in zip(state.context_lengths, lengths, strict=True)]
        assert len(tokens) == sum(lengths) == len(state.positions) == len(state.slot_ids)
        assert min(befores) >= 0 and max(state.context_lengths) <= self.max_model_len
        assert not state.slot_ids.any() and int(state.block_tables.max()) < kv.shape[0]
        decodes = [before for before, length in zip(befores, lengths, strict=True) if length == 1]
        pairs = sum(length * before for before, length in zip(befores, lengths, strict=True) if length > 1)
        ms = self._formula(len(tokens), len(decodes), sum(befores), pairs)
        self.clock.advance(ms * (1 + self._noise * self._rng.random()) / 1e3)
        return torch.zeros(len(tokens), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def measure(
    budget_s: float,
    file: CacheFile[StoredTimes] = NOWHERE,
    limits: GridLimits = LIMITS,
    model: TimedModel | None = None,
) -> tuple[StepTimes, TimedModel, float]:
    """Return the table, the model that was measured, and the seconds of the measurement."""
    used = model or TimedModel(ManualClock())
    clock = used.clock
    started_s = clock.now_s()
    kv = torch.zeros(8, 1, 16, 1, 8)
    trial = TrialForward(used, kv, SPEC, InlineLane(), clock)
    times = measure_step_times(trial, clock, limits, budget_s, file)
    return times, used, clock.now_s() - started_s


def expected_ms(shape: StepShape, limits: GridLimits = LIMITS) -> float:
    slices = StepGrid(limits).slices(shape)
    assert slices is not None
    _, tokens, decodes, _, pairs, _ = slices.parts().tolist()
    return linear_ms(int(tokens), int(decodes), shape.context_tokens, int(pairs))


def at(times: StepTimes, shape: StepShape) -> float:
    axes = (times.prefill_tokens, times.decodes, times.context_tokens)
    prefill, decodes, context = (axis.index(value) for axis, value in zip(axes, shape, strict=True))
    return times.ms[(prefill * len(axes[1]) + decodes) * len(axes[2]) + context]


def is_monotone(times: StepTimes) -> bool:
    axes = (times.prefill_tokens, times.decodes, times.context_tokens)
    shapes = [StepShape(*values) for values in product(*axes)]
    by_shape = dict(zip(shapes, times.ms, strict=True))
    for place, axis in enumerate(axes):
        for low, high in pairwise(axis):
            for shape in shapes:
                if shape[place] == low:
                    larger = StepShape(*(high if other == place else value for other, value in enumerate(shape)))
                    if by_shape[shape] > by_shape[larger]:
                        return False
    return True


def test_a_full_table_equals_the_formula_at_its_points() -> None:
    times, _, _ = measure(1e6)
    grid = StepGrid(LIMITS)
    for shape in grid.shapes():
        assert at(times, shape) == pytest.approx(expected_ms(shape), rel=0.02)
    costs, rng = StepCosts(times), random.Random(0)
    for _ in range(200):
        # Inside one cell of context, in which the owner of the context does not change.
        shape = StepShape(rng.randrange(0, 192), rng.randrange(1, 64), rng.randrange(0, 3800))
        predicted, wanted = costs.predict_ms(*shape), expected_ms(shape)
        assert 0.75 * wanted < predicted < 1.5 * wanted, shape


def test_a_few_points_give_the_whole_table() -> None:
    times, model, _ = measure(1.0)
    assert model.forwards < 3 * len(StepGrid(LIMITS).shapes())
    assert is_monotone(times)
    for shape in StepGrid(LIMITS).shapes():
        assert at(times, shape) == pytest.approx(expected_ms(shape), rel=0.5), shape


def test_the_budget_is_kept() -> None:
    for budget_s in (0.01, 0.1, 0.5, 2.0):
        _, model, spent_s = measure(budget_s)
        longest_s = max(expected_ms(shape) for shape in StepGrid(LIMITS).shapes()) / 1e3
        assert spent_s <= budget_s + min(longest_s, budget_s)
        assert model.forwards >= 1


def test_a_model_slower_than_the_budget_gets_one_forward() -> None:
    clock = ManualClock()
    times, model, _ = measure(1.0, model=TimedModel(clock, lambda tokens, *_: 3000.0 * tokens))
    assert model.forwards == 1
    assert is_monotone(times)
    assert StepCosts(times).predict_ms(0, 1, 0) == pytest.approx(3000)
    assert StepCosts(times).predict_ms(256, 0, 0) > 3000


def test_no_budget_is_the_linear_default() -> None:
    times, model, _ = measure(0)
    assert times == linear_times()
    assert model.forwards == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_table_rises_along_every_axis_for_any_measurements(seed: int) -> None:
    rng = random.Random(seed)
    grid = StepGrid(LIMITS)
    shapes = grid.shapes()
    measured = {shape: rng.uniform(0.1, 100) for shape in rng.sample(shapes, rng.randrange(1, len(shapes)))}
    times = grid.table(measured)
    assert is_monotone(times)
    StepCosts(times)
    assert min(times.ms) > 0


def test_monotone_measurements_are_kept() -> None:
    grid = StepGrid(LIMITS)
    measured = {shape: expected_ms(shape) for shape in grid.shapes()[::3]}
    times = grid.table(measured)
    for shape, ms in measured.items():
        assert at(times, shape) == pytest.approx(ms, rel=1e-5)


def test_the_fastest_run_removes_noise() -> None:
    clock = ManualClock()
    times, _, _ = measure(1e6, model=TimedModel(clock, noise=1.0))
    ratios = [at(times, shape) / expected_ms(shape) for shape in StepGrid(LIMITS).shapes()]
    assert sum(ratios) / len(ratios) < 1.4


@pytest.mark.parametrize(
    "limits",
    [
        GridLimits(max_num_seqs=1, step_tokens=1, max_model_len=2, kv_tokens=16),
        GridLimits(max_num_seqs=1, step_tokens=8192, max_model_len=100, kv_tokens=128),
        GridLimits(max_num_seqs=300, step_tokens=300, max_model_len=4096, kv_tokens=64),
        GridLimits(max_num_seqs=4, step_tokens=2048, max_model_len=4000, kv_tokens=1 << 24),
    ],
)
def test_unusual_limits_have_tables(limits: GridLimits) -> None:
    clock = ManualClock()
    times, _, _ = measure(5.0, limits=limits, model=TimedModel(clock))
    assert is_monotone(times)
    assert times.decodes[-1] == limits.max_num_seqs and times.prefill_tokens[-1] == limits.step_tokens
    StepCosts(times)


def test_every_shape_consists_of_possible_sequences() -> None:
    grid, rng = StepGrid(LIMITS), random.Random(3)
    for _ in range(500):
        shape = StepShape(rng.choice((0, rng.randrange(2, 256))), rng.randrange(0, 64), rng.randrange(0, 200_000))
        slices = grid.slices(shape)
        if slices is None:
            continue
        assert sum(slices.starts) == shape.context_tokens
        assert sum(slices.lengths) == shape.prefill_tokens + shape.decodes
        ends = [start + length for start, length in zip(slices.starts, slices.lengths, strict=True)]
        assert min(slices.starts) >= 0 and max(ends) <= LIMITS.max_model_len


def test_a_restart_uses_the_file_and_measures_missing_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = open_times_file(str(tmp_path / "new" / "cache"), {"model": "a"})
    grid = StepGrid(LIMITS)
    sizes: list[int] = []
    for _ in range(40):
        _, model, _ = measure(2.0, file)
        sizes.append(len(read_times(file, grid)))
        if not model.forwards:
            break
    assert 1 < sizes[0] < sizes[1] < sizes[-1] and sizes[-1] == sizes[-2]
    assert file.path is not None and file.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]  # no temporary file is left
    reported = [record.getMessage() for record in caplog.records]
    assert [line.split()[2] for line in (reported[0], reported[1], reported[-1])] == [
        "source=measured",
        "source=both",
        "source=file",
    ]
    again, model, _ = measure(1e6, open_times_file(None, {}))
    cached, _, _ = measure(0.5, file)
    assert StepCosts(cached).predict_ms(200, 3, 500) == pytest.approx(StepCosts(again).predict_ms(200, 3, 500), rel=0.3)


def test_free_memory_does_not_change_the_file(tmp_path: Path) -> None:
    settings = EngineSettings(model="unused", calibration_s=1.0, cache_folder=str(tmp_path), max_num_seqs=8)
    kv, device = torch.zeros(8, 1, 16, 1, 8), CpuDevice(1)
    for blocks, length, has_file in ((5000, 4096, False), (9000, 4096, True), (200, 3200, False), (210, 3360, True)):
        clock = ManualClock()
        capacity = Capacity(blocks=blocks, block_size=16, max_model_len=length, weights_bytes=0, kv_bytes=0)
        model = TimedModel(clock)
        before = set(tmp_path.iterdir())
        open_step_times(settings, model, kv, SPEC, device, InlineLane(), clock, capacity)
        assert (set(tmp_path.iterdir()) == before) is has_file
    clock = ManualClock()
    model, changed = TimedModel(clock), replace(settings, threads=1, attention_backend="sdpa")
    open_step_times(changed, model, kv, SPEC, device, InlineLane(), clock, capacity)
    assert len(list(tmp_path.iterdir())) == 3


class PricedModel(TimedModel):
    """A model whose forwards in graphs have a time of their own, by the rows and contexts on the device."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.is_replayed = False

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        if not self.is_replayed:
            return super().forward(tokens, kv, state)
        lengths = state.device_context_lengths
        assert not state.slot_ids.any() and int(state.block_tables.max()) < kv.shape[0]
        assert torch.equal(lengths, state.positions.to(lengths.dtype) + 1)
        self.clock.advance((1 + 0.01 * len(tokens) + 1e-4 * int((lengths - 1).sum())) / 1e3)
        return torch.zeros(len(tokens), 1)


class PricedGraph:
    """A graph that repeats its job."""

    def __init__(self, model: PricedModel, job: Callable[[], Tensor]) -> None:
        self._model = model
        self._job = job

    def replay(self) -> Tensor:
        self._model.is_replayed = True
        try:
            return self._job()
        finally:
            self._model.is_replayed = False


class PricedRecorder:
    """A recorder of such graphs."""

    def __init__(self, model: PricedModel) -> None:
        self._model = model

    def record(self, job: Callable[[], Tensor]) -> PricedGraph:
        return PricedGraph(self._model, job)


def test_decodes_that_run_in_graphs_are_measured_in_them() -> None:
    model = PricedModel(ManualClock())
    kv = torch.zeros(40, 1, 16, 1, 8)
    largest = 16  # rows of the largest graph; up to 64 may decode
    recorder = PricedRecorder(model)
    sizes = graph_sizes(largest)
    graphs = record_graphs(model, kv, 65, 256, InlineLane(), recorder, sizes, lambda done, total: None)
    trial = TrialForward(model, kv, SPEC, InlineLane(), model.clock, graphs)
    times = measure_step_times(trial, model.clock, LIMITS, 1e6, NOWHERE)
    assert {1, 4, 16, 64} <= set(times.decodes)
    for decodes in (1, 4, 16):
        for context in (0, 1024, 4096):
            if context <= decodes * 4095:
                in_graph = 1 + 0.01 * decodes + 1e-4 * context
                assert at(times, StepShape(0, decodes, context)) == pytest.approx(in_graph, rel=1e-3)
    assert at(times, StepShape(0, 64, 0)) == pytest.approx(expected_ms(StepShape(0, 64, 0)), rel=1e-3)
    assert at(times, StepShape(256, 16, 0)) == pytest.approx(expected_ms(StepShape(256, 16, 0)), rel=1e-3)


def test_small_mixed_steps_are_measured_in_their_graphs() -> None:
    class Model(WeighedSum):
        max_model_len = 4096

    model, recorder = Model(), FakeRecorder()
    kv = torch.zeros(40, 1, 16, 1, 2)
    last_tokens = torch.zeros(9, dtype=torch.int64)
    mixed = record_mixed_graphs(
        *(model, kv, last_tokens, 256, InlineLane(), recorder, mixed_sizes(64)), lambda done, total: None
    )
    spec = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="float32")
    trial = TrialForward(model, kv, spec, InlineLane(), ManualClock(), mixed=mixed)
    trial.fastest_ms(Slices(lengths=(60, 1, 1), starts=(0, 20, 7)), 1.0)
    assert recorder.replays > 0
    recorder.replays = 0
    trial.fastest_ms(Slices(lengths=(70, 1, 1), starts=(0, 20, 7)), 1.0)
    assert recorder.replays == 0


def test_starts_with_and_without_graphs_have_different_files(tmp_path: Path) -> None:
    """The driver may refuse a recording at one start and not at the next."""
    settings = EngineSettings(model="unused", calibration_s=1.0, cache_folder=str(tmp_path), max_num_seqs=8)
    kv, device, model = torch.zeros(40, 1, 16, 1, 8), CpuDevice(1), PricedModel(ManualClock())
    capacity = Capacity(blocks=39, block_size=16, max_model_len=600, weights_bytes=0, kv_bytes=0)
    graphs = record_graphs(
        model, kv, 9, 38, InlineLane(), PricedRecorder(model), graph_sizes(8), lambda done, total: None
    )
    for found in (None, graphs, None, graphs):
        times = open_step_times(settings, model, kv, SPEC, device, InlineLane(), model.clock, capacity, found)
        assert (at(times, StepShape(0, 1, 0)) < 1.5) == (found is not None)


def test_the_file_depends_on_the_attention_and_on_the_launch_of_decodes() -> None:
    def facts(is_capturable: bool = False, **changes: object) -> Facts:
        model = TimedModel(ManualClock())
        model.is_capturable = is_capturable
        return machine_facts(EngineSettings(model="unused", **changes), model, SPEC, CpuDevice(1))  # type: ignore[arg-type]

    auto = "grouped" if load_library() is None else "native"
    assert facts() == facts(attention_backend=auto)  # the choice of `auto` on a CPU
    assert facts() != facts(attention_backend="sdpa")
    assert facts(True) != facts(True, enforce_eager=True)
    assert facts() == facts(enforce_eager=True)  # this device has no graphs


def test_another_machine_has_another_file(tmp_path: Path) -> None:
    one, other = open_times_file(str(tmp_path), {"model": "a"}), open_times_file(str(tmp_path), {"model": "b"})
    write_times(one, {StepShape(0, 1, 0): 2.0})
    assert one.path is not None and other.path is not None
    assert read_times(other, StepGrid(LIMITS)) == {}
    os.replace(one.path, other.path)
    assert read_times(other, StepGrid(LIMITS)) == {}


def _stored(**changes: object) -> bytes:
    return json.dumps({"version": 1, "identity": "0" * 64, "times": [[0, 1, 0, 2.0]]} | changes).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b" " * (2 << 20),
        _stored(version=2),
        _stored(version=0),
        _stored(identity="another"),
        _stored(identity="x" * 65),
        _stored(extra=1),
        _stored(times=[[0, 1, 0, -1.0]]),
        _stored(times=[[0, 1, 0, 0.0]]),
        _stored(times=[[0, 1, 0, 1e300]]),
        _stored(times=[[0, -1, 0, 1.0]]),
        _stored(times=[[0, 1 << 50, 0, 1.0]]),
        _stored(times=[[0, 1, 0]]),
        _stored(times=[[0, 1, 0, 1.0, 5]]),
        _stored(times=[[0, "1", 0, 1.0]]),
        _stored(times=[[0, 1, 0, 1.0]] * 10_001),
        b'{"version":1,"identity":"","times":[[0,1,0,NaN]]}',
        b'{"version":1,"identity":"","times":[[0,1,0,Infinity]]}',
    ],
)
def test_a_damaged_file_is_measured_over(tmp_path: Path, content: bytes) -> None:
    file = open_times_file(str(tmp_path), {"model": "a"})
    assert file.path is not None
    identity = file.path.name  # contains the identity
    write_times(file, {StepShape(0, 1, 0): 2.0})
    whole = json.loads(file.path.read_bytes())["identity"]
    assert identity.removeprefix("step-times-").removesuffix(".json") == whole[:24]
    file.path.write_bytes(content.replace(b"0" * 64, whole.encode()))
    assert read_times(file, StepGrid(LIMITS)) == {}
    _, model, _ = measure(0.2, file)
    assert model.forwards
    assert read_times(file, StepGrid(LIMITS))


def test_points_of_another_grid_are_left_out(tmp_path: Path) -> None:
    file = open_times_file(str(tmp_path), {"model": "a"})
    write_times(
        file, {StepShape(0, 1, 0): 2.0, StepShape(3, 1, 0): 2.0, StepShape(0, 0, 0): 1.0, StepShape(0, 1, 99): 2.0}
    )
    assert read_times(file, StepGrid(LIMITS)) == {StepShape(0, 1, 0): 2.0}


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    file = open_times_file(str(tmp_path), {"model": "a"})
    assert file.path is not None
    write_times(file, {StepShape(0, 1, 0): 2.0})
    os.replace(file.path, tmp_path / "target")
    file.path.symlink_to(tmp_path / "target")
    assert read_times(file, StepGrid(LIMITS)) == {}
    file.path.unlink()
    os.mkfifo(file.path)
    assert read_times(file, StepGrid(LIMITS)) == {}
    file.path.unlink()
    file.path.mkdir()
    assert read_times(file, StepGrid(LIMITS)) == {}
    write_times(file, {StepShape(0, 1, 0): 2.0})  # cannot replace a folder, and raises nothing
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    times, model, _ = measure(0.5, open_times_file(str(blocked / "cache"), {"model": "a"}))
    assert model.forwards and is_monotone(times)


def test_a_failed_device_is_reported() -> None:
    class Broken(TimedModel):
        def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
            raise RuntimeError("no kernel")

    with pytest.raises(DeviceError, match="no kernel"):
        measure(1.0, model=Broken(ManualClock()))


def test_trial_steps_on_a_gpu_read_the_whole_arena_of_the_engine() -> None:
    on_device = torch.empty(9000, 2, 16, 1, 8, device="meta")  # as large as no small arena
    assert open_trial_arena(on_device, 7) is on_device
    on_cpu = torch.ones(90, 2, 16, 1, 8)
    arena = open_trial_arena(on_cpu, 7)
    assert arena.shape == (7, 2, 16, 1, 8)
    assert not arena.any()  # pages of its own
