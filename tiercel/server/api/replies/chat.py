"""Answers of /v1/chat/completions, whole and as stream chunks.

A field that has nothing is null or left out (UNSET), as the types of OpenAI's clients have it. vLLM's own fields are
null in whole answers and left out of chunks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from tiercel.server.api.replies.data_events import DataEvents
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.replies.hole import HOLE, hole, list_pieces
from tiercel.server.api.replies.prompt_logprobs import PromptLogprobs, prompt_logprobs_pieces
from tiercel.server.api.replies.tool_calls import ToolCall, ToolCallDelta, call_delta, tool_call
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.logprobs import DrawnToken
from tiercel.server.client.prompt_answer import PromptAnswer
from tiercel.server.text.answer.event import (
    COMPLETE,
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallCount,
    CallEnd,
    CallStart,
    ContentPart,
    ThoughtPart,
    collect,
    parts_of,
)
from tiercel.server.text.answer.reader import PLAIN, AnswerReader


class ChatTokenChoice(Struct, frozen=True):
    """A token that could have been sampled."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Struct, frozen=True):
    """A sampled token and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTokenChoice]


class ChatLogprobs(Struct, frozen=True):
    """The log-probabilities of the tokens of a text."""

    content: list[ChatToken]
    refusal: None = None


class ChatReplyMessage(Struct, frozen=True):
    """The message of the assistant."""

    role: str
    content: str | None  # None if there are only calls or thoughts
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatReplyChoice(Struct, frozen=True):
    """One choice."""

    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatReply(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatReplyChoice]
    service_tier: str | None = None
    system_fingerprint: str | UnsetType = UNSET
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class Delta(Struct, frozen=True):
    """The new part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatShape(DataEvents):
    """Turns deltas into chat chunks and bodies."""

    def __init__(self, head: ReplyHead, reader: AnswerReader = PLAIN) -> None:
        self._head = head
        self._reader = reader
        self._greeted: set[int] = set()
        self._prompts: Sequence[PromptAnswer] = ()
        self._parser_by_choice: dict[int, AnswerParser | None] = {}
        self._count_by_choice: dict[int, CallCount] = {}

    def begin(self, prompts: Sequence[PromptAnswer]) -> None:
        """Take the prompt of each choice, before anything else."""
        self._prompts = prompts

    @property
    def has_frames(self) -> bool:
        """Whether a delta with plain text is one event, and these events differ in their text only."""
        return self._reader.is_plain

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> list[ChatChunk]:
        """Return the parts of a delta, with a role chunk before the first text of its choice."""
        chunks: list[ChatChunk] = []
        if delta.choice not in self._greeted:
            is_first = not self._greeted
            before = _before_first_token(usage) if is_first else usage
            self._greeted.add(delta.choice)
            greeting = Delta(role=self._head.role, content="")
            chunk = self._chunk([ChatChunkChoice(delta.choice, greeting, None, None)], before)
            if is_first and self._head.with_tokens:
                chunk = replace(chunk, prompt_token_ids=list(self._prompts[delta.choice].tokens))
            chunks.append(chunk)
        is_end = delta.finish_reason is not None
        deltas = self._deltas(delta)
        if not deltas and (delta.logprobs or delta.tokens or is_end):
            deltas = [Delta(content="") if self._reader.is_plain else Delta()]
        for index, words in enumerate(deltas):
            is_first, is_last = index == 0, is_end and index == len(deltas) - 1
            logprobs = None
            if self._head.with_logprobs:
                logprobs = ChatLogprobs([self._token(entry) for entry in delta.logprobs] if is_first else [])
            reason = self._finish_reason(delta) if is_last else None
            stop_reason = delta.stop_reason if is_last else UNSET
            tokens = list(delta.tokens if is_first else ()) if self._head.with_tokens else UNSET
            choice = ChatChunkChoice(delta.choice, words, logprobs, reason, stop_reason, tokens)
            chunks.append(self._chunk([choice], usage, is_end=is_last))
        return chunks

    def _deltas(self, delta: ChoiceDelta) -> list[Delta]:
        """Return the parts of a delta that are certain."""
        if self._reader.is_plain:
            return [Delta(content=delta.text)] if delta.text else []
        if delta.choice not in self._parser_by_choice:
            self._parser_by_choice[delta.choice] = self._reader.parser()
            self._count_by_choice[delta.choice] = CallCount()
        parser = self._parser_by_choice[delta.choice]
        assert parser is not None  # the reader is not plain
        events = parts_of(parser, delta.text, delta.ending)
        for event in events:
            self._count_by_choice[delta.choice].take(event)
        return [part for part in map(self._part, events) if part is not None]

    def _part(self, event: AnswerEvent) -> Delta | None:
        match event:
            case ContentPart(text):
                return Delta(content=text)
            case ThoughtPart(text):
                return Delta(reasoning_content=text)
            case CallStart() | CallArguments():
                return Delta(tool_calls=[call_delta(event, self._reader.form)])
            case CallEnd():
                return None

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        count = self._count_by_choice.get(delta.choice)
        return _reason(delta, is_called=count is not None and count.is_called)

    def usage_chunk(self, usage: UsageBody) -> ChatChunk:
        """Return the final chunk for `include_usage`."""
        return self._chunk([], usage, is_end=True)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ChatReply:
        """Return the whole answer, with holes in place of the log-probabilities."""
        head = self._head
        return ChatReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._whole_choice(whole) for whole in choices],
            service_tier=head.service_tier,
            system_fingerprint=head.system_fingerprint or UNSET,
            usage=usage,
            prompt_logprobs=hole(PromptLogprobs) if head.with_prompt_logprobs else None,
            prompt_token_ids=list(self._prompts[0].tokens) if head.with_tokens else None,
        )

    def _whole_choice(self, whole: ChoiceDelta) -> ChatReplyChoice:
        head, parser = self._head, self._reader.parser()
        message, is_called = ChatReplyMessage(head.role, whole.text), False
        if parser is not None:
            answer = collect(parts_of(parser, whole.text, whole.ending or COMPLETE))
            has_calls, is_called = bool(answer.calls), answer.is_called
            message = ChatReplyMessage(
                head.role,
                answer.content or (None if has_calls or answer.thoughts else ""),
                tool_calls=[tool_call(call, self._reader.form) for call in answer.calls] if has_calls else UNSET,
                reasoning_content=answer.thoughts or UNSET,
            )
        return ChatReplyChoice(
            whole.choice,
            message,
            hole(ChatLogprobs) if head.with_logprobs else None,
            _reason(whole, is_called=is_called) or "stop",
            whole.stop_reason,
            list(whole.tokens) if head.with_tokens else None,
        )

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield the JSON of each hole, in order, piece by piece."""
        if self._head.with_logprobs:
            for whole in choices:
                yield self._logprobs_pieces(whole.logprobs)
        if self._head.with_prompt_logprobs:
            yield prompt_logprobs_pieces(self._prompts[0])

    def _logprobs_pieces(self, drawn: Sequence[DrawnToken]) -> Iterator[bytes]:
        """Yield the JSON of `ChatLogprobs`, piece by piece."""
        before, after = msgspec.json.encode(ChatLogprobs(hole(list[ChatToken]))).split(HOLE)
        yield before
        yield from list_pieces(drawn, self._token)
        yield after

    def _token(self, entry: DrawnToken) -> ChatToken:
        name, drawn = self._head.token_name, entry.drawn
        return ChatToken(
            name(drawn.token, drawn.text),
            drawn.logprob,
            list(drawn.bytes),
            [ChatTokenChoice(name(one.token, one.text), one.logprob, list(one.bytes)) for one in entry.likeliest],
        )

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None, *, is_end: bool = False
    ) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            service_tier=head.service_tier or UNSET,
            system_fingerprint=head.system_fingerprint or UNSET if is_end else UNSET,
            usage=usage,
        )


def _reason(delta: ChoiceDelta, *, is_called: bool) -> str | None:
    """Return the finish reason for the client: it runs the calls if all of them are complete."""
    return "tool_calls" if is_called and delta.finish_reason == "stop" else delta.finish_reason


def _before_first_token(usage: UsageBody | UnsetType | None) -> UsageBody | UnsetType | None:
    if not isinstance(usage, UsageBody):
        return usage
    return UsageBody(usage.prompt_tokens, 0, usage.prompt_tokens, usage.prompt_tokens_details)
