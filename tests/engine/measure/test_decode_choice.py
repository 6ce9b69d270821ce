"""The kernel for single tokens beside FlashAttention-3 is the one that was faster at the start."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.recording import FakeRecorder, WeighedSum
from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.assembly import assemble
from tiercel.engine.attention.fa3 import Fa3Attention, Fa3Operator
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.measure.decode_choice import DecodeTrial, choose_decodes, measure_decodes
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import ManualClock, MonotonicClock
from tiercel.values.errors import DeviceError, OutOfDeviceMemoryError


class Spare:
    """A backend that the model never asks."""

    is_capturable = True

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        raise AssertionError("not asked")


class Kernels:
    """Decodes of both kernels with given times, of which each turn takes the next."""

    def __init__(self, attention: Fa3Attention, fa3_ms: dict[int, list[float]], spare_ms: dict[int, list[float]]):
        self.ran: list[tuple[bool, int]] = []  # left to the spare, rows
        self._attention = attention
        self._ms = {False: fa3_ms, True: spare_ms}

    def prepare(self, rows: int) -> Callable[[], float]:
        is_left = self._attention.leaves_decodes

        def decode() -> float:
            assert self._attention.leaves_decodes == is_left, "the kernel in use is not the one that was prepared"
            self.ran.append((is_left, rows))
            return self._ms[is_left][rows].pop(0)

        return decode


def open_fa3(spare: Spare | None) -> Fa3Attention:
    return Fa3Attention(Fa3Operator(lambda *args, **kwargs: (), "fake"), 132, spare=spare)


@pytest.mark.parametrize(
    ("fa3_ms", "spare_ms", "is_left"),
    [
        ({256: [9.0, 9.0, 9.0]}, {256: [8.0, 8.0, 8.0]}, True),
        ({256: [9.0, 9.0, 9.0]}, {256: [9.0, 9.0, 9.0]}, False),  # no reason to change
        ({256: [9.0, 90.0, 9.0]}, {256: [9.5, 9.5, 9.5]}, False),  # one slow turn does not decide
        ({256: [10.0] * 3, 32: [1.0] * 3}, {256: [9.0] * 3, 32: [1.2] * 3}, False),  # all sizes count the same
    ],
)
def test_decodes_are_left_to_the_spare_if_it_is_faster(
    fa3_ms: dict[int, list[float]], spare_ms: dict[int, list[float]], is_left: bool
) -> None:
    attention = open_fa3(Spare())
    kernels = Kernels(attention, fa3_ms, spare_ms)

    ratio = choose_decodes(attention, kernels.prepare, tuple(fa3_ms))

    assert ratio is not None
    assert (ratio > 1) == attention.leaves_decodes == is_left
    assert kernels.ran[:2] == [(False, next(iter(fa3_ms))), (True, next(iter(fa3_ms)))]  # they take turns


def test_without_a_spare_nothing_is_measured() -> None:
    attention = open_fa3(None)
    assert choose_decodes(attention, Kernels(attention, {}, {}).prepare, (256,)) is None
    assert not attention.leaves_decodes


@pytest.mark.parametrize("error", [DeviceError("x"), OutOfDeviceMemoryError("x")])
def test_a_decode_that_cannot_be_measured_changes_nothing(error: DeviceError) -> None:
    attention = open_fa3(Spare())

    def prepare(rows: int) -> Callable[[], float]:
        if attention.leaves_decodes:
            raise error
        return lambda: 1.0

    assert choose_decodes(attention, prepare, (256, 32)) is None
    assert not attention.leaves_decodes


class TickingModel(WeighedSum):
    """A model whose forward takes a time of the clock that depends on the kernel."""

    def __init__(self, attention: Fa3Attention, clock: ManualClock, spare_s: float) -> None:
        super().__init__()
        self._attention = attention
        self._clock = clock
        self._spare_s = spare_s

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        assert state.is_decode
        self._clock.advance(self._spare_s if self._attention.leaves_decodes else 0.002)
        return super().forward(tokens, kv, state)


@pytest.mark.parametrize("spare_s", [0.001, 0.003])
@pytest.mark.parametrize("has_graphs", [True, False])
def test_decodes_of_the_model_are_timed_on_the_lane(has_graphs: bool, spare_s: float) -> None:
    attention, clock = open_fa3(Spare()), ManualClock(5.0)
    kv = torch.zeros(9, 1, 4, 1, 2)
    recorder = FakeRecorder() if has_graphs else None
    model = TickingModel(attention, clock, spare_s)
    trial = DecodeTrial(model, kv, 4, InlineLane(), clock, recorder)  # type: ignore[arg-type]

    ratio = choose_decodes(attention, trial.prepare, (8, 2))

    assert ratio == pytest.approx(0.002 / spare_s)
    assert attention.leaves_decodes == (spare_s < 0.002)
    if recorder is not None:
        assert [rows for rows, _ in recorder.recorded] == [8, 8, 2, 2]
        assert recorder.replays == 4 * 3 * 4
    assert not kv[1:].any()  # only the null block was written


def test_other_backends_are_left_alone() -> None:
    arguments = (WeighedSum(), torch.zeros(2, 1, 4, 1, 2), 4, CpuDevice(1), InlineLane(), ManualClock(0.0), 8)
    measure_decodes(Spare(), *arguments, has_graphs=True)  # type: ignore[arg-type]
    measure_decodes(None, *arguments, has_graphs=True)  # type: ignore[arg-type]
    assert arguments[0].forwards == 0  # type: ignore[attr-defined]


class Outbox:
    def post(self, message: object) -> None:
        pass


class GraphDevice(CpuDevice):
    """A CPU with a recorder of graphs."""

    def __init__(self, recorder: FakeRecorder) -> None:
        super().__init__(1)
        self._recorder = recorder

    def open_recorder(self) -> FakeRecorder:  # type: ignore[override]
        return self._recorder


def test_the_choice_is_made_before_graphs_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A graph keeps the kernel that it was recorded with."""
    caplog.set_level(logging.INFO)
    recorder, attention = FakeRecorder(), open_fa3(Spare())
    settings = EngineSettings(model=str(tmp_path), block_size=4, max_num_seqs=2, num_gpu_blocks_override=60)
    arguments = (settings, WeighedSum(), GraphDevice(recorder), Outbox(), MonotonicClock())

    assemble(*arguments, attention=attention).close()  # type: ignore[arg-type]

    # Both kernels, then the graphs of decodes, then those of mixed steps.
    assert [rows for rows, _ in recorder.recorded][:5] == [2, 2, 2, 1, 256]
    (line,) = [line for line in caplog.messages if line.startswith("decodes measured")]
    assert line.endswith("chosen=spare" if attention.leaves_decodes else "chosen=fake")
