"""Answers of /v1/completions, whole and as stream chunks.

Whole answers carry every field, null where there is nothing. Chunks leave out what does not apply (UNSET).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.replies.hole import hole, list_pieces
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.engine.choice_text import ChoiceDelta
from tiercel.server.engine.logprobs import DrawnToken


class TextLogprobs(Struct, frozen=True):
    """The log-probabilities of the tokens of a text, as parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


def text_logprobs(drawn: Sequence[DrawnToken], offset: int) -> TextLogprobs:
    """Return log-probabilities in the shape of text completions; `offset` is the position of the first token."""
    return TextLogprobs(
        list(_offsets(drawn, offset)),
        [entry.drawn.logprob for entry in drawn],
        [entry.drawn.text for entry in drawn],
        [_with_drawn(entry) for entry in drawn],
    )


def _offsets(drawn: Iterable[DrawnToken], offset: int) -> Iterator[int]:
    """Yield the position of each token in the text."""
    for entry in drawn:
        yield offset
        offset += len(entry.drawn.text)


def _with_drawn(entry: DrawnToken) -> dict[str, float]:
    """Return log-probabilities by text, the most likely first; of tokens with equal text, the most likely one."""
    logprob_by_text: dict[str, float] = {}
    for one in (*entry.likeliest, entry.drawn):
        logprob_by_text.setdefault(one.text, one.logprob)
    return logprob_by_text


class TextReplyChoice(Struct, frozen=True):
    """One choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class TextReply(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextReplyChoice]
    usage: UsageBody
    system_fingerprint: str | None = None


class TextChunkChoice(Struct, frozen=True):
    """The new part of one choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class TextChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageBody | UnsetType = UNSET


class TextShape:
    """Turns deltas into text completion chunks and bodies."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._offsets: dict[int, int] = {}

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> list[TextChunk]:
        """Return one chunk, or none while all text is held back."""
        is_end = delta.finish_reason is not None
        if not (delta.text or delta.logprobs or is_end):
            return []
        logprobs = None
        if self._head.with_logprobs:
            offset = self._offsets.get(delta.choice, 0)
            drawn = tuple(delta.logprobs)
            logprobs = text_logprobs(drawn, offset)
            self._offsets[delta.choice] = offset + sum(len(entry.drawn.text) for entry in drawn)
        stop_reason = delta.stop_reason if is_end else UNSET
        return [
            self._chunk([TextChunkChoice(delta.choice, delta.text, logprobs, delta.finish_reason, stop_reason)], usage)
        ]

    def usage_chunk(self, usage: UsageBody) -> TextChunk:
        """Return the final chunk for `include_usage`."""
        return self._chunk([], usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> TextReply:
        """Return the whole answer, with holes in place of the log-probabilities."""
        head = self._head
        return TextReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                TextReplyChoice(
                    whole.choice,
                    whole.text,
                    hole(TextLogprobs) if head.with_logprobs else None,
                    whole.finish_reason or "stop",
                    whole.stop_reason,
                )
                for whole in choices
            ],
            usage=usage,
        )

    def logprobs_pieces(self, drawn: Sequence[DrawnToken]) -> Iterator[bytes]:
        """Yield the JSON of `text_logprobs`, piece by piece."""
        yield b'{"text_offset":'
        yield from list_pieces(_offsets(drawn, 0), lambda offset: offset)
        yield b',"token_logprobs":'
        yield from list_pieces(drawn, lambda entry: entry.drawn.logprob)
        yield b',"tokens":'
        yield from list_pieces(drawn, lambda entry: entry.drawn.text)
        yield b',"top_logprobs":'
        yield from list_pieces(drawn, _with_drawn)
        yield b"}"

    def _chunk(self, choices: list[TextChunkChoice], usage: UsageBody | UnsetType) -> TextChunk:
        head = self._head
        return TextChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
