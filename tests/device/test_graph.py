"""Recording without a GPU: fakes of torch's streams and graphs note their calls."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tiercel.device.graph import CudaGraphRecorder, is_from_shortage
from tiercel.values.errors import DeviceError, OutOfDeviceMemoryError


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
        return torch.full((3,), float(len(self.collects)))

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
def test_a_failure_leaves_lane_allocator_and_collector_as_they_were(cuda: FakeCuda, step: str) -> None:
    recorder = open_recorder(cuda)
    recorder.record(cuda.job)
    cuda.fails_at = step
    with pytest.raises(OutOfDeviceMemoryError, match="RuntimeError: CUDA error: out of memory"):
        recorder.record(cuda.job)
    assert cuda.running is cuda.lane
    assert cuda.ended == [(5, (0, 1))]  # the allocator no longer allocates from the pool
    assert gc.isenabled()


def test_all_graphs_write_their_results_to_the_same_rows(cuda: FakeCuda) -> None:
    """Results that stay where the job put them would be kept once for each size."""
    recorder = open_recorder(cuda)
    jobs = [torch.tensor([[1.0, -0.0], [torch.inf, torch.nan]]), torch.tensor([[5.0, 6.0]])]

    large, small = (recorder.record(lambda job=job: job).replay() for job in jobs)

    assert large.untyped_storage().data_ptr() == small.untyped_storage().data_ptr()
    assert large.data_ptr() == small.data_ptr()
    assert all(large.untyped_storage().data_ptr() != job.untyped_storage().data_ptr() for job in jobs)
    assert torch.equal(small, jobs[1])  # written last
    assert large[1].isinf().tolist() == [True, False] and large[1].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    "second", [torch.zeros(3, 2), torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.bfloat16)], ids=str
)
def test_a_result_that_does_not_fit_the_first_one_is_refused(cuda: FakeCuda, second: Tensor) -> None:
    recorder = open_recorder(cuda)
    recorder.record(lambda: torch.zeros(2, 2))

    with pytest.raises(DeviceError, match=r"graph\.result"):
        recorder.record(lambda: second)


def test_other_errors_of_a_recording_are_not_shortages(cuda: FakeCuda) -> None:
    def job() -> Tensor:
        raise RuntimeError("no kernel image")

    with pytest.raises(DeviceError, match="no kernel image") as caught:
        open_recorder(cuda).record(job)
    assert not isinstance(caught.value, OutOfDeviceMemoryError)


@pytest.mark.parametrize("step", ["instantiate", "replay"])
def test_a_graph_that_failed_is_freed_with_those_before_it(cuda: FakeCuda, step: str) -> None:
    recorder = open_recorder(cuda)
    first = recorder.record(cuda.job)
    cuda.fails_at = step
    with pytest.raises(DeviceError):
        recorder.record(cuda.job)
    del first
    gc.collect()
    assert cuda.graphs == 0
