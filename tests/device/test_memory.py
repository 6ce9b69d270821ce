"""Free memory, from files of the kernel and of control groups."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.device import memory
from tiercel.values.units import GIB, MIB


def machine(root: Path, *, available: int, total: int, groups: str = "") -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    lines = f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
    (proc / "meminfo").write_text(lines)
    if groups:
        (proc / "self" / "cgroup").write_text(groups)
    return proc, cgroups


def group(folder: Path, **numbers: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in numbers.items():
        (folder / name.replace("_dot_", ".")).write_text(f"{number}\n")


def test_without_control_groups_the_kernel_decides(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available=5 * GIB, total=8 * GIB)
    assert memory.available_bytes(proc, cgroups) == 5 * GIB
    assert memory.total_bytes(proc, cgroups) == 8 * GIB


def test_the_tightest_group_on_the_way_to_the_root_decides(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available=20 * GIB, total=32 * GIB, groups="0::/user/app\n")
    group(cgroups / "user" / "app", memory_dot_max="max", memory_dot_current=1 * GIB)
    group(cgroups / "user", memory_dot_max=4 * GIB, memory_dot_current=1 * GIB)
    assert memory.available_bytes(proc, cgroups) == 3 * GIB
    assert memory.total_bytes(proc, cgroups) == 4 * GIB


def test_page_cache_of_the_group_can_be_dropped_and_counts_as_free(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available=20 * GIB, total=32 * GIB, groups="0::/\n")
    group(cgroups, memory_dot_max=4 * GIB, memory_dot_current=3 * GIB)
    (cgroups / "memory.stat").write_text(f"anon {GIB}\ninactive_file {2 * GIB}\n")
    assert memory.available_bytes(proc, cgroups) == 3 * GIB


def test_version_one_groups_are_understood(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available=20 * GIB, total=32 * GIB, groups="5:cpu:/x\n4:memory:/docker/abc\n")
    # Inside a container the group is mounted at the root, independently of its path outside.
    group(cgroups / "memory", memory_dot_limit_in_bytes=512 * MIB, memory_dot_usage_in_bytes=112 * MIB)
    assert memory.available_bytes(proc, cgroups) == 400 * MIB


def test_the_group_that_leaves_the_least_is_named(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available=20 * GIB, total=32 * GIB, groups="0::/user\n")
    assert memory.tightest(proc, cgroups).limit == "the free memory of the machine"
    group(cgroups / "user", memory_dot_max=4 * GIB, memory_dot_current=1 * GIB)
    assert memory.tightest(proc, cgroups) == (
        3 * GIB,
        f"the limit of 4.0 GiB of the control group {cgroups / 'user'}",
    )


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_counts_and_is_named(limit: str) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.{limit}, (2**30, 2**30));"
        "from tiercel.device.memory import tightest; print(*tightest(), sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    free, words = ran.stdout.splitlines()
    assert 0.5 * GIB < int(free) < GIB
    assert words.startswith("the limit of 1.0 GiB on ") and limit in words


@pytest.mark.parametrize("used", [4 * GIB, 5 * GIB])
def test_a_full_group_has_nothing_free(tmp_path: Path, used: int) -> None:
    proc, cgroups = machine(tmp_path, available=20 * GIB, total=32 * GIB, groups="0::/\n")
    group(cgroups, memory_dot_max=4 * GIB, memory_dot_current=used)
    assert memory.available_bytes(proc, cgroups) == 0


def test_this_machine_has_free_memory() -> None:
    assert 0 < memory.available_bytes() <= memory.total_bytes()
