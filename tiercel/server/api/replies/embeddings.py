"""Answers of /v1/embeddings, /v1/score and /v1/rerank."""

import base64
import math
import operator
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, UnsetType

from tiercel.server.api.replies.data_events import DataEvents
from tiercel.server.api.replies.hole import hole
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.prompt_answer import PromptAnswer

EncodingFormat = Literal["float", "base64"]


class EmbeddingUsage(Struct, frozen=True):
    """The token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or base64 of float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(Struct, frozen=True, kw_only=True):
    """The vectors of all inputs, of length 1 each."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(Struct, frozen=True, kw_only=True):
    """The similarity of one pair of texts: the cosine of the angle between their vectors."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreReply(Struct, frozen=True, kw_only=True):
    """The similarities of all pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedDocument(Struct, frozen=True):
    """The text of a document."""

    text: str


class Ranked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document and its similarity to the query."""

    index: int  # of the document in the request
    document: RankedDocument | None = None
    relevance_score: float


class RerankReply(Struct, frozen=True, kw_only=True):
    """The documents, the most similar first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class RankedText(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text and its similarity to the query, in the form of TEI."""

    index: int  # of the text in the request
    score: float
    text: str | None = None


def unit(vector: Sequence[float], dimensions: int | None = None) -> "array[float]":
    """Return the first `dimensions` numbers of a vector, scaled to length 1. A vector of zeros stays."""
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return array("f", [number / length for number in kept])


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return math.fsum(map(operator.mul, first, second)) / lengths if lengths else 0.0


class PooledShape(DataEvents):
    """Turns the pooled states of a request into a body; it is never streamed."""

    def __init__(self) -> None:
        self._prompts: Sequence[PromptAnswer] = ()

    def begin(self, prompts: Sequence[PromptAnswer]) -> None:
        """Take the inputs, whose states are computed later."""
        self._prompts = prompts

    def vectors(self) -> "list[array[float]]":
        """Return the pooled states of the inputs, which are computed."""
        return [prompt.read_pooled() for prompt in self._prompts]

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> Sequence[Struct]:
        """Return nothing: there is no text."""
        return ()

    def usage_chunk(self, usage: UsageBody) -> EmbeddingUsage:
        """Return the token counts."""
        return embedding_usage(usage)

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield nothing: the body has no holes."""
        return iter(())


class EmbeddingShape(PooledShape):
    """Turns pooled states into embeddings."""

    def __init__(self, model: str, form: EncodingFormat, dimensions: int | None) -> None:
        super().__init__()
        self._model = model
        self._form = form
        self._dimensions = dimensions

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> EmbeddingReply:
        """Return the body with a hole in place of the vectors."""
        return EmbeddingReply(data=hole(list[Embedding]), model=self._model, usage=embedding_usage(usage))

    def hole_pieces(self, choices: Sequence[ChoiceDelta]) -> Iterator[Iterator[bytes]]:
        """Yield the JSON of the vectors, one after the other."""
        yield self._pieces()

    def _pieces(self) -> Iterator[bytes]:
        before = b"["
        for index, vector in enumerate(self.vectors()):
            yield before + msgspec.json.encode(Embedding(index=index, embedding=self._encoded(vector)))
            before = b","
        yield b"]"

    def _encoded(self, vector: Sequence[float]) -> list[float] | str:
        scaled = unit(vector, self._dimensions)
        if self._form == "float":
            return scaled.tolist()
        if sys.byteorder == "big":
            scaled.byteswap()
        return base64.b64encode(scaled.tobytes()).decode()


def embedding_usage(usage: UsageBody) -> EmbeddingUsage:
    """Return the token counts as clients get them."""
    return EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
