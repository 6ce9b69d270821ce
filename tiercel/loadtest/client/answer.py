"""The answer to one request, collected while it arrives: times, text, token counts, and the error if it failed."""

import msgspec

from tiercel.loadtest.client.sse import DONE, Event, EventReader, Usage, decode_event, error_message


class Answer:
    """Collects the pieces of a response body with their times of arrival."""

    def __init__(self, *, is_stream: bool) -> None:
        self.chunks_s: list[float] = []
        self.texts: list[str] = []
        self.usage: Usage | None = None
        self.error: str | None = None
        self.last_s: float | None = None  # time of the last event with a choice; usage and [DONE] do not count
        self._is_stream = is_stream
        self._is_ended = False
        self._events = EventReader()
        self._whole = bytearray()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def take(self, at_s: float, piece: bytes) -> None:
        """Take a piece of a response with status 200."""
        if not self._is_stream:
            self._whole += piece
            self.last_s = at_s
            return
        for text in self._events.feed(piece):
            self._take_event(at_s, text)

    def take_refusal(self, at_s: float, piece: bytes) -> None:
        """Take a piece of a response with an error status."""
        self._whole += piece
        self.last_s = at_s

    def refuse(self, status: int) -> None:
        """Set the error from a response with an error status, once its body is complete."""
        self.error = f"HTTP {status}: {error_message(bytes(self._whole))}".rstrip(": ")

    def finish(self) -> None:
        """Set the error if the response body ended before the answer was complete."""
        if not self._is_stream:
            self._read_whole()
        if self.error is None and not self._is_ended:
            self.error = "the stream ended early: no finish_reason and no [DONE]"

    def fail(self, reason: str) -> None:
        """Set the error, unless there is one already."""
        self.error = self.error or reason

    def _take_event(self, at_s: float, text: bytes) -> None:
        if text == DONE:
            self._is_ended = True
            return
        try:
            event = decode_event(text)
        except msgspec.DecodeError:
            self.fail("the stream has an event that is not of the OpenAI API")
            return
        if event.usage is not None:
            self.usage = event.usage
        if bytes(event.error) not in (b"", b"null"):
            self.fail(f"error event: {error_message(bytes(event.error))}")
        elif event.choices:
            self._take_choices(at_s, event)

    def _take_choices(self, at_s: float, event: Event) -> None:
        assert event.choices is not None
        self.last_s = at_s
        new = "".join([choice.new_text for choice in event.choices])
        if new:
            self.chunks_s.append(at_s)
            self.texts.append(new)
        self._is_ended = self._is_ended or any(choice.finish_reason for choice in event.choices)

    def _read_whole(self) -> None:
        at_s = self.last_s or 0.0
        try:
            event = decode_event(bytes(self._whole))
        except msgspec.DecodeError:
            self.fail("the answer is not of the OpenAI API")
            return
        self.usage = event.usage
        if event.choices:
            self._take_choices(at_s, event)
            self._is_ended = True
