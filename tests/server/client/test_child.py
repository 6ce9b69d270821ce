"""The engine's process as its parent starts it."""

import sys

import pytest

from tiercel.server.client.child import EngineChild

_REPORT_ENVIRONMENT = """
import os, socket, sys
names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "TIERCEL_TEST")
socket.socket(fileno=int(sys.argv[2])).sendall(" ".join(os.environ.get(name, "-") for name in names).encode())
"""


def environment() -> list[str]:
    """Return three variables as a child process gets them."""
    with EngineChild.start((sys.executable, "-c", _REPORT_ENVIRONMENT)) as child:
        return child.sock.recv(1000).decode().split()


def test_the_engine_gets_one_openmp_thread_and_a_short_spin_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the number of computing threads is set by `--threads`
    monkeypatch.setenv("TIERCEL_TEST", "kept")
    assert environment() == ["1", "10000", "kept"]


def test_the_operator_may_set_the_spin_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert environment()[1] == "5"
