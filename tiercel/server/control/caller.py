"""The other side of a control socket: `tiercel drain`, and a daemon that takes over. Every call blocks."""

import contextlib
import os
import select
import socket
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Self

from tiercel.server.control.address import is_trusted, peer_of
from tiercel.server.control.messages import (
    MAX_BYTES,
    MAX_FDS,
    Answer,
    ControlError,
    Drain,
    Leaving,
    Message,
    Offer,
    Refused,
    Serving,
    TakeOver,
    decode_answer,
    encode,
)

_ANSWER_S = 10.0
_OFFER_S = 60.0  # the old daemon finishes its writes to the SSD tier first


class ControlCaller:
    """A connection to the control socket of a running daemon."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.pid = peer_of(sock)[0]

    @staticmethod
    def connect(path: Path) -> "ControlCaller | None":
        """Connect to the daemon that listens on a path; return None if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            return None
        return ControlCaller(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def drain(self) -> None:
        """Tell the daemon to drain. Errors: ControlError."""
        self._ask(Drain(), _ANSWER_S)

    def wait_gone(self, patience_s: float | None = None) -> bool:
        """Wait until the daemon has exited. Return False if it has not within `patience_s`."""
        with contextlib.ExitStack() as closing:
            try:
                handle = os.pidfd_open(self.pid)
                closing.callback(os.close, handle)
            except ProcessLookupError:
                return True
            return bool(select.select([handle], [], [], patience_s)[0])

    def take_over(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Take the SSD folders and the listening sockets of the daemon, which serves on until `confirm`.

        Return names and descriptors of the sockets. Errors: ControlError; the daemon then goes on as before.
        """
        if not is_trusted(self._sock):
            raise ControlError("control.user", f"the running daemon (pid {self.pid}) belongs to another user")
        answer, fds = self._ask(TakeOver(os.getpid()), _OFFER_S)
        if not isinstance(answer, Offer) or len(answer.names) != len(fds):
            for fd in fds:
                os.close(fd)
            raise ControlError("control.answer", f"unexpected answer {type(answer).__name__} with {len(fds)} sockets")
        return answer.names, fds

    def confirm(self) -> None:
        """Tell the daemon that this process accepts connections; it then accepts no more. Errors: ControlError."""
        answer, _ = self._ask(Serving(), _ANSWER_S)
        if not isinstance(answer, Leaving):
            raise ControlError("control.answer", f"unexpected answer {type(answer).__name__}")

    def _ask(self, message: Message, patience_s: float) -> tuple[Answer, tuple[int, ...]]:
        self._sock.settimeout(patience_s)
        with _as_control_error():
            self._sock.sendall(encode(message))
            packet, fds, _, _ = socket.recv_fds(self._sock, MAX_BYTES, MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        answer = decode_answer(packet)
        if isinstance(answer, Refused):
            raise ControlError("control.refused", answer.reason)
        return answer, tuple(fds)


@contextlib.contextmanager
def _as_control_error() -> Generator[None]:
    try:
        yield
    except OSError as exc:
        raise ControlError("control.lost", f"the daemon does not answer: {exc}") from exc
