"""Server-sent events, put together from the pieces in which they arrive, and the events of the OpenAI API."""

import msgspec
from msgspec import Struct

DONE = b"[DONE]"


class EventReader:
    """Splits a stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that this piece completes."""
        if not self._rest and piece.startswith(b"data: ") and piece.find(b"\n\n") == len(piece) - 2:
            text = piece[6:-2]
            if b"\n" not in text and b"\r" not in text:
                return [text]  # the usual case: exactly one event, in one line
        text = self._rest + piece
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # perhaps the first half of a line end
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        *events, rest = text.split(b"\n\n")
        self._rest = rest + held
        return [text for event in events if (text := _text_of(event)) is not None]


def _text_of(event: bytes) -> bytes | None:
    """Return the `data:` lines of one event; None for a comment or an event without data."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class ChoiceMessage(Struct):
    """The message or delta of a chat choice."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The content, else the reasoning."""
        return self.content or self.reasoning_content or self.reasoning or ""


class Choice(Struct):
    """One choice of an event or of a complete answer."""

    text: str | None = None
    delta: ChoiceMessage | None = None
    message: ChoiceMessage | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """The text of the choice, in whichever field it is."""
        if self.text is not None:
            return self.text
        message = self.delta or self.message
        return message.text if message is not None else ""


class PromptTokenDetails(Struct):
    """Details of the prompt's tokens, as the server reports them."""

    cached_tokens: int | None = None


class Usage(Struct):
    """Numbers of tokens of a request, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokenDetails | None = None


class Event(Struct):
    """The fields of an event, or of a complete answer, that a load test needs."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_events = msgspec.json.Decoder(Event)


def decode_event(text: bytes) -> Event:
    """Decode an event. Errors: msgspec.DecodeError."""
    try:
        return _events.decode(text)
    except (UnicodeDecodeError, RecursionError) as exc:
        raise msgspec.DecodeError(str(exc)) from exc


class _ErrorBody(Struct):
    message: str = ""


class _ErrorAnswer(Struct):
    error: _ErrorBody | str | None = None
    message: str = ""
    detail: str | None = None


def error_message(error: bytes) -> str:
    """Return the message of an error body in any of the known formats, as one line of at most 200 characters."""
    text = error.decode("utf-8", "replace")
    try:
        answer = msgspec.json.decode(error, type=_ErrorAnswer)
        inner = answer.error.message if isinstance(answer.error, _ErrorBody) else answer.error
        text = inner or answer.message or answer.detail or text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return " ".join(text.split())[:200]
