"""Deltas into the bytes of stream events."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct, UnsetType
from msgspec.structs import replace

from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.prompt_answer import PromptAnswer
from tiercel.server.http.sse import PLACEHOLDER, EventFrame
from tiercel.values.errors import AdmissionError


class ReplyShape(Protocol):
    """Turns deltas into the events and bodies of one API."""

    @property
    def has_frames(self) -> bool:
        """Whether a delta with plain text is one event, and these events differ in their text only."""
        ...

    def begin(self, prompts: Sequence[PromptAnswer]) -> None:
        """Take the prompt of each choice, before anything else."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """The bytes that end a silence."""
        ...

    def opening(self, usage: UsageBody) -> bytes:
        """Return the events before those of the first delta."""
        ...

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> Sequence[Struct]:
        """Return the events of a delta, not encoded yet."""
        ...

    def event(self, chunk: Struct) -> bytes:
        """Return one event."""
        ...

    def closing(self, usage: UsageBody | None) -> bytes:
        """Return the last events. There is a usage if `StreamRules.include_usage` is set."""
        ...

    def failure(self, error: AdmissionError) -> bytes:
        """Return the last events of a generation that failed."""
        ...

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> Struct | Sequence[Struct]:
        """Return a whole answer, with holes in place of the log-probabilities."""
        ...

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield the JSON of each hole of a whole answer, in order, piece by piece."""
        ...


class DeltaEncoder:
    """Encodes the deltas of one answer.

    Of events that differ in their text only, which are nearly all, everything but the text is encoded once per choice.
    `has_frames=False` turns that off.
    """

    __slots__ = ("_frame_by_choice", "_has_frames", "_shape")

    def __init__(self, shape: ReplyShape, *, has_frames: bool) -> None:
        self._shape = shape
        self._has_frames = has_frames and shape.has_frames
        self._frame_by_choice: dict[int, EventFrame] = {}

    def encode(self, deltas: Sequence[ChoiceDelta], usage: UsageBody | UnsetType | None) -> bytes:
        """Return the events of some deltas; without text to send there are none."""
        if len(deltas) == 1:
            return self._events(deltas[0], usage)
        return b"".join([self._events(delta, usage) for delta in deltas])

    def frame(self, choice: int) -> EventFrame | None:
        """Return the frame of the events of a choice, once it has had one with text."""
        return self._frame_by_choice.get(choice)

    def _events(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> bytes:
        is_text_only = delta.text and not delta.logprobs and delta.finish_reason is None
        if is_text_only:
            frame = self._frame_by_choice.get(delta.choice)
            if frame is not None:
                return frame.event(delta.text)
        events = b"".join([self._shape.event(chunk) for chunk in self._shape.chunks(delta, usage)])
        if is_text_only and self._has_frames:
            # The first events of the choice are out: from now on, a delta with text is exactly one event.
            (chunk,) = self._shape.chunks(replace(delta, text=PLACEHOLDER), usage)
            frame = EventFrame.of(self._shape.event(chunk))
            if frame is not None:
                self._frame_by_choice[delta.choice] = frame
        return events
