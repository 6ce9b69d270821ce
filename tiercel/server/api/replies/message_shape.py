"""Deltas into the events and the body of a message."""

from collections.abc import Iterator, Sequence

from msgspec import Struct, UnsetType

from tiercel.server.api.replies.message_blocks import BlockWriter
from tiercel.server.api.replies.messages import (
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageReply,
    MessageStart,
    MessageStop,
    StopReason,
    message_usage,
)
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.prompt_answer import PromptAnswer
from tiercel.server.http.message_failure import message_fault_of
from tiercel.server.http.sse import event
from tiercel.server.text.answer.event import AnswerEvent, AnswerParser, parts_of
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.values.errors import AdmissionError

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_REASONS: dict[str, StopReason] = {"length": "max_tokens", "timeout": "pause_turn"}


class MessageShape:
    """Turns the deltas of one message into events or a body."""

    keep_alive = _PING

    def __init__(self, id: str, model: str, request_id: str, reader: AnswerReader) -> None:
        self._id = id
        self._model = model
        self._request_id = request_id
        self._reader = reader
        self._parser: AnswerParser | None = None  # made with the first delta
        self._blocks = BlockWriter(reader.form)
        self._end = MessageEnd("end_turn", None)

    def begin(self, prompts: Sequence[PromptAnswer]) -> None:
        """Ignore the prompts: this API does not repeat them."""

    @property
    def has_frames(self) -> bool:
        """Whether a delta with plain text is one event, and these events differ in their text only."""
        return self._reader.is_plain

    def opening(self, usage: UsageBody) -> bytes:
        """Return the message without content. The tokens that were cached are known at the end only."""
        message = MessageReply(id=self._id, model=self._model, content=[], stop_reason=None, usage=message_usage(usage))
        return self.event(MessageStart(message))

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> Sequence[MessageEvent]:
        """Return the events of a delta, not encoded yet."""
        return list(self._grow(delta))

    def event(self, chunk: Struct) -> bytes:
        """Return one event, with its type as its name."""
        return event(chunk, str(chunk.__struct_config__.tag))

    def closing(self, usage: UsageBody | None) -> bytes:
        """Return the end of the message."""
        assert usage is not None  # `chat_body` asks for it
        return self.event(MessageDelta(self._end, message_usage(usage))) + self.event(MessageStop())

    def failure(self, error: AdmissionError) -> bytes:
        """Return an error. Nothing follows it."""
        return event(message_fault_of(error, self._request_id), "error")

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> MessageReply:
        """Return the whole message."""
        (whole,) = choices
        for _ in self._grow(whole):
            pass  # events that nobody reads
        return MessageReply(
            id=self._id,
            model=self._model,
            content=self._blocks.whole(),
            stop_reason=self._end.stop_reason,
            stop_sequence=self._end.stop_sequence,
            usage=message_usage(usage),
        )

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield nothing: this API has no log-probabilities."""
        return iter(())

    def _grow(self, delta: ChoiceDelta) -> Iterator[MessageEvent]:
        if self._reader.is_plain:
            if delta.text:
                yield from self._blocks.text(delta.text)
        else:
            for part in self._parts(delta):
                yield from self._blocks.take(part)
        if delta.finish_reason is not None:
            yield from self._blocks.close()
            self._end = self._ended(delta)

    def _parts(self, delta: ChoiceDelta) -> list[AnswerEvent]:
        """Return the parts of a delta that are certain."""
        if self._parser is None:
            self._parser = self._reader.parser()
        assert self._parser is not None  # the reader is not plain
        return parts_of(self._parser, delta.text, delta.ending)

    def _ended(self, delta: ChoiceDelta) -> MessageEnd:
        if delta.finish_reason != "stop":
            return MessageEnd(_REASONS.get(delta.finish_reason or "", "end_turn"), None)
        if isinstance(delta.stop_reason, str):
            return MessageEnd("stop_sequence", delta.stop_reason)
        return MessageEnd("tool_use" if self._blocks.is_called else "end_turn", None)
