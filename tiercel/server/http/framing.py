"""Limits on the parts of a request that are not its body: request line, headers, and the framing of chunks.

The parser keeps an unfinished head in memory without a limit. `MessageMeter` limits it: it says how many of the
received bytes the parser may read next, so that one call never reads more than one head, and counts them.
"""

import enum
from collections.abc import Iterable

from tiercel.values.units import KIB

MAX_HEAD_BYTES = 64 * KIB  # of a request line and its headers; also of a body's chunk extensions and trailers
MAX_HEADER_LINES = 100
_END = b"\r\n\r\n"
_CHUNK_OVERHEAD_BYTES = 16  # size in hex and two line ends; more than this counts against MAX_HEAD_BYTES
_CHUNKED_SLICE_BYTES = 8 * KIB  # the next head, which can begin in such a slice, is counted from the next slice on
_CHUNKED_STEP_BYTES = 256  # so a chunked body that is full of line ends is not read in slices of a few bytes


class _Part(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()  # of a known length
    CHUNKS = enum.auto()


class MessageMeter:
    """Counts the bytes of the current message of one connection. The parser's callbacks call it."""

    __slots__ = ("_counted_bytes", "_has_advanced", "_part", "_tail", "_unread_bytes")

    def __init__(self) -> None:
        self._part = _Part.HEAD
        self._counted_bytes = 0  # of the head, or of the chunk framing
        self._unread_bytes = 0  # of a body of known length
        self._tail = b""  # the last bytes of an unfinished head
        self._has_advanced = False  # the slice that is being read has ended a head or a message

    @property
    def is_in_head(self) -> bool:
        """True until the headers of a message are complete."""
        return self._part is _Part.HEAD

    @property
    def head_bytes(self) -> int:
        """Bytes of an unfinished head that the parser has read."""
        return self._counted_bytes if self._part is _Part.HEAD else 0

    def cut(self, data: bytes, start: int) -> int:
        """Return the end of the slice from `start` that the parser may read next; it is not empty."""
        self._has_advanced = False
        match self._part:
            case _Part.BODY:
                return min(start + self._unread_bytes, len(data))
            case _Part.CHUNKS:
                end = data.find(_END, start + _CHUNKED_STEP_BYTES)
                limit = start + _CHUNKED_SLICE_BYTES
            case _Part.HEAD:
                end = self._end_across_reads(data, start)
                if end < 0:
                    end = data.find(_END, start)
                limit = start + MAX_HEAD_BYTES - self._counted_bytes
        return min(len(data), limit, len(data) if end < 0 else end + len(_END))

    def _end_across_reads(self, data: bytes, start: int) -> int:
        """Return where the end of a head that began in an earlier read would have to start; -1 if it does not."""
        if not self._counted_bytes:
            return -1
        found = (self._tail + data[start : start + 3]).find(_END)
        return -1 if found < 0 else start + found - len(self._tail)

    def count(self, part: bytes | memoryview) -> bool:
        """Count a slice that the parser has read. Return False if a limit is reached.

        If the slice ended a head or a message, what it has of the next part is not counted.
        """
        if self._has_advanced or self._part is _Part.BODY:
            self._tail = b""
            return True
        self._counted_bytes = max(self._counted_bytes + len(part), 0)
        if self._part is _Part.HEAD:
            self._tail = (self._tail + bytes(part[-3:]))[-3:]
        return self._counted_bytes < MAX_HEAD_BYTES

    def end_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note that the headers are complete."""
        self._has_advanced = True
        self._part, self._counted_bytes, self._unread_bytes = _Part.BODY, 0, 0
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                self._unread_bytes = int(value)
            elif name == b"transfer-encoding":
                self._part = _Part.CHUNKS

    def add_body(self, length: int) -> None:
        """Note bytes of the body."""
        if self._part is _Part.CHUNKS:
            self._counted_bytes -= length
        else:
            self._unread_bytes -= length

    def add_chunk(self) -> None:
        """Note the head of a chunk."""
        self._counted_bytes -= _CHUNK_OVERHEAD_BYTES

    def end_message(self) -> None:
        """Note that the body is complete."""
        self._has_advanced = True
        self._part, self._counted_bytes = _Part.HEAD, 0
