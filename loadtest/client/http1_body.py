"""Where a response body ends: by its length, by chunks, or with the connection."""

from typing import Protocol

_MAX_LINE_BYTES = 16 * 1024


class ProtocolFault(Exception):
    """The server broke HTTP, or the connection broke. The message is one line for people."""


class BodyReader(Protocol):
    """Takes bytes from the socket, returns those of the body."""

    is_complete: bool
    ends_with_connection: bool

    def feed(self, received: bytes) -> bytes: ...


def body_reader(status: int, headers: list[tuple[bytes, bytes]]) -> tuple[BodyReader, bool]:
    """The reader for a response, and whether the connection may be used again. Errors: ProtocolFault."""
    values = {name.lower(): value.lower() for name, value in headers}
    connection = values.get(b"connection", b"")
    keeps_alive = b"close" not in connection and (b"x-http-version" not in values or b"keep-alive" in connection)
    if status in (204, 304):
        return LengthBody(0), keeps_alive
    if b"chunked" in values.get(b"transfer-encoding", b""):
        return ChunkedBody(), keeps_alive
    length = values.get(b"content-length")
    if length is None:
        return UntilClose(), False
    if not length.isdigit():
        raise ProtocolFault("the response has no valid Content-Length")
    return LengthBody(int(length)), keeps_alive


class LengthBody:
    """A body of a known number of bytes."""

    ends_with_connection = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_complete = length == 0

    def feed(self, received: bytes) -> bytes:
        piece = received[: self._left]
        self._left -= len(piece)
        self.is_complete = self._left == 0
        return piece


class UntilClose:
    """A body that ends when the server closes the connection."""

    ends_with_connection = True
    is_complete = False

    def feed(self, received: bytes) -> bytes:
        return received


class ChunkedBody:
    """A body in chunks, each behind its length."""

    ends_with_connection = False

    def __init__(self) -> None:
        self.is_complete = False
        self._rest = b""  # an incomplete line
        self._left = 0  # bytes of the current chunk still to come
        self._is_after_chunk = False  # a line end follows
        self._is_trailer = False

    def feed(self, received: bytes) -> bytes:
        """The bytes of the body in `received`. Errors: ProtocolFault."""
        if self._rest:
            received = self._rest + received
            self._rest = b""
        pieces: list[bytes] = []
        at = 0
        while at < len(received) and not self.is_complete:
            if self._left:
                piece = received[at : at + self._left]
                pieces.append(piece)
                self._left -= len(piece)
                self._is_after_chunk = not self._left
                at += len(piece)
                continue
            end = received.find(b"\r\n", at)
            if end < 0:
                self._rest = received[at:]
                if len(self._rest) > _MAX_LINE_BYTES:
                    raise ProtocolFault("a chunk of the response has no length")
                break
            self._take_line(received[at:end])
            at = end + 2
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take_line(self, line: bytes) -> None:
        if self._is_after_chunk:
            if line:
                raise ProtocolFault("a chunk of the response is longer than it says")
            self._is_after_chunk = False
        elif self._is_trailer:
            self.is_complete = not line
        else:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError as exc:
                raise ProtocolFault("a chunk of the response has no length") from exc
            self._is_trailer = self._left == 0
