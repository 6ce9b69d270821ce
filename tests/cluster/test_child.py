"""The program beside an actor: it is announced, drained, killed when it does not end, and never outlives its parent."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tiercel.cluster.child import BoundChild
from tiercel.values.errors import TiercelError

FIRST = "print('serves at port 7', flush=True)"
PATTERN = r"serves at (port \d)"


def child(action: str = "", first: str = FIRST) -> BoundChild:
    return BoundChild(
        [sys.executable, "-c", f"import os, signal, sys, time\n{first}\n{action}\ntime.sleep(60)"], PATTERN
    )


def wait_gone(pid: int) -> None:
    end_s = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_child_is_announced_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    note = tmp_path / "asked"
    action = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(note)!r}, 'w').close(), sys.exit(0)))"
    found = child(f"{action}; print('serves at port 7', flush=True)", first="")
    assert found.wait_announced(20) == "port 7"
    assert found.is_alive
    found.stop(20)
    assert not found.is_alive
    assert note.exists()
    found.stop(20)  # once more does no harm


def test_a_child_that_ignores_the_signal_is_killed() -> None:
    found = child("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('serves at port 8', flush=True)")
    found.wait_announced(20)
    time.sleep(0.2)  # it ignores the signal now
    pid = found.pid
    assert pid is not None
    found.stop(0.3)
    assert not found.is_alive
    wait_gone(pid)


def test_a_child_that_ends_or_says_nothing_is_an_error_that_names_it() -> None:
    with pytest.raises(TiercelError, match="ended"):
        BoundChild([sys.executable, "-c", "raise SystemExit(2)"], PATTERN).wait_announced(20)
    silent = BoundChild([sys.executable, "-c", "import time; time.sleep(60)"], PATTERN)
    with pytest.raises(TiercelError, match=r"does not serve after 0\.2 s"):
        silent.wait_announced(0.2)
    silent.stop(0)
    assert not silent.is_alive


def test_a_dead_child_is_dead_although_a_descendant_holds_its_output() -> None:
    found = child("if os.fork(): os._exit(1)")  # the descendant sleeps for a minute
    assert found.wait_announced(20) == "port 7"
    end_s = time.monotonic() + 20
    while found.is_alive:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_the_last_words_of_a_program_are_read_before_it_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the output is late; a descendant holds the output, so that its end never comes."""
    is_late = threading.Event()
    real = select.select

    def late(*sources: object) -> object:
        assert is_late.wait(20)
        return real(*sources)  # pyright: ignore

    monkeypatch.setattr(select, "select", late)
    found = child("if os.fork(): os._exit(1)")
    pid = found.pid
    assert pid is not None
    while os.path.exists(f"/proc/{pid}"):  # until its end was waited for
        time.sleep(0.01)
    is_late.set()
    assert found.wait_announced(20) == "port 7"


def test_a_descendant_that_never_stops_writing_keeps_no_program_alive(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    found = child(
        f"if os.fork(): os._exit(1)\nwhile not os.path.exists({str(stop)!r}): os.write(1, bytes([10]) * 65536)"
    )
    end_s = time.monotonic() + 20
    try:
        while found.is_alive:
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        stop.touch()


def test_output_that_is_no_text_harms_nothing() -> None:
    found = child(first="sys.stdout.buffer.write(b'\\xff\\xfe\\n'); " + FIRST)
    assert found.wait_announced(20) == "port 7"
    assert found.is_alive
    found.stop(20)


PARENT = """
import sys, time
from tiercel.cluster.child import BoundChild
loop = "import time; print('serves', flush=True); time.sleep(60)"
one = BoundChild([sys.executable, "-c", loop], "(serves)")
one.wait_announced(20)
print(one.pid, flush=True)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = next(int(line) for line in parent.stdout if line.strip().isdigit())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_gone(pid)
