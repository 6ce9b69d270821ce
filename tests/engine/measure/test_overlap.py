"""The gate of overlapping halves: its table, the measurement, and the engine that follows it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import overlap
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.targets import overlap_verdict, values_of
from tests.engine.recording import FakeRecorder
from tests.engine.step.test_halves import PhasedSum
from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.assembly import assemble
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.measure.overlap_search import (
    LEAST_GAIN,
    OverlapBench,
    OverlapGate,
    OverlapRow,
    OverlapTable,
    calibrate_overlap,
    open_overlap,
    open_overlap_file,
    search_overlap,
)
from tiercel.engine.models.base import kv_spec
from tiercel.engine.step.graphs import record_graphs
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import ManualClock, MonotonicClock
from tiercel.values.errors import ConfigError
from tiercel.values.ids import SeqId
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import FromEngine, Report, Submit


def gate(*rows: tuple[int, int, float]) -> OverlapGate:
    return OverlapGate(OverlapTable(rows=tuple(OverlapRow(*row) for row in rows)))


def test_without_a_table_nothing_overlaps() -> None:
    closed = OverlapGate()
    assert not closed.is_open
    assert not any(closed.has_decode(rows) for rows in (1, 64, 512))
    assert not closed.has_step(2048, 512)


def test_a_step_overlaps_if_the_nearest_shape_gains_enough() -> None:
    found = gate((128, 128, 1.14), (256, 256, LEAST_GAIN), (1024, 256, 1.2), (2048, 256, 1.1))
    assert found.is_open
    assert [rows for rows in (64, 96, 128, 180, 184, 256, 384, 400) if found.has_decode(rows)] == [184, 256, 384]
    assert [tokens for tokens in (600, 700, 1024, 1400, 1500, 2048) if found.has_step(tokens, 256)] == [700, 1024, 1400]
    # Neither a decode nor a step with far fewer decodes says anything about a mixed step.
    assert not found.has_step(256, 10)
    assert not found.has_step(1024, 100)
    assert not found.has_step(1024, 1024)
    assert not gate((256, 256, 1.149)).is_open


class BothQueues:
    """A fork that runs everything at once and counts its meetings."""

    def __init__(self) -> None:
        self.meetings = 0

    def meet(self) -> None:
        self.meetings += 1

    def aside(self, job: Callable[[], object]) -> None:
        job()


class Outbox:
    """The tokens that the HTTP process gets."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def post(self, message: FromEngine) -> None:
        if isinstance(message, Report):
            seqs = memoryview(message.seqs).cast("Q")
            for seq, token in zip(seqs, memoryview(message.tokens).cast("I"), strict=True):
                self.tokens.setdefault(seq, []).append(token)


class TimedSum(PhasedSum):
    """A model with a time for each token; in halves a token costs another one."""

    max_model_len = 4096

    def __init__(self, clock: ManualClock, ms_whole: float, ms_half: float) -> None:
        super().__init__()
        self.clock = clock
        self.ms_whole = ms_whole
        self.ms_half = ms_half
        self.is_capturable = True

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        assert not state.slot_ids.any()  # trials write the null block
        self.clock.advance(len(tokens) * self.ms_whole / 1e3)
        return torch.zeros(len(tokens), 1)

    def phases(self, tokens: Tensor, kv: Tensor, state: ForwardState):
        assert not state.slot_ids.any()
        self.clock.advance(len(tokens) * self.ms_half / 1e3)
        return super().phases(tokens, kv, state)


class ForkingDevice(CpuDevice):
    """A CPU with a recorder of graphs and a second queue."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fork = BothQueues()
        self.forks = 0

    def open_recorder(self) -> FakeRecorder:  # type: ignore[override]
        return FakeRecorder()

    def open_fork(self) -> BothQueues:  # type: ignore[override]
        self.forks += 1
        return self.fork

    @property
    def meetings(self) -> int:
        return self.fork.meetings


def test_the_gain_is_the_serial_time_over_that_of_halves() -> None:
    clock = ManualClock()
    model = TimedSum(clock, 3.0, 2.0)
    spec = kv_spec(model, 16)  # type: ignore[arg-type]
    bench = OverlapBench(model, spec, 99, ForkingDevice(), BothQueues(), InlineLane(), clock)  # type: ignore[arg-type]
    shapes = list(bench.shapes(1024, 128))
    assert shapes == [(64, 64), (128, 128), (768, 0), (768, 128), (1024, 0), (1024, 128)]
    rows = search_overlap(bench, [(64, 64), (768, 128), (768, 0)])
    assert [(row.tokens, row.decodes) for row in rows] == [(64, 64), (768, 128), (768, 0)]
    assert [row.gain for row in rows] == [pytest.approx(1.5)] * 3


def test_a_model_without_phases_cannot_be_calibrated() -> None:
    model = TimedSum(ManualClock(), 1.0, 1.0)
    model.is_capturable = False
    with pytest.raises(ConfigError, match="halves of steps do not overlap"):
        OverlapBench(
            model, kv_spec(model, 16), 9, ForkingDevice(), BothQueues(), InlineLane(), model.clock  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "enforce_eager", "opens"), [(1.2, False, True), (1.2, True, False), (1.1, False, False)]
)
def test_the_stored_table_opens_the_gate_of_the_next_start(
    gain: float, enforce_eager: bool, opens: bool, tmp_path: Path
) -> None:
    settings = EngineSettings(model="unused", cache_folder=str(tmp_path), enforce_eager=enforce_eager)
    model, device = TimedSum(ManualClock(), 1.0, 1.0), ForkingDevice()
    spec = kv_spec(model, 16)  # type: ignore[arg-type]
    assert open_overlap(settings, model, spec, device) is None  # type: ignore[arg-type]
    file = open_overlap_file(str(tmp_path), machine_facts(settings, model, spec, device))  # type: ignore[arg-type]
    file.write(OverlapTable(identity=file.identity, rows=(OverlapRow(8, 8, gain),)))
    found = open_overlap(settings, model, spec, device)  # type: ignore[arg-type]
    assert (found is not None) == opens == (device.forks > 0)
    kv = torch.zeros(9, 3, 4, 1, 2)
    graphs = record_graphs(
        PhasedSum(), kv, 9, 2, InlineLane(), FakeRecorder(), (2, 8), lambda done, total: None, found  # type: ignore[arg-type]
    )  # fmt: skip
    assert graphs is not None and graphs.halved == ((8,) if opens else ())


def test_the_section_of_the_benchmark_records_the_gains_and_the_best(tmp_path: Path) -> None:
    clock = ManualClock()
    model = TimedSum(clock, 3.0, 2.0)
    spec = kv_spec(model, 16)  # type: ignore[arg-type]
    trial = OverlapBench(model, spec, 99, ForkingDevice(), BothQueues(), InlineLane(), clock)  # type: ignore[arg-type]
    bench = Bench("overlap", 1e6, tmp_path / "overlap.json")
    overlap.measure_built(bench, trial, ((64, 64), (128, 768)))
    values = values_of(bench.result.figures)
    assert values == {
        name: pytest.approx(1.5) for name in ("overlap.built.64_64", "overlap.built.128_768", "overlap.built_best")
    }
    assert "yes: run `tiercel calibrate" in overlap_verdict(values)


def test_an_engine_with_the_table_gives_the_tokens_of_one_without(tmp_path: Path) -> None:
    settings = EngineSettings(
        model=str(tmp_path), block_size=4, max_num_seqs=6, num_gpu_blocks_override=200, cache_folder=str(tmp_path),
        calibration_s=0.0, max_num_batched_tokens=600,
    )  # fmt: skip
    output: list[dict[int, list[int]]] = []
    for has_table in (False, True):
        model, device, client = PhasedSum(), ForkingDevice(), Outbox()
        if has_table:
            file = open_overlap_file(str(tmp_path), machine_facts(settings, model, kv_spec(model, 4), device))  # type: ignore[arg-type]
            rows = (OverlapRow(6, 6, 1.3), OverlapRow(520, 0, 1.3))
            file.write(OverlapTable(identity=file.identity, rows=rows))
        engine = assemble(settings, model, device, client, MonotonicClock())  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        for n in range(1, 7):
            prompt = pack_tokens([(n * at) % 11 for at in range(80 + n)])  # more than 512 tokens in all: no graph
            engine.loop.take([Submit(Request(id=SeqId(n), prompt=prompt, params=params, arrival_s=0.0))])
        while not engine.loop.is_idle:
            engine.loop.step()
        engine.close()
        assert (device.meetings > 0) == has_table
        output.append(client.tokens)
    assert output[0] == output[1]
    assert {len(tokens) for tokens in output[0].values()} == {9}


def test_a_device_without_a_second_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlapping halves need CUDA graphs"):
        calibrate_overlap(EngineSettings(model="unused"), lambda row: None, CpuDevice(1))
    with pytest.raises(ConfigError, match="--enforce-eager"):
        calibrate_overlap(EngineSettings(model="unused", enforce_eager=True), lambda row: None, ForkingDevice())
