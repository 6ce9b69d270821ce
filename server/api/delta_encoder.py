"""Deltas into the bytes of stream events."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from tiercel.server.api.replies.chat import ChatChunk, ChatReply
from tiercel.server.api.replies.completion import TextChunk, TextReply
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.engine.choice_text import ChoiceDelta
from tiercel.server.engine.logprobs import DrawnToken
from tiercel.server.http.sse import PLACEHOLDER, EventFrame, event


class ReplyShape(Protocol):
    """Turns deltas into the chunks and bodies of one API."""

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> Sequence[ChatChunk] | Sequence[TextChunk]: ...

    def usage_chunk(self, usage: UsageBody) -> ChatChunk | TextChunk: ...

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ChatReply | TextReply:
        """Return a whole answer, with holes in place of the log-probabilities."""
        ...

    def logprobs_pieces(self, drawn: Sequence[DrawnToken]) -> Iterator[bytes]:
        """Yield the log-probabilities of a choice as JSON, piece by piece."""
        ...


class DeltaEncoder:
    """Encodes the deltas of one answer.

    Of events that differ in their text only, which are nearly all, everything but the text is encoded once per choice.
    `has_frames=False` turns that off.
    """

    __slots__ = ("_frame_by_choice", "_has_frames", "_shape")

    def __init__(self, shape: ReplyShape, *, has_frames: bool) -> None:
        self._shape = shape
        self._has_frames = has_frames
        self._frame_by_choice: dict[int, EventFrame] = {}

    def encode(self, deltas: Sequence[ChoiceDelta], usage: UsageBody | UnsetType) -> bytes:
        """Return the events of some deltas; without text to send there are none."""
        if len(deltas) == 1:
            return self._events(deltas[0], usage)
        return b"".join([self._events(delta, usage) for delta in deltas])

    def frame(self, choice: int) -> EventFrame | None:
        """Return the frame of the events of a choice, once it has had one with text."""
        return self._frame_by_choice.get(choice)

    def _events(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> bytes:
        is_text_only = delta.text and not delta.logprobs and delta.finish_reason is None
        if is_text_only:
            frame = self._frame_by_choice.get(delta.choice)
            if frame is not None:
                return frame.event(delta.text)
        events = b"".join([event(chunk) for chunk in self._shape.chunks(delta, usage)])
        if is_text_only and self._has_frames:
            # The first events of the choice are out: from now on, a delta with text is exactly one event.
            (chunk,) = self._shape.chunks(replace(delta, text=PLACEHOLDER), UNSET)
            frame = EventFrame.of(chunk)
            if frame is not None:
                self._frame_by_choice[delta.choice] = frame
        return events
