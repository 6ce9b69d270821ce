"""Answers of /v1/chat/completions, whole and as stream chunks.

Whole answers carry every field, null where there is nothing. Chunks leave out what does not apply (UNSET).
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.replies.hole import HOLE, hole, list_pieces
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.engine.choice_text import ChoiceDelta
from tiercel.server.engine.logprobs import DrawnToken


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


def chat_logprobs(drawn: Sequence[DrawnToken]) -> ChatLogprobs:
    """Return log-probabilities in the shape of the chat API."""
    return ChatLogprobs([_token(entry) for entry in drawn])


def _token(entry: DrawnToken) -> ChatToken:
    return ChatToken(
        entry.drawn.text,
        entry.drawn.logprob,
        list(entry.drawn.bytes),
        [ChatTokenChoice(one.text, one.logprob, list(one.bytes)) for one in entry.likeliest],
    )


class ChatReplyMessage(Struct, frozen=True):
    """The message of the assistant."""

    role: str
    content: str
    refusal: None = None


class ChatReplyChoice(Struct, frozen=True):
    """One choice."""

    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatReply(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatReplyChoice]
    usage: UsageBody
    system_fingerprint: str | None = None


class Delta(Struct, frozen=True):
    """The new part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType = UNSET


class ChatShape:
    """Turns deltas into chat chunks and bodies."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._greeted: set[int] = set()

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> list[ChatChunk]:
        """Return the text of a delta, with a role chunk before the first text of its choice."""
        chunks: list[ChatChunk] = []
        if delta.choice not in self._greeted:
            before = _before_first_token(usage) if not self._greeted else usage
            self._greeted.add(delta.choice)
            greeting = Delta(role=self._head.role, content="")
            chunks.append(self._chunk([ChatChunkChoice(delta.choice, greeting, None, None)], before))
        is_end = delta.finish_reason is not None
        if delta.text or delta.logprobs or is_end:
            words = Delta(content=delta.text)
            logprobs = chat_logprobs(delta.logprobs) if self._head.with_logprobs else None
            stop_reason = delta.stop_reason if is_end else UNSET
            choice = ChatChunkChoice(delta.choice, words, logprobs, delta.finish_reason, stop_reason)
            chunks.append(self._chunk([choice], usage))
        return chunks

    def usage_chunk(self, usage: UsageBody) -> ChatChunk:
        """Return the final chunk for `include_usage`."""
        return self._chunk([], usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ChatReply:
        """Return the whole answer, with holes in place of the log-probabilities."""
        head = self._head
        return ChatReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                ChatReplyChoice(
                    whole.choice,
                    ChatReplyMessage(head.role, whole.text),
                    hole(ChatLogprobs) if head.with_logprobs else None,
                    whole.finish_reason or "stop",
                    whole.stop_reason,
                )
                for whole in choices
            ],
            usage=usage,
        )

    def logprobs_pieces(self, drawn: Sequence[DrawnToken]) -> Iterator[bytes]:
        """Yield the JSON of `chat_logprobs`, piece by piece."""
        before, after = msgspec.json.encode(ChatLogprobs(hole(list[ChatToken]))).split(HOLE)
        yield before
        yield from list_pieces(drawn, _token)
        yield after

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType) -> ChatChunk:
        head = self._head
        return ChatChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


def _before_first_token(usage: UsageBody | UnsetType) -> UsageBody | UnsetType:
    if isinstance(usage, UnsetType):
        return usage
    return UsageBody(usage.prompt_tokens, 0, usage.prompt_tokens, usage.prompt_tokens_details)
