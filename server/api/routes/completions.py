"""/v1/completions."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.params import ModelLimits, SamplingPlan, completion_plan
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.prompt import check_tokens, encode_texts, split_prompts
from tiercel.server.api.replies.completion import TextChunk, TextReply, TextShape
from tiercel.server.api.schemas.completion import CompletionFields
from tiercel.server.api.schemas.fields import read_fields

_LARGE_TOKENS = 16 * 1024  # of all prompts: more than this are checked by a worker


class CompletionRoutes:
    """The handlers of the completion API."""

    def __init__(self, context: ServerContext, pipeline: GenerationPipeline) -> None:
        self._context = context
        self._pipeline = pipeline

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        contract = Contract(
            bodies=(CompletionFields,), answers={200: TextReply}, events=TextChunk, refusals=GENERATION_REFUSALS
        )
        return [ApiRoute("POST", "/v1/completions", self.complete, contract)]

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        return await self._pipeline.answer(request, self._read)

    def _read(self, body: dict[str, object]) -> ReadCall:
        fields = read_fields(CompletionFields, body)
        head = self._pipeline.head(fields, "cmpl-", with_logprobs=fields.logprobs is not None)
        return _CompletionCall(fields, split_prompts(fields.prompt), self._context), TextShape(head), head.model


@dataclass(frozen=True, slots=True)
class _CompletionCall:
    fields: CompletionFields
    prompts: list[str] | list[list[int]]
    context: ServerContext

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        return completion_plan(self.fields, self.context.defaults, limits)

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        if texts:
            codec, add = self.context.codec, self.fields.add_special_tokens
            return await self.context.in_worker(lambda: encode_texts(codec, texts, limits, add_special_tokens=add))
        tokens = [prompt for prompt in self.prompts if isinstance(prompt, list)]
        if sum(map(len, tokens)) > _LARGE_TOKENS:
            await self.context.in_worker(lambda: check_tokens(tokens, limits, "prompt"))
        else:
            check_tokens(tokens, limits, "prompt")
        return tokens
