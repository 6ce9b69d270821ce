"""Server-sent events: JSON into `data:` lines."""

import msgspec

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event(value: object) -> bytes:
    """Return one event. Characters that some clients take for line ends are escaped."""
    body = _encoder.encode(value)
    if not body.isascii():
        for letter, escape in _LINE_ENDS:
            body = body.replace(letter, escape)
    return b"data: " + body + b"\n\n"
