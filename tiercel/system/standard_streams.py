"""Standard output and standard error, for text that people read: a write never fails and never waits for long.

A daemon serves whether or not somebody can read its banner and its log. The disk of the log may be full, the terminal
may be gone or stopped with Ctrl-S, the reader of a pipe may have ended or may not read, and the encoding of the locale
may lack a character. In each case the text is lost or escaped, and the daemon goes on.
"""

import contextlib
import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tiercel.values.errors import OutputError

_PATIENCE_S = 0.05  # to wait for the reader of a full pipe before text is dropped
_REST_S = 10.0  # after a loss, for which no write waits at all
_PIECE_BYTES = select.PIPE_BUF  # as much as a pipe takes at once when it is writable


class CheckedOutput(io.TextIOWrapper):
    """Standard output of a verb whose output is its result: a lost write is an error with a name of its own."""

    def write(self, text: str, /) -> int:
        """Write text. Errors: OutputError."""
        try:
            return super().write(text)
        except OSError as exc:
            raise _output_error(exc) from exc

    def flush(self) -> None:
        """Flush. Errors: OutputError."""
        try:
            super().flush()
        except OSError as exc:
            raise _output_error(exc) from exc


class GuardedStream(io.TextIOBase):
    """A text stream on a descriptor. Text that cannot be written is dropped and counted.

    Text is written when its line is complete. Writes are thread-safe.
    """

    def __init__(self, fd: int, write_fd: int, encoding: str) -> None:
        """`write_fd` is the descriptor that is written to: `fd`, or another one of the same file."""
        self._fd = fd
        self._write_fd = write_fd
        self._encoding = encoding
        self._lock = threading.RLock()  # a signal handler may write, too
        self._pending = ""
        self._is_cut = False  # the last line was written in part
        self._is_failing = False
        self._patient_from_s = 0.0
        self._num_lost = 0

    @staticmethod
    def of(fd: int, encoding: str = "utf-8") -> "GuardedStream":
        """Guard an open descriptor."""
        return GuardedStream(fd, _open_without_waiting(fd), encoding)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - read only here
        """The encoding; characters that it lacks are written as escapes."""
        return self._encoding

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - read only here
        """The treatment of characters that the encoding lacks."""
        return "backslashreplace"

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Write the complete lines. Errors: TypeError for anything but text."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - libraries try bytes
            raise TypeError(f"text is needed, not {type(text).__name__}")
        with self._lock:
            self._pending += text
            if "\n" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what is pending, or drop it."""
        with self._lock:
            text, self._pending = self._pending, ""
            if text:
                self._write(text.encode(self._encoding, "backslashreplace"))

    def tell_lost(self, tell: Callable[[int], None]) -> None:
        """Call `tell` with the number of lost writes, once the stream takes text again.

        `tell` writes to this stream. If that write is lost as well, the number stays and is told later.
        """
        with self._lock:
            lost = self._num_lost
            if self._is_failing or not lost:
                return
            self._num_lost = 0
            tell(lost)
            if self._is_failing:
                self._num_lost = lost  # without the line that told of it

    def _write(self, body: bytes) -> None:
        left = memoryview(b"\n" + body if self._is_cut else body)
        now_s = time.monotonic()
        end_s = now_s + _PATIENCE_S if now_s >= self._patient_from_s else now_s
        size = len(left)
        while left:
            written = self._write_piece(left[:_PIECE_BYTES], end_s)
            if not written:
                self._is_cut |= 0 < len(left) < size
                self._is_failing = True
                self._patient_from_s = time.monotonic() + _REST_S
                self._num_lost += 1
                return
            left = left[written:]
        self._is_cut = self._is_failing = False

    def _write_piece(self, piece: memoryview, end_s: float) -> int:
        """Write as much as the descriptor takes until a time. Return the number of bytes; 0: none."""
        poll = select.poll()
        poll.register(self._write_fd, select.POLLOUT)
        while True:
            try:
                if not poll.poll(max(0.0, 1000 * (end_s - time.monotonic()))):
                    return 0
                return os.write(self._write_fd, piece)
            except BlockingIOError:  # another process has filled the pipe in between
                if time.monotonic() >= end_s:
                    return 0
            except OSError:
                return 0


def say(line: str, stream: TextIO | GuardedStream | None) -> None:
    """Write a line for people to a stream, and flush it. The line is lost if that fails. None: a closed stream."""
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"  # None: a stream in memory
    try:
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError):  # ValueError: the stream is closed
        return


def output_stream() -> TextIO:
    """Return standard output."""
    return sys.stdout


def error_stream() -> TextIO:
    """Return standard error."""
    return sys.stderr


def prepare_streams() -> None:
    """Guard standard error, and check writes to standard output: characters that its encoding lacks become escapes.

    The first call of every main program, before it opens anything: a socket would get the number of a standard
    descriptor that is closed, and a library that prints would write to that socket.
    """
    for fd in range(3):
        _open_if_closed(fd)
    if sys.stdout is sys.__stdout__:  # not those of a test
        sys.stdout = GuardedStream.of(1) if sys.stdout is None else _checked(sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, 2)


def guard_streams() -> None:
    """Guard standard output and standard error. The main program of a daemon calls it before it starts."""
    prepare_streams()
    if isinstance(sys.stdout, CheckedOutput):
        sys.stdout = _guarded(sys.stdout, 1)
    # A terminal set to `stty tostop` stops a background process that writes to it, and the engine always is one.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def drop_output() -> None:
    """Send the rest of standard output nowhere, so that the end of the process does not try to write it again."""
    if isinstance(sys.stdout, CheckedOutput):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _output_error(exc: OSError) -> OutputError:
    text = "" if isinstance(exc, BrokenPipeError) else f"standard output: {exc.strerror}"
    return OutputError("output.lost", text)


def _checked(stream: TextIO) -> CheckedOutput:
    stream.flush()
    binary = open(1, "wb", closefd=False)  # noqa: SIM115 - lives as long as the process
    return CheckedOutput(binary, stream.encoding, "backslashreplace", line_buffering=stream.isatty())


def _guarded(stream: TextIO | None, fd: int) -> GuardedStream:
    if stream is None:  # it was closed
        return GuardedStream.of(fd)
    with contextlib.suppress(OSError, ValueError, OutputError):
        stream.flush()
    return GuardedStream.of(fd, stream.encoding)


def _open_if_closed(fd: int) -> None:
    """Open the null device under this number if the number is free. Those below it are open already."""
    try:
        os.fstat(fd)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _open_without_waiting(fd: int) -> int:
    """Open the file of a pipe or a terminal again, such that writes never wait; otherwise return the descriptor itself.

    Setting O_NONBLOCK on the descriptor itself would set it for every process that has it.
    """
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISFIFO(kind) or os.isatty(fd):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # it belongs to another user, or /proc is not there: writes are preceded by poll
        pass
    return fd
