"""Lanes, and opening a device."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tiercel.device.cpu import CpuDevice, CpuLane, InlineLane
from tiercel.device.registry import open_device
from tiercel.device.team import Team
from tiercel.values.clock import ManualClock
from tiercel.values.errors import ConfigError


def test_jobs_run_in_order_beside_the_caller() -> None:
    lane = CpuDevice(threads=1).open_lane()
    gate, order = threading.Event(), list[int]()

    def job(number: int) -> int:
        gate.wait(10)
        order.append(number)
        return number

    pending = [lane.run(lambda number=number: job(number)) for number in range(5)]
    assert order == []
    gate.set()
    assert [one.result() for one in pending] == order == list(range(5))
    lane.close()


def test_an_exception_of_a_job_is_raised_by_its_result() -> None:
    lane = CpuDevice(threads=1).open_lane()
    bad, good = lane.run(lambda: 1 // 0), lane.run(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == 7
    lane.close()


def test_the_lane_computes_with_the_threads_it_was_given() -> None:
    lane = CpuDevice(threads=1).open_lane()
    assert lane.run(torch.get_num_threads).result() == 1
    lane.close()


class Crowd:
    """Other processes take half of the time of a team of two, and nothing from one thread."""

    width = 2

    def waited_s(self) -> float:
        return float(self.width > 1)

    def idle_s(self) -> float:
        return 0.0


def test_the_lane_computes_with_fewer_threads_while_others_have_the_cores() -> None:
    crowd, clock = Crowd(), ManualClock()
    executor = ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(2))
    lane = CpuLane(executor, 2, Team(2, crowd, clock))

    def job() -> int:
        clock.advance(1.0)
        return torch.get_num_threads()

    assert [lane.run(job).result() for _ in range(2)] == [2, 1]
    assert lane.threads == 1
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda: 1 // 0).result()
    crowd.width = 1
    assert lane.run(job).result() == 1
    assert lane.run(job).result() == 2  # tried again after a second
    lane.close()


def test_more_threads_than_cores_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    CpuDevice(threads=1).open_lane().close()
    assert not caplog.records
    CpuDevice(threads=1000).open_lane().close()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "set --threads to" in record.getMessage()


def test_the_lane_has_its_thread_before_its_first_job() -> None:
    """A Ctrl-C during the start of the thread would leave it running without being joined."""
    before = set(threading.enumerate())
    lane = CpuDevice(threads=1).open_lane()
    (worker,) = set(threading.enumerate()) - before
    assert lane.run(threading.current_thread).result() is worker
    lane.close()
    assert not worker.is_alive()


def test_a_mark_is_past_when_all_work_queued_before_it_has_ended() -> None:
    device = CpuDevice(threads=1)
    lane, gate = device.open_lane(), threading.Event()
    assert lane.run(int).result() == 0
    pending = lane.run(lambda: gate.wait(10))
    mark = lane.mark()
    behind = threading.Event()
    lane.run(lambda: behind.wait(10))
    assert not mark.is_past()
    gate.set()
    mark.wait()
    assert mark.is_past() and pending.result()
    assert not lane.mark().is_past()
    behind.set()
    lane.close()
    assert InlineLane().mark().is_past()


def test_a_cpu_reports_its_cores_and_no_capability() -> None:
    assert (CpuDevice(threads=3).processors, CpuDevice(threads=3).capability) == (3, None)


def test_a_cuda_device_is_refused_where_torch_sees_none() -> None:
    if torch.cuda.is_available():
        assert open_device("cuda").name == "cuda"
        return
    assert open_device("auto").name == "cpu"
    with pytest.raises(ConfigError, match="sees no GPU"):
        open_device("cuda")
