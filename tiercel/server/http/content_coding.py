"""Compressed request bodies (`Content-Encoding`, RFC 9110, 8.4): decoded piece by piece, so that a small body that
expands to a large one is counted before it is expanded."""

import zlib
from typing import Protocol

from tiercel.values.errors import AdmissionError

ACCEPTED = "gzip, deflate"
"""The codings that are decoded, as a value of `Accept-Encoding`."""
PIECE_BYTES = 64 * 1024  # decoded at once, at most
MAX_MEMBERS = 64
"""Members of gzip in one body. Clients send one; each costs a copy of the bytes behind it."""

_GZIP = zlib.MAX_WBITS | 16
_RAW = -zlib.MAX_WBITS
_ZLIB_METHOD = 8  # in the low half of the first byte


class _Inflater(Protocol):
    """A decompressor of the standard library, whose class has no public name."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...


class ContentDecoder:
    """Decodes one body: `feed` what arrived, then `take` pieces until there is none. Nothing is decoded ahead."""

    def __init__(self, coding: str) -> None:
        """`coding`: gzip or deflate. The latter may be in the format of zlib, or raw, as some clients send it."""
        self._coding = coding
        self._inflater: _Inflater | None = None  # None before a member
        self._waiting = b""  # arrived and not decoded
        self._num_members = 0

    def feed(self, data: bytes) -> None:
        """Take over bytes of the body."""
        self._waiting += data

    def take(self) -> bytes:
        """Return the next piece, of at most `PIECE_BYTES`; empty if more of the body is needed.

        Errors: AdmissionError (400) if the bytes are not of the coding.
        """
        while self._waiting:
            if self._inflater is None and not self._begin():
                return b""
            assert self._inflater is not None
            try:
                piece = self._inflater.decompress(self._waiting, PIECE_BYTES)
            except zlib.error as exc:
                raise self._wrong("is not") from exc
            if self._inflater.eof:
                self._waiting = self._inflater.unused_data
                self._inflater = None
                if self._waiting and self._coding != "gzip":
                    raise self._wrong("goes on behind the end of its")
            else:
                self._waiting = self._inflater.unconsumed_tail
            if piece:
                return piece
        return b""

    def finish(self) -> None:
        """Check that the body is whole; an empty one is. Errors: AdmissionError (400)."""
        if self._inflater is not None or self._waiting:
            raise self._wrong("ends within its")

    def _begin(self) -> bool:
        """Begin a member; a body of gzip may have several. Return False if the first two bytes are not there yet."""
        if self._coding == "gzip":
            if self._num_members and not self._waiting.strip(b"\0"):  # padding behind the last member
                self._waiting = b""
                return False
            if self._num_members == MAX_MEMBERS:
                raise AdmissionError(
                    400,
                    f"The request body has more than {MAX_MEMBERS} members of gzip; please compress it as one.",
                    code="invalid_encoding",
                )
            self._inflater = zlib.decompressobj(_GZIP)
        else:
            if len(self._waiting) < 2:
                return False
            first, second = self._waiting[:2]
            is_zlib = first & 0xF == _ZLIB_METHOD and (first << 8 | second) % 31 == 0
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS if is_zlib else _RAW)
        self._num_members += 1
        return True

    def _wrong(self, what: str) -> AdmissionError:
        return AdmissionError(
            400, f"The request body {what} {self._coding} data, as Content-Encoding says.", code="invalid_encoding"
        )


def content_coding(value: str) -> str | None:
    """Return the coding of a body by its header: gzip, deflate, or None for none. Errors: AdmissionError (415)."""
    codings = [coding for part in value.split(",") if (coding := part.strip().lower()) not in ("", "identity")]
    if not codings:
        return None
    coding = codings[0].removeprefix("x-")
    if len(codings) > 1 or coding not in ("gzip", "deflate"):
        shown = "".join(letter if letter.isalnum() or letter in ",-_ " else "?" for letter in value[:64])
        raise AdmissionError(
            415,
            f"Content-Encoding: {shown} is not supported: send the body as it is, or with one of {ACCEPTED}.",
            code="unsupported_encoding",
        )
    return coding
