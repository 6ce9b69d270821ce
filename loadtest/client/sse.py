"""Server-sent events out of the pieces in which they arrive, and what an OpenAI event says."""

import msgspec
from msgspec import Struct

DONE = b"[DONE]"


class EventReader:
    """Pieces of a stream in, the text behind `data:` of every complete event out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        if not self._rest and piece.startswith(b"data: ") and piece.find(b"\n\n") == len(piece) - 2:
            text = piece[6:-2]
            if b"\n" not in text and b"\r" not in text:
                return [text]  # exactly one event, in one line: nearly always
        text = self._rest + piece
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # half of a line end
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        *events, rest = text.split(b"\n\n")
        self._rest = rest + held
        return [text for event in events if (text := _text_of(event)) is not None]


def _text_of(event: bytes) -> bytes | None:
    """The `data:` lines of one event. None: a comment, or an event without any."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class ChoiceMessage(Struct):
    """The new text of a chat choice."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class Choice(Struct):
    """One choice of an event or of a whole answer."""

    text: str | None = None
    delta: ChoiceMessage | None = None
    message: ChoiceMessage | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        if self.text is not None:
            return self.text
        message = self.delta or self.message
        return message.text if message is not None else ""


class PromptTokenDetails(Struct):
    """What the server says about the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(Struct):
    """Tokens of a request, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokenDetails | None = None


class Event(Struct):
    """What of an event, or of a whole answer, a load test needs."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_events = msgspec.json.Decoder(Event)


def decode_event(text: bytes) -> Event:
    """Read an event. Errors: msgspec.MsgspecError."""
    return _events.decode(text)


class _ErrorBody(Struct):
    message: str = ""


class _ErrorAnswer(Struct):
    error: _ErrorBody | str | None = None
    message: str = ""
    detail: str | None = None


def error_message(error: bytes) -> str:
    """The words of an error, whatever the server wrapped them in: at most one line of 200 characters."""
    text = error.decode("utf-8", "replace")
    try:
        answer = msgspec.json.decode(error, type=_ErrorAnswer)
        inner = answer.error.message if isinstance(answer.error, _ErrorBody) else answer.error
        text = inner or answer.message or answer.detail or text
    except msgspec.MsgspecError:
        pass
    return " ".join(text.split())[:200]
