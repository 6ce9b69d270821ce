"""The engine's end of the socket to the HTTP process. Only `wait` blocks."""

import logging
import select
import socket

from msgspec.structs import replace

from tiercel.engine.wake import Wake
from tiercel.values.errors import WireError
from tiercel.wire.frames import FrameReader, FromEngine, Report, ToEngine, encode_frame, encode_report

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
_MAX_CAUSES = 8  # causes of lost gauges that are logged: a cause may hold a value that differs in each step


class EngineMailbox:
    """Sends and receives frames over one non-blocking stream socket."""

    def __init__(self, sock: socket.socket, wake: Wake | None = None) -> None:
        sock.setblocking(False)
        self._wake = wake
        self._socket = sock
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)  # pyright: ignore[reportArgumentType]
        self._unsent = bytearray()
        self._causes: set[str] = set()  # of lost gauges, as logged
        self.is_closed = False  # the HTTP process is gone

    def take(self) -> list[ToEngine]:
        """Return every frame that has arrived."""
        messages: list[ToEngine] = []
        while not self.is_closed:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.is_closed = True
                break
            messages += self._reader.feed(chunk)
        return messages

    def post(self, message: FromEngine) -> None:
        """Send a frame; bytes that the socket does not accept now are sent by a later call.

        A report whose gauges cannot be sent goes without them, and the log says why, once for each cause.
        Errors: WireError if another value cannot be sent.
        """
        self._unsent += self._report_frame(message) if isinstance(message, Report) else encode_frame(message)
        self.flush()

    def _report_frame(self, report: Report) -> bytes:
        if report.gauges is None:
            return encode_frame(report)
        try:
            return encode_report(report)
        except WireError as error:
            frame = encode_frame(replace(report, gauges=None))
            self._note_lost_gauges(str(error))
            return frame

    def _note_lost_gauges(self, cause: str) -> None:
        if cause not in self._causes and len(self._causes) < _MAX_CAUSES:
            self._causes.add(cause)
            log.error("gauges not sent cause=%s", cause)

    def flush(self) -> None:
        """Send the bytes that are still unsent, as far as the socket accepts them."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait until the socket accepts them."""
        return bool(self._unsent)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame arrives, the socket accepts unsent bytes, another thread sets `wake`, or a timeout."""
        if self.is_closed:
            return
        writers = [self._socket] if self._unsent else []
        readers: list[socket.socket | Wake] = [self._socket]
        if self._wake is not None:
            readers.append(self._wake)
        select.select(readers, writers, [], timeout_s)
        if self._wake is not None:
            self._wake.clear()
        self.flush()


def receive_start(mailbox: EngineMailbox) -> list[ToEngine]:
    """Wait for the first frames and return them. Errors: WireError if the peer closes before it sends any."""
    while True:
        messages = mailbox.take()
        if messages:
            return messages
        if mailbox.is_closed:
            raise WireError("wire.closed_before_start")
        mailbox.wait(60.0)
