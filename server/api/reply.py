"""What clients get: bodies and stream chunks in OpenAI's shapes.

Bodies carry every field, null where there is nothing. Chunks leave out what does not apply (UNSET).
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.engine.generation import ChoiceDelta, DrawnToken, TokenUsage


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_body(usage: TokenUsage, *, with_details: bool) -> UsageBody:
    """Usage as clients see it."""
    details = PromptTokensDetails(usage.cached_tokens) if with_details else None
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, details)


class ChatTokenChoice(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTokenChoice]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatToken]
    refusal: None = None


def chat_logprobs(drawn: Sequence[DrawnToken]) -> ChatLogprobs:
    """Log-probabilities in the shape of chat."""
    return ChatLogprobs(
        [
            ChatToken(
                entry.drawn.text,
                entry.drawn.logprob,
                list(entry.drawn.bytes),
                [ChatTokenChoice(one.text, one.logprob, list(one.bytes)) for one in entry.likeliest],
            )
            for entry in drawn
        ]
    )


class TextLogprobs(Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


def text_logprobs(drawn: Sequence[DrawnToken], offset: int) -> TextLogprobs:
    """Log-probabilities in the shape of text completions; `offset` is where the first token starts in the text."""
    offsets: list[int] = []
    for entry in drawn:
        offsets.append(offset)
        offset += len(entry.drawn.text)
    return TextLogprobs(
        offsets,
        [entry.drawn.logprob for entry in drawn],
        [entry.drawn.text for entry in drawn],
        [_with_drawn(entry) for entry in drawn],
    )


def _with_drawn(entry: DrawnToken) -> dict[str, float]:
    """By text, the likeliest first; of tokens that read the same only the likeliest."""
    logprob_by_text: dict[str, float] = {}
    for one in (*entry.likeliest, entry.drawn):
        logprob_by_text.setdefault(one.text, one.logprob)
    return logprob_by_text


class ChatReplyMessage(Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatReplyChoice(Struct, frozen=True):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatReply(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatReplyChoice]
    usage: UsageBody
    system_fingerprint: str | None = None


class TextReplyChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class TextReply(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextReplyChoice]
    usage: UsageBody
    system_fingerprint: str | None = None


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType = UNSET


class TextChunkChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class TextChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageBody | UnsetType = UNSET


class ReplyHead(Struct, frozen=True, kw_only=True):
    """What is the same in every chunk and body of one client request."""

    id: str
    created: int
    model: str
    with_logprobs: bool
    with_details: bool
    role: str


class ChatShape:
    """Deltas to chat chunks and bodies."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._greeted: set[int] = set()

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> list[ChatChunk]:
        """The role chunk of a choice that speaks for the first time, then its text."""
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
        """The extra chunk at the end that `include_usage` asks for."""
        return self._chunk([], usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ChatReply:
        """The whole answer at once."""
        head = self._head
        return ChatReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                ChatReplyChoice(
                    whole.choice,
                    ChatReplyMessage(head.role, whole.text),
                    chat_logprobs(whole.logprobs) if head.with_logprobs else None,
                    whole.finish_reason or "stop",
                    whole.stop_reason,
                )
                for whole in choices
            ],
            usage=usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType) -> ChatChunk:
        head = self._head
        return ChatChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


def _before_first_token(usage: UsageBody | UnsetType) -> UsageBody | UnsetType:
    if isinstance(usage, UnsetType):
        return usage
    return UsageBody(usage.prompt_tokens, 0, usage.prompt_tokens, usage.prompt_tokens_details)


class TextShape:
    """Deltas to text completion chunks and bodies."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._offsets: dict[int, int] = {}

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> list[TextChunk]:
        """One chunk, or none while everything is held back."""
        is_end = delta.finish_reason is not None
        if not (delta.text or delta.logprobs or is_end):
            return []
        logprobs = None
        if self._head.with_logprobs:
            offset = self._offsets.get(delta.choice, 0)
            logprobs = text_logprobs(delta.logprobs, offset)
            self._offsets[delta.choice] = offset + sum(len(entry.drawn.text) for entry in delta.logprobs)
        stop_reason = delta.stop_reason if is_end else UNSET
        return [
            self._chunk([TextChunkChoice(delta.choice, delta.text, logprobs, delta.finish_reason, stop_reason)], usage)
        ]

    def usage_chunk(self, usage: UsageBody) -> TextChunk:
        """The extra chunk at the end that `include_usage` asks for."""
        return self._chunk([], usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> TextReply:
        """The whole answer at once."""
        head = self._head
        return TextReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                TextReplyChoice(
                    whole.choice,
                    whole.text,
                    text_logprobs(whole.logprobs, 0) if head.with_logprobs else None,
                    whole.finish_reason or "stop",
                    whole.stop_reason,
                )
                for whole in choices
            ],
            usage=usage,
        )

    def _chunk(self, choices: list[TextChunkChoice], usage: UsageBody | UnsetType) -> TextChunk:
        head = self._head
        return TextChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
