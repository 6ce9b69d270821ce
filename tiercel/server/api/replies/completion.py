"""Answers of /v1/completions, whole and as stream chunks.

A field that has nothing is null or left out (UNSET), as the types of OpenAI's clients have it. vLLM's own fields are
null in whole answers and left out of chunks.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.api.replies.data_events import DataEvents
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.replies.hole import hole, list_pieces
from tiercel.server.api.replies.prompt_logprobs import PromptLogprobs, prompt_logprobs_pieces
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.logprobs import DrawnToken, TokenChoice
from tiercel.server.client.prompt_answer import PromptAnswer


class TextLogprobs(Struct, frozen=True):
    """The log-probabilities of the tokens of a text, as parallel lists; null for the first token of a prompt.

    `text_offset`: the character of the text at which the token begins. A token without text, such as a hidden stop
    token, has that of the next character, and several tokens of one character have the same.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextReplyChoice(Struct, frozen=True, kw_only=True):
    """One choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class TextReply(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextReplyChoice]
    service_tier: str | None = None
    system_fingerprint: str | UnsetType = UNSET
    usage: UsageBody
    kv_transfer_params: None = None


class TextChunkChoice(Struct, frozen=True, kw_only=True):
    """The new part of one choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChunkChoice]
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    usage: UsageBody | UnsetType | None = UNSET


class TextShape(DataEvents):
    """Turns deltas into text completion chunks and bodies."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._prompt_lengths: dict[int, int] = {}  # characters of the repeated prompt, by choice that has begun
        self._prompts: Sequence[PromptAnswer] = ()

    def begin(self, prompts: Sequence[PromptAnswer]) -> None:
        """Take the prompt of each choice, before anything else."""
        self._prompts = prompts

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> list[TextChunk]:
        """Return one chunk, or none while all text is held back. The first one of a choice repeats the prompt."""
        is_end, is_first = delta.finish_reason is not None, delta.choice not in self._prompt_lengths
        prompt = self._prompts[delta.choice] if is_first and self._prompts else None
        echoed = prompt is not None and prompt.text is not None
        if not (delta.text or delta.logprobs or delta.tokens or is_end or echoed):
            return []
        head = self._head
        if is_first:
            self._prompt_lengths[delta.choice] = len(prompt.text or "") if prompt is not None else 0
        text = prompt.text + delta.text if prompt is not None and prompt.text is not None else delta.text
        logprobs = None
        if head.with_logprobs:
            entries = list(self._entries(prompt, delta))
            logprobs = TextLogprobs(
                list(_offsets(prompt, delta, self._prompt_lengths[delta.choice])),
                [_logprob(entry) for entry in entries],
                [_name(entry.drawn, head) for entry in entries],
                [_tops(entry, head) for entry in entries],
            )
        choice = TextChunkChoice(
            index=delta.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if is_end else UNSET,
            token_ids=list(delta.tokens) if head.with_tokens else UNSET,
            prompt_token_ids=list(prompt.tokens) if head.with_tokens and prompt is not None else UNSET,
        )
        return [self._chunk([choice], usage, is_end=is_end)]

    def usage_chunk(self, usage: UsageBody) -> TextChunk:
        """Return the final chunk for `include_usage`."""
        return self._chunk([], usage, is_end=True)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> TextReply:
        """Return the whole answer, with holes in place of the log-probabilities."""
        head = self._head
        return TextReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(whole) for whole in choices],
            service_tier=head.service_tier,
            system_fingerprint=head.system_fingerprint or UNSET,
            usage=usage,
        )

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield the JSON of each hole, in order, piece by piece."""
        for whole in choices:
            prompt = self._prompts[whole.choice]
            if self._head.with_logprobs:
                yield self._logprobs_pieces(prompt, whole)
            if self._head.with_prompt_logprobs:
                yield prompt_logprobs_pieces(prompt)

    def _choice(self, whole: ChoiceDelta) -> TextReplyChoice:
        head, prompt = self._head, self._prompts[whole.choice]
        return TextReplyChoice(
            index=whole.choice,
            text=(prompt.text or "") + whole.text,
            logprobs=hole(TextLogprobs) if head.with_logprobs else None,
            finish_reason=whole.finish_reason or "stop",
            stop_reason=whole.stop_reason,
            token_ids=list(whole.tokens) if head.with_tokens else None,
            prompt_logprobs=hole(PromptLogprobs) if head.with_prompt_logprobs else None,
            prompt_token_ids=list(prompt.tokens) if head.with_tokens else None,
        )

    def _logprobs_pieces(self, prompt: PromptAnswer, whole: ChoiceDelta) -> Iterator[bytes]:
        """Yield the JSON of `TextLogprobs`, piece by piece."""
        head = self._head
        yield b'{"text_offset":'
        yield from list_pieces(_offsets(prompt, whole, len(prompt.text or "")), lambda offset: offset)
        yield b',"token_logprobs":'
        yield from list_pieces(self._entries(prompt, whole), _logprob)
        yield b',"tokens":'
        yield from list_pieces(self._entries(prompt, whole), lambda entry: _name(entry.drawn, head))
        yield b',"top_logprobs":'
        yield from list_pieces(self._entries(prompt, whole), lambda entry: _tops(entry, head))
        yield b"}"

    def _entries(self, prompt: PromptAnswer | None, delta: ChoiceDelta) -> Iterable[DrawnToken]:
        """Return the tokens of a repeated prompt, if there is one, and of the outputs."""
        if prompt is None or prompt.text is None:
            return delta.logprobs
        return chain((prompt.first,), prompt.logprobs, delta.logprobs)

    def _chunk(self, choices: list[TextChunkChoice], usage: UsageBody | UnsetType | None, *, is_end: bool) -> TextChunk:
        head = self._head
        return TextChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            service_tier=head.service_tier or UNSET,
            system_fingerprint=head.system_fingerprint or UNSET if is_end else UNSET,
            usage=usage,
        )


def _offsets(prompt: PromptAnswer | None, delta: ChoiceDelta, prompt_length: int) -> Iterator[int]:
    """Yield the character of the text at which each token of `TextShape._entries` begins.

    `prompt_length`: characters of the repeated prompt before the outputs.
    """
    if prompt is not None and prompt.text is not None:
        yield from prompt.text_starts
    yield from (prompt_length + start for start in delta.logprobs.packed.text_starts)


def _logprob(entry: DrawnToken) -> float | None:
    return entry.drawn.logprob if entry.rank else None


def _name(token: TokenChoice, head: ReplyHead) -> str:
    """Return how a token is written: its text, or as OpenAI does its bytes if they are not whole characters."""
    if "\ufffd" in token.text and token.text.encode() != token.bytes:
        return head.token_name(token.token, "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes))
    return head.token_name(token.token, token.text)


def _tops(entry: DrawnToken, head: ReplyHead) -> dict[str, float] | None:
    """Return log-probabilities by the name of the token: the drawn one first, as in vLLM, then the most likely.

    Of several tokens with one name, that which was drawn keeps it, and the others are written "token_id:123".
    """
    if not entry.rank:
        return None
    token_by_name = {_name(entry.drawn, head): entry.drawn.token}
    logprob_by_name: dict[str, float] = {}
    for one in (entry.drawn, *entry.likeliest):
        name = _name(one, head)
        if token_by_name.setdefault(name, one.token) != one.token:
            name = f"token_id:{one.token}"
        logprob_by_name[name] = one.logprob
    return logprob_by_name
