"""Cores and CPU quotas, on file trees of control groups."""

import os
import threading
from pathlib import Path

import pytest

from tiercel.device.processors import (
    BACKGROUND_NICE,
    cpu_quota,
    default_threads,
    lower_priority,
    show_cores,
    usable_cores,
)


def quota(root: Path, groups: str, files: dict[str, str]) -> float | None:
    """Return the quota of a process in these groups; `files`: path below /sys/fs/cgroup -> contents."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(text)
    return cpu_quota(root / "proc", root / "cgroup")


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/app\n", {"app/cpu.max": "max 100000\n"}, None),
        ("0::/app\n", {"app/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/user/app\n", {"user/app/cpu.max": "max 100000\n", "user/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/user/app\n", {"user/app/cpu.max": "800000 100000\n", "user/cpu.max": "400000 100000\n"}, 4.0),
        # Inside a container the group is mounted at the root, independently of its path outside.
        ("0::/docker/abc\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "250000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("4:memory:/x\n0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/app\n", {"app/cpu.max": "\n"}, None),
        ("", {}, None),
    ],
)
def test_the_smallest_quota_on_the_way_to_the_root_counts(
    tmp_path: Path, groups: str, files: dict[str, str], cores: float | None
) -> None:
    assert quota(tmp_path, groups, files) == cores


def test_without_a_list_of_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("cores", "limit", "threads"),
    [(8, None, 8), (8, 4.0, 4), (8, 3.9, 3), (8, 0.5, 1), (2, 16.0, 2), (1, None, 1)],
)
def test_there_is_a_thread_for_each_core_within_the_quota(cores: int, limit: float | None, threads: int) -> None:
    assert default_threads(range(cores), limit) == threads


@pytest.mark.parametrize(
    ("cores", "text"), [([0, 1], "0-1"), ([3], "3"), ([0, 1, 2, 8, 10, 11], "0-2,8,10-11"), ([], "")]
)
def test_cores_are_shown_like_the_kernels_lists(cores: list[int], text: str) -> None:
    assert show_cores(cores) == text


def test_the_cores_are_those_of_the_affinity_mask() -> None:
    assert set(usable_cores()) == os.sched_getaffinity(0)


def test_only_the_calling_thread_gets_a_lower_priority() -> None:
    nice: list[int] = []

    def work() -> None:
        for _ in range(2):  # the second time changes nothing
            lower_priority()
            nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert nice == [max(before, BACKGROUND_NICE)] * 2
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == before
