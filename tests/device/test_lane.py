"""Lanes, and opening a device."""

import threading

import pytest
import torch

from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.device.registry import open_device
from tiercel.errors import ConfigError


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
