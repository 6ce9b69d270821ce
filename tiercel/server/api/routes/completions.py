"""/v1/completions."""

from dataclasses import dataclass

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.expansion import check_expansion
from tiercel.server.api.params import ModelLimits, SamplingPlan, completion_plan, too_long
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.prompt import check_text_length, check_tokens, encode_texts, split_prompts
from tiercel.server.api.replies.completion import TextChunk, TextReply, TextShape
from tiercel.server.api.schemas.completion import CompletionFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.truncation import truncated, truncation_of
from tiercel.server.text.fill_in import FillInTokens
from tiercel.values.errors import AdmissionError

_TOKEN_BYTES = 8  # the place of a token in a list; a token has at least one character
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
        return await self._pipeline.answer(request, self._read, ("echo", "truncate_prompt_tokens"))

    def _read(self, body: dict[str, object]) -> ReadCall:
        fields = read_fields(CompletionFields, body)
        head = self._pipeline.head(fields, "cmpl-", with_logprobs=fields.logprobs is not None)
        fill_in, prompts = self._fill_in(fields) if fields.suffix else None, split_prompts(fields.prompt)
        if fields.suffix:
            expanded = len(fields.suffix.encode()) * len(prompts)
            limit_bytes = self._context.settings.max_body_bytes
            check_expansion("suffix", f"the suffix of {len(prompts)} prompts", expanded, limit_bytes)
        call = _CompletionCall(fields, prompts, self._context, fill_in)
        return call, TextShape(head), head.model

    def _fill_in(self, fields: CompletionFields) -> FillInTokens:
        """Return the tokens for `suffix`. Errors: AdmissionError (400) if the model has none, or with `echo`."""
        tokens = FillInTokens.of(self._context.codec)
        if tokens is None:
            raise AdmissionError(
                400,
                "suffix: the tokenizer of this model has no fill-in-the-middle tokens",
                code="unsupported_parameter",
                param="suffix",
            )
        if fields.echo:
            raise AdmissionError(400, "echo cannot be combined with suffix", param="echo")
        if fields.truncate_prompt_tokens is not None:
            raise AdmissionError(
                400, "truncate_prompt_tokens cannot be combined with suffix", param="truncate_prompt_tokens"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class _CompletionCall:
    fields: CompletionFields
    prompts: list[str] | list[list[int]]
    context: ServerContext
    fill_in: FillInTokens | None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def field(self) -> str:
        return "prompt"

    @property
    def expanded_bytes(self) -> int:
        return _TOKEN_BYTES * len(self.fields.suffix or "") * (len(self.prompts) - 1)

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        plan = completion_plan(self.fields, self.context.defaults, limits)
        if not self.fields.echo:
            return plan
        is_whole = self.fields.truncate_prompt_tokens is None
        return replace(
            plan, echo=tuple(prompt if is_whole and isinstance(prompt, str) else None for prompt in self.prompts)
        )

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        if self.fill_in is not None:
            return await self.context.in_worker(lambda: self._fill_in_prompts(limits))
        truncation = truncation_of(self.fields, limits, self.fields.num_outputs)
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        if texts:
            codec, add = self.context.codec, self.fields.add_special_tokens
            most = None if truncation is None else self.context.max_values
            return await self.context.in_worker(
                lambda: encode_texts(
                    codec, texts, limits, add_special_tokens=add, most_tokens=most, truncation=truncation
                )
            )
        tokens = truncated([prompt for prompt in self.prompts if isinstance(prompt, list)], truncation)
        if sum(map(len, tokens)) > _LARGE_TOKENS:
            await self.context.in_worker(lambda: check_tokens(tokens, limits, "prompt"))
        else:
            check_tokens(tokens, limits, "prompt")
        return tokens

    def _fill_in_prompts(self, limits: ModelLimits) -> list[list[int]]:
        codec, fill_in, suffix = self.context.codec, self.fill_in, self.fields.suffix or ""
        assert fill_in is not None  # asked before
        for given in (*self.prompts, suffix):
            if isinstance(given, str):
                check_text_length(len(given), codec, limits)
        add = self.fields.add_special_tokens
        (after,) = encode_texts(codec, [suffix], limits, add_special_tokens=False, field="suffix")
        if len(after) >= limits.longest:
            raise too_long(len(after), limits)
        prompts = [fill_in.prompt(codec, given, after, add_special_tokens=add) for given in self.prompts]
        check_tokens(prompts, limits, "prompt")
        return prompts
