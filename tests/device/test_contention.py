"""Waiting and idle times, on a file tree in the format of /proc and on this machine."""

import threading
from pathlib import Path

import pytest

from tiercel.device.contention import KernelContention, name_thread


def write_thread(proc: Path, thread: int, name: str, waited_s: float) -> None:
    folder = proc / "self/task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "schedstat").write_text(f"123 {round(waited_s * 1e9)} 7\n")


def write_stat(proc: Path, *idle_ticks: int) -> None:
    """Write one line for each core with half of the time in the field of I/O waits, which are idle time too."""
    lines = [f"cpu{core} 1 2 3 {ticks // 2} {ticks - ticks // 2} 6 7 8 0 0" for core, ticks in enumerate(idle_ticks)]
    (proc / "stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 0 0", *lines, "intr 1 2 3"]))


def test_waiting_counts_for_threads_of_the_team_only(tmp_path: Path) -> None:
    write_thread(tmp_path, 10, "python", 5.0)
    write_thread(tmp_path, 11, "team", 1.0)
    contention = KernelContention("team", [0], tmp_path)
    contention.waited_s()
    write_thread(tmp_path, 10, "python", 9.0)
    write_thread(tmp_path, 11, "team", 1.5)
    write_thread(tmp_path, 12, "team", 0.25)  # a new thread
    assert contention.waited_s() == pytest.approx(0.75)


def test_a_thread_that_ends_takes_nothing_away(tmp_path: Path) -> None:
    for thread in (11, 12):
        write_thread(tmp_path, thread, "team", 3.0)
    contention = KernelContention("team", [0], tmp_path)
    contention.waited_s()
    for path in sorted((tmp_path / "self/task/12").iterdir()):
        path.unlink()
    write_thread(tmp_path, 11, "team", 3.1)
    assert contention.waited_s() == pytest.approx(0.1)


def test_idle_time_counts_for_the_given_cores_only(tmp_path: Path) -> None:
    contention = KernelContention("team", [0, 2], tmp_path)
    write_stat(tmp_path, 1000, 1000, 1000)
    contention.idle_s()
    write_stat(tmp_path, 1010, 1500, 1030)
    assert contention.idle_s() == pytest.approx(0.4)  # 40 ticks of 10 ms


def test_times_that_the_kernel_does_not_count_are_unknown(tmp_path: Path) -> None:
    contention = KernelContention("team", [0], tmp_path)
    assert contention.waited_s() is None
    assert contention.idle_s() is None
    (tmp_path / "self/task/11").mkdir(parents=True)
    (tmp_path / "self/task/11/comm").write_text("team\n")
    assert contention.waited_s() is None


def test_this_kernel_counts_the_waiting_of_a_named_thread() -> None:
    contention, answers = KernelContention("a-test-team", [0]), list[float | None]()

    def work() -> None:
        name_thread("a-test-team")
        answers.extend([contention.waited_s(), contention.waited_s()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not Path("/proc/self/schedstat").exists():
        assert answers == [None, None]
    else:
        assert answers[1] is not None and answers[1] >= 0
