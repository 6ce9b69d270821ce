"""A worker that gets ready, and dies of every job: python -m tests.server.workers.dying."""

import os
import signal

from tiercel.server.workers.serving import Work, serve


def _open(_: bytearray) -> tuple[bytes, Work]:
    return b"ready", _die


def _die(_: bytearray) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


if __name__ == "__main__":
    serve(_open, open_s=10.0)
