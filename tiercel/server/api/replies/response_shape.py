"""Deltas into the events and the body of a response."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, UnsetType
from msgspec.structs import replace

from tiercel.server.api.replies.chat import ChatToken, ChatTokenChoice
from tiercel.server.api.replies.hole import hole, list_pieces
from tiercel.server.api.replies.response_events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseErrorEvent,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    event_name,
)
from tiercel.server.api.replies.response_items import ItemWriter
from tiercel.server.api.replies.responses import (
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponseFault,
    ResponseStatus,
    response_usage,
)
from tiercel.server.api.replies.tool_calls import new_call_id
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.logprobs import DrawnToken
from tiercel.server.client.prompt_answer import PromptAnswer
from tiercel.server.http.failure import fault_of
from tiercel.server.http.sse import KEEP_ALIVE, event
from tiercel.server.text.answer.event import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallEnd,
    CallStart,
    ContentPart,
    ThoughtPart,
    parts_of,
)
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.values.errors import AdmissionError

_REASONS = {"length": "max_output_tokens"}


class ResponseShape:
    """Turns the deltas of one response into events or a body.

    `on_change` gets the response when it has ended, and one in the background also when it begins.
    """

    keep_alive = KEEP_ALIVE
    has_frames = False

    def __init__(
        self,
        body: ResponseBody,
        on_change: Callable[[ResponseBody], None],
        new_id: Callable[[str], str],
        wall_s: Callable[[], float],
        *,
        reader: AnswerReader,
        with_logprobs: bool,
    ) -> None:
        self.body = body  # as it was created
        self._on_change = on_change
        self._wall_s = wall_s
        self._with_logprobs = with_logprobs
        self._numbers = itertools.count()
        self._writer = ItemWriter(self._number, new_id)
        self._reader = reader
        self._parser: AnswerParser | None = None
        self._tokens: list[ChatToken] = []  # of text that the parser holds back
        self._finish_reason: str | None = None
        self.has_begun = False
        self.is_over = False

    def begin(self, prompts: Sequence[PromptAnswer]) -> None:
        """Take the prompt, of which a response shows nothing."""

    def opening(self, usage: UsageBody) -> bytes:
        """Return the events before those of the first delta."""
        self.has_begun = True
        body = self._state("in_progress")
        created = ResponseCreated(sequence_number=self._number(), response=body)
        return self.event(created) + self.event(ResponseInProgress(sequence_number=self._number(), response=body))

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> Sequence[ResponseEvent]:
        """Return the events of a delta, not encoded yet."""
        tokens = [_token(entry) for entry in delta.logprobs] if self._with_logprobs else []
        return list(self._grow(delta, tokens))

    def event(self, chunk: Struct) -> bytes:
        """Return one event, with its type as its name."""
        return event(chunk, event_name(chunk))

    def start(self) -> None:
        """Note that the engine works on the response. Only the first call has an effect."""
        if not self.has_begun:
            self.has_begun = True
            self._on_change(self._state("in_progress"))

    def closing(self, usage: UsageBody | None) -> bytes:
        """Return the last event."""
        body = self.end(usage)
        kind = ResponseCompleted if body.status == "completed" else ResponseIncomplete
        return self.event(kind(sequence_number=self._number(), response=body))

    def failure(self, error: AdmissionError) -> bytes:
        """Return the last events of a generation that failed."""
        fault = fault_of(error).error
        body = self.failed(error)
        return self.event(
            ResponseErrorEvent(
                sequence_number=self._number(), code=fault.code, message=fault.message, param=fault.param, error=fault
            )
        ) + self.event(ResponseFailed(sequence_number=self._number(), response=body))

    def failed(self, error: AdmissionError) -> ResponseBody:
        """End the response with an error, and return it."""
        fault = ResponseFault("server_error", error.message)
        return self._end(replace(self._state("failed"), error=fault))

    def abandon(self) -> None:
        """End the response if it has not ended: its client has left, or has cancelled it."""
        if not self.is_over:
            self._end(self._state("cancelled"))

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ResponseBody:
        """Return the whole response, with a hole in place of the log-probabilities."""
        (whole,) = choices
        for _ in self._grow(whole, []):
            pass  # events that nobody reads
        body = self.end(usage)
        return replace(body, output=_with_hole(body.output)) if self._with_logprobs else body

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield the JSON of the log-probabilities, piece by piece."""
        for choice in choices:
            yield list_pieces(choice.logprobs, _token)

    def _grow(self, delta: ChoiceDelta, tokens: Sequence[ChatToken]) -> Iterator[ResponseEvent]:
        is_end = delta.finish_reason is not None
        if self._reader.is_plain:
            if delta.text or tokens:
                yield from self._writer.text(delta.text, tokens)
        else:
            self._tokens += tokens
            for part in self._parts(delta):
                yield from self._write(part)
        if is_end:
            if not self._writer.all_items():
                yield from self._writer.text("", self._tokens)
            self._finish_reason = delta.finish_reason
            yield from self._writer.close("completed" if delta.finish_reason == "stop" else "incomplete")

    def _parts(self, delta: ChoiceDelta) -> list[AnswerEvent]:
        """Return the parts of a delta that are certain."""
        if self._parser is None:
            self._parser = self._reader.parser()
        assert self._parser is not None  # the reader is not plain
        return parts_of(self._parser, delta.text, delta.ending)

    def _write(self, part: AnswerEvent) -> Iterator[ResponseEvent]:
        tokens, self._tokens = self._tokens, []
        match part:
            case ContentPart(text):
                yield from self._writer.text(text, tokens)
            case ThoughtPart(text):
                yield from self._writer.thoughts(text)
            case CallStart(name=name):
                yield from self._writer.call(name, new_call_id(self._reader.form))
            case CallArguments(text=text):
                yield from self._writer.arguments(text)
            case CallEnd(is_complete=is_complete):
                yield from self._writer.close("completed" if is_complete else "incomplete")

    def end(self, usage: UsageBody | None) -> ResponseBody:
        """End the response after its last delta, and return it."""
        is_complete = self._finish_reason == "stop"
        body = self._state("completed" if is_complete else "incomplete")
        if is_complete:
            body = replace(body, completed_at=int(self._wall_s()))
        else:
            reason = self._finish_reason or ""
            body = replace(body, incomplete_details=IncompleteDetails(_REASONS.get(reason, reason)))
        return self._end(body if usage is None else replace(body, usage=response_usage(usage)))

    def _end(self, body: ResponseBody) -> ResponseBody:
        self.is_over = True
        self._on_change(body)
        return body

    def _state(self, status: ResponseStatus) -> ResponseBody:
        return replace(self.body, status=status, output=list(self._writer.all_items()))

    def _number(self) -> int:
        return next(self._numbers)


def _token(drawn: DrawnToken) -> ChatToken:
    return ChatToken(
        drawn.drawn.text,
        drawn.drawn.logprob,
        list(drawn.drawn.bytes),
        [ChatTokenChoice(one.text, one.logprob, list(one.bytes)) for one in drawn.likeliest],
    )


def _with_hole(items: Sequence[OutputItem]) -> list[OutputItem]:
    """Return the items with a hole in place of the log-probabilities of the first text."""
    shown = list(items)
    for index, item in enumerate(shown):
        if isinstance(item, OutputMessage) and isinstance(text := item.content[0], OutputText):
            part = replace(text, logprobs=hole(list[ChatToken]))
            shown[index] = replace(item, content=[part])
            break
    return shown
