"""Server-sent events: JSON into `data:` lines."""

import msgspec

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
PLACEHOLDER = "\x00"
"""The text in the value that an `EventFrame` is made of."""

_encoder = msgspec.json.Encoder()
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event(value: object, name: str | None = None) -> bytes:
    """Return one event. Characters that some clients take for line ends are escaped."""
    line = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (line, _json(value))


class EventFrame:
    """An event of which one text changes: the bytes before and after the text are encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    @staticmethod
    def of(whole: bytes) -> "EventFrame | None":
        """Return the frame of an event whose text is `PLACEHOLDER`; None if this text is not there exactly once."""
        parts = whole.split(_json(PLACEHOLDER))
        return EventFrame(*parts) if len(parts) == 2 else None

    def event(self, text: str) -> bytes:
        """Return the event with this text, as `event` would return it."""
        return b"%b%b%b" % (self._before, _json(text), self._after)


def _json(value: object) -> bytes:
    return line_safe(_encoder.encode(value))


def line_safe(body: bytes) -> bytes:
    """Return JSON without the characters that some clients take for line ends: they are escaped."""
    if not body.isascii():
        for letter, escape in _LINE_ENDS:
            body = body.replace(letter, escape)
    return body
