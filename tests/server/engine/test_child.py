"""The engine's process as its parent starts it."""

import sys

import pytest

from tiercel.server.engine.child import EngineChild

_TELL = """
import os, socket, sys
names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "TIERCEL_TEST")
socket.socket(fileno=int(sys.argv[2])).sendall(" ".join(os.environ.get(name, "-") for name in names).encode())
"""


def told() -> list[str]:
    """What a child reads in its environment."""
    with EngineChild.start((sys.executable, "-c", _TELL)) as child:
        return child.sock.recv(1000).decode().split()


def test_one_team_of_threads_that_does_not_spin_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # `--threads` says how many compute
    monkeypatch.setenv("TIERCEL_TEST", "kept")
    assert told() == ["1", "10000", "kept"]


def test_how_long_they_spin_is_the_operators_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert told()[1] == "5"
