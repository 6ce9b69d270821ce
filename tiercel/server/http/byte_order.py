"""Byte order marks at the beginning of JSON texts: that of UTF-8 says nothing, the others say that it is no UTF-8."""

UTF8_MARK = b"\xef\xbb\xbf"

_WIDE = (
    *((mark, "UTF-32") for mark in (b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"{\0\0\0", b"\0\0\0{")),
    *((mark, "UTF-16") for mark in (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{")),  # a mark, or an object without one
)


def wide_encoding(text: bytes | bytearray) -> str | None:
    """Return the encoding of a text in UTF-16 or UTF-32, of which no reader of UTF-8 can make sense; else None."""
    return next((name for mark, name in _WIDE if text.startswith(mark)), None)
