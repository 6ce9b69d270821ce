"""Pooled states into the answers of /v1/score and /v1/rerank."""

from collections.abc import Sequence

from tiercel.server.api.replies.embeddings import (
    PooledShape,
    Ranked,
    RankedDocument,
    RerankReply,
    Score,
    ScoreReply,
    cosine,
    embedding_usage,
)
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.engine.choice_text import ChoiceDelta


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
        query, *documents = self.vectors()
        scores = [cosine(query, document) for document in documents]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        results = [
            Ranked(
                index=index,
                document=None if self._shown is None else RankedDocument(self._shown[index]),
                relevance_score=scores[index],
            )
            for index in best
        ]
        return RerankReply(id=self._id, model=self._model, results=results, usage=embedding_usage(usage))
