"""Pooled states into the answers of /score and /rerank."""

import math
from array import array
from collections.abc import Sequence

from tiercel.server.api.replies.embeddings import (
    PooledShape,
    Ranked,
    RankedDocument,
    RankedText,
    RerankReply,
    Score,
    ScoreReply,
    cosine,
    embedding_usage,
)
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta


class ScoreShape(PooledShape):
    """Turns the states of two lists of texts into similarities; a single first text belongs to every second one."""

    def __init__(self, id: str, created: int, model: str, num_firsts: int) -> None:
        super().__init__()
        self._id = id
        self._created = created
        self._model = model
        self._num_firsts = num_firsts

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ScoreReply:
        """Return the whole answer."""
        vectors = self.vectors()
        firsts, seconds = vectors[: self._num_firsts], vectors[self._num_firsts :]
        data = [
            Score(index=index, score=cosine(firsts[index % self._num_firsts], second))
            for index, second in enumerate(seconds)
        ]
        return ScoreReply(
            id=self._id, created=self._created, model=self._model, data=data, usage=embedding_usage(usage)
        )


class RerankShape(PooledShape):
    """Turns the states of a query and of documents into the order of the documents."""

    def __init__(self, id: str, model: str, top_n: int, shown: Sequence[str] | None) -> None:
        super().__init__()
        self._id = id
        self._model = model
        self._top_n = top_n
        self._shown = shown

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> RerankReply:
        """Return the whole answer."""
        results = [
            Ranked(
                index=index,
                document=None if self._shown is None else RankedDocument(self._shown[index]),
                relevance_score=score,
            )
            for index, score in _ranking(self.vectors())[: self._top_n]
        ]
        return RerankReply(id=self._id, model=self._model, results=results, usage=embedding_usage(usage))


class TextRerankShape(PooledShape):
    """Turns the states of a query and of texts into the order of the texts, in the form of TEI."""

    def __init__(self, shown: Sequence[str] | None, *, is_raw: bool) -> None:
        super().__init__()
        self._shown = shown
        self._is_raw = is_raw

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> list[RankedText]:
        """Return the whole answer."""
        return [
            RankedText(
                index=index,
                score=score if self._is_raw else 1 / (1 + math.exp(-score)),
                text=None if self._shown is None else self._shown[index],
            )
            for index, score in _ranking(self.vectors())
        ]


def _ranking(vectors: "Sequence[array[float]]") -> list[tuple[int, float]]:
    """Return the number and the similarity of each vector but the first, to which they are compared, best first."""
    query, *others = vectors
    scores = [cosine(query, other) for other in others]
    return sorted(enumerate(scores), key=lambda ranked: -ranked[1])
