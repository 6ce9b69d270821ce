"""Recording without a GPU: fakes of torch's streams and graphs note their calls."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tiercel.device import graph
from tiercel.device.graph import CudaGraphRecorder, is_from_shortage
from tiercel.errors import DeviceError, OutOfDeviceMemoryError


def broken_off(first: Exception) -> RuntimeError:
    """A context that raises at its end, as a capture does if a job in it failed."""
    try:
        try:
            raise first
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        return error


def test_a_shortage_is_found_behind_the_error_of_an_aborted_capture() -> None:
    assert is_from_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_from_shortage(broken_off(torch.OutOfMemoryError("CUDA out of memory")))
    assert not is_from_shortage(broken_off(ValueError("something else")))


class FakeCuda:
    """A fake of `torch.cuda`: a lane, a stream that records, and graphs. `fails_at` is the step that raises."""

    def __init__(self) -> None:
        self.lane, self.side = FakeStream("lane", self), FakeStream("side", self)
        self.running = self.lane
        self.steps: list[str] = []
        self.fails_at = ""
        self.graphs = 0  # alive
        self.collects: list[bool] = []  # whether Python's collector might have run in a job
        self.ended: list[tuple[int, object]] = []

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails_at:
            raise RuntimeError("CUDA error: out of memory")

    def job(self) -> Tensor:
        self.step(f"job on {self.running.name}")
        self.collects.append(gc.isenabled())
        return torch.zeros(3)

    def end_allocations(self, device: int, pool: object) -> None:
        """Raises for a pool without allocations, as torch does."""
        self.ended.append((device, pool))
        raise RuntimeError("not currently recording to the pool")

    def current_stream(self) -> "FakeStream":
        return self.running

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.running = self.running, stream
        try:
            yield
        finally:
            self.running = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: "FakeStream", capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ((0, 1), "thread_local")
        self.step("begin")
        with self.stream(stream):
            yield
        self.step("instantiate")


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name = name
        self._cuda = cuda

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.step(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class FakeGraph:
        def __init__(self) -> None:
            fake.graphs += 1

        def __del__(self) -> None:
            fake.graphs -= 1

        def replay(self) -> None:
            fake.step("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocations)
    for name in ("current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    # Patched like the functions of torch above: it works with GPU memory only.
    monkeypatch.setattr(graph, "_borrow", lambda tensor: tensor)
    return fake


def open_recorder(cuda: FakeCuda) -> CudaGraphRecorder:
    return CudaGraphRecorder(cuda.side, (0, 1))  # type: ignore[arg-type]


WARM_UP = ["side waits for lane", "job on side", "job on side"]
RECORDING = [*WARM_UP, "begin", "job on side", "instantiate", "lane waits for side", "replay"]


def test_a_recording_is_warmed_up_behind_the_lane_and_brought_to_the_device_before_it_counts(cuda: FakeCuda) -> None:
    recorded = open_recorder(cuda).record(cuda.job)
    assert cuda.steps == RECORDING
    assert recorded.replay().shape == (3,)
    assert cuda.steps == [*RECORDING, "replay"]
    assert cuda.collects == [True, True, False]  # it would abort the recording
    assert cuda.ended == []


@pytest.mark.parametrize("step", sorted(set(RECORDING)))
def test_a_failure_affects_only_its_own_recording(cuda: FakeCuda, step: str) -> None:
    recorder = open_recorder(cuda)
    first = recorder.record(cuda.job)
    cuda.fails_at = step
    with pytest.raises(OutOfDeviceMemoryError, match="RuntimeError: CUDA error: out of memory"):
        recorder.record(cuda.job)
    cuda.fails_at = ""
    assert cuda.running is cuda.lane
    assert first.replay().shape == (3,)
    assert cuda.ended == [(5, (0, 1))]  # the allocator no longer allocates from the pool
    assert gc.isenabled()


def test_other_errors_of_a_recording_are_not_shortages(cuda: FakeCuda) -> None:
    def job() -> Tensor:
        raise RuntimeError("no kernel image")

    with pytest.raises(DeviceError, match="no kernel image") as caught:
        open_recorder(cuda).record(job)
    assert not isinstance(caught.value, OutOfDeviceMemoryError)


@pytest.mark.parametrize("step", ["instantiate", "replay"])
def test_a_graph_that_failed_is_kept_as_long_as_those_before_it(cuda: FakeCuda, step: str) -> None:
    recorder = open_recorder(cuda)
    first = recorder.record(cuda.job)
    cuda.fails_at = step
    with pytest.raises(DeviceError):
        recorder.record(cuda.job)
    del recorder  # not needed after recording
    gc.collect()
    assert cuda.graphs == 2
    del first
    gc.collect()
    assert cuda.graphs == 0
