"""/v1/embeddings, and similarities of texts on the same vectors: /score and /rerank, with their other names."""

import functools
import secrets

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.middleware import record_of
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.pooled_call import PooledCall
from tiercel.server.api.prompt import split_prompts
from tiercel.server.api.replies.embeddings import EmbeddingReply, EmbeddingShape, RankedText, RerankReply, ScoreReply
from tiercel.server.api.replies.similarity import RerankShape, ScoreShape, TextRerankShape
from tiercel.server.api.schemas.embeddings import (
    MAX_INPUTS,
    EmbeddingFields,
    RerankFields,
    ScoreFields,
    TextRerankFields,
)
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.tracing.record import RequestRecord
from tiercel.values.errors import AdmissionError

_OWN_FIELDS = ("truncate_prompt_tokens",)  # which other routes refuse


class EmbeddingRoutes:
    """The handlers of the routes over pooled states."""

    def __init__(self, context: ServerContext, pipeline: GenerationPipeline) -> None:
        self._context = context
        self._pipeline = pipeline

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        embed = Contract(bodies=(EmbeddingFields,), answers={200: EmbeddingReply}, refusals=GENERATION_REFUSALS)
        score = Contract(bodies=(ScoreFields,), answers={200: ScoreReply}, refusals=GENERATION_REFUSALS)
        rerank = Contract(
            bodies=(RerankFields, TextRerankFields),
            answers={200: RerankReply | list[RankedText]},
            refusals=GENERATION_REFUSALS,
        )
        return [
            ApiRoute("POST", "/v1/embeddings", self.embed, embed),
            *(ApiRoute("POST", path, self.score, score) for path in ("/v1/score", "/score")),
            *(ApiRoute("POST", path, self.rerank, rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        ]

    async def embed(self, request: Request) -> Response:
        """Return a vector for each input."""
        return await self._pipeline.answer(request, self._read_inputs, _OWN_FIELDS)

    async def score(self, request: Request) -> Response:
        """Return the similarity of each pair of texts."""
        record_of(request.scope).score = self._context.pooling.score
        return await self._pipeline.answer(request, self._read_pairs, _OWN_FIELDS)

    async def rerank(self, request: Request) -> Response:
        """Return documents in the order of their similarity to a query; a body with `texts` is one of TEI."""
        record = record_of(request.scope)
        record.score = self._context.pooling.score
        return await self._pipeline.answer(
            request, functools.partial(self._read_ranking, record), ("documents", *_OWN_FIELDS)
        )

    def _read_inputs(self, body: dict[str, object]) -> ReadCall:
        fields = read_fields(EmbeddingFields, body)
        size = self._context.pooling.hidden_size
        if fields.dimensions is not None and size is not None and fields.dimensions > size:
            raise AdmissionError(400, f"dimensions: {fields.dimensions} of a model with {size}", param="dimensions")
        model = self._context.model_name(fields.model)
        inputs = split_prompts(fields.input, "input", MAX_INPUTS)
        shape = EmbeddingShape(model, fields.encoding_format or "float", fields.dimensions)
        return PooledCall(fields, inputs, "input", self._context), shape, model

    def _read_pairs(self, body: dict[str, object]) -> ReadCall:
        fields = read_fields(ScoreFields, body)
        firsts = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
        seconds = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
        if len(firsts) not in (1, len(seconds)):
            raise AdmissionError(
                400, f"text_1: one text, or {len(seconds)} as in text_2; got {len(firsts)}", param="text_1"
            )
        model = self._context.model_name(fields.model)
        shape = ScoreShape(_new_id("score"), int(self._context.wall_s()), model, len(firsts))
        return PooledCall(fields, [*firsts, *seconds], "text_2", self._context), shape, model

    def _read_ranking(self, record: RequestRecord, body: dict[str, object]) -> ReadCall:
        if body.get("texts") is None:
            return self._read_documents(body)
        if body.get("documents") is not None:
            raise AdmissionError(400, "texts and documents cannot be combined", param="texts")
        fields = read_fields(TextRerankFields, body)
        if not fields.raw_scores:
            record.score = f"sigmoid of {self._context.pooling.score}"
        shown = fields.texts if fields.return_text else None
        shape = TextRerankShape(shown, is_raw=bool(fields.raw_scores))
        model = self._context.model_name(fields.model)
        return PooledCall(fields, [fields.query, *fields.texts], "texts", self._context), shape, model

    def _read_documents(self, body: dict[str, object]) -> ReadCall:
        fields = read_fields(RerankFields, body)
        model = self._context.model_name(fields.model)
        shown = fields.documents if fields.return_documents is not False else None
        shape = RerankShape(_new_id("rerank"), model, fields.top_n or len(fields.documents), shown)
        return PooledCall(fields, [fields.query, *fields.documents], "documents", self._context), shape, model


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"
