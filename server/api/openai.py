"""The OpenAI routes: chat and text completions, and the models."""

import secrets
from collections.abc import Sequence

import structlog
from fastapi import APIRouter
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiercel.request import SamplingParams, pack_tokens
from tiercel.server.api.context import ServerContext
from tiercel.server.api.middleware import record_of
from tiercel.server.api.params import ModelLimits, SamplingPlan, chat_plan, completion_plan
from tiercel.server.api.prompt import chat_work, check_tokens, empty_prompt, encode_texts, split_prompts
from tiercel.server.api.reply import ChatShape, ReplyHead, TextShape
from tiercel.server.api.schemas import (
    ChatFields,
    CompletionFields,
    SamplingFields,
    read_fields,
    refuse_unsupported,
    refuse_unsupported_in_messages,
)
from tiercel.server.api.stream import EventStream, FailureNote, ReplyShape, StreamRules, whole_reply
from tiercel.server.engine.generation import (
    ChoiceText,
    EngineGoneError,
    Generation,
    GenerationError,
    SequenceFailedError,
)
from tiercel.server.engine.mailbox import Mailbox, unread_limit_bytes
from tiercel.server.engine.sequences import SequenceStart
from tiercel.server.http.watch import run_watched
from tiercel.server.tenancy.admission import AdmissionRequest, Entry
from tiercel.server.tenancy.auth import tenant_of
from tiercel.server.tenancy.tenants import Tenant, narrowed
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.tracing.record import RequestRecord

_LARGE_TOKENS = 16 * 1024  # of all prompts: more than this are checked by a worker


class _Prepared(Struct, frozen=True):
    """A client request, checked and tokenised."""

    plan: SamplingPlan
    prompts: list[list[int]]
    params: list[SamplingParams]  # one a prompt


class OpenAIRoutes:
    """Handlers of /v1. Every body is read and checked by us, never by the framework: errors stay OpenAI's."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log = structlog.stdlib.get_logger("server.generation")

    def router(self) -> APIRouter:
        """The routes, without their guard."""
        router = APIRouter(prefix="/v1", tags=["openai"])
        router.add_api_route("/chat/completions", self.chat, methods=["POST"], response_model=None)
        router.add_api_route("/completions", self.complete, methods=["POST"], response_model=None)
        router.add_api_route("/models", self.models, methods=["GET"], response_model=None)
        router.add_api_route("/models/{name:path}", self.model, methods=["GET"], response_model=None)
        return router

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._read(request)
        refuse_unsupported_in_messages(body)
        fields = read_fields(ChatFields, body)
        head = self._head(fields, "chatcmpl-", with_logprobs=bool(fields.logprobs))
        template = self._context.chat_template()
        tenant, record = tenant_of(request.scope), record_of(request.scope)
        record.note_parsed(head.model)

        async def prepare() -> _Prepared:
            limits = await self._context.limits(tenant)
            plan = chat_plan(fields, self._context.defaults, limits)
            with record.tokenising():
                prompt = await self._context.in_worker(chat_work(fields, template, self._context.codec, limits))
            if not prompt.tokens:
                raise empty_prompt()
            return self._prepared(plan, [prompt.tokens], limits)

        with self._context.admission.enter(tenant, fields.n or 1) as entry:
            prepared = await run_watched(prepare(), request.receive)
            generation = self._submit(prepared, fields, tenant, entry, record)
        return await self._answer(generation, ChatShape(head), fields, request)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        body = await self._read(request)
        fields = read_fields(CompletionFields, body)
        head = self._head(fields, "cmpl-", with_logprobs=fields.logprobs is not None)
        prompts = split_prompts(fields.prompt)
        tenant, record = tenant_of(request.scope), record_of(request.scope)
        record.note_parsed(head.model)

        async def prepare() -> _Prepared:
            limits = await self._context.limits(tenant)
            plan = completion_plan(fields, self._context.defaults, limits)
            with record.tokenising():
                tokens = await self._tokens(prompts, fields, limits)
            return self._prepared(plan, tokens, limits)

        with self._context.admission.enter(tenant, fields.n or 1, prompts=len(prompts)) as entry:
            prepared = await run_watched(prepare(), request.receive)
            generation = self._submit(prepared, fields, tenant, entry, record)
        return await self._answer(generation, TextShape(head), fields, request)

    async def models(self) -> Response:
        """The names that this server answers to."""
        cards = [self._card(name) for name in self._context.settings.served_model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """One of them."""
        return JSONResponse(self._card(self._context.model_name(name)))

    async def _read(self, request: Request) -> dict[str, object]:
        record, tenant = record_of(request.scope), tenant_of(request.scope)
        record.tenant = tenant.name
        record.rate_headers = lambda: self._context.admission.rate_headers(tenant)
        body = await self._context.read_object(request)
        refuse_unsupported(body)
        return body

    def _head(self, fields: SamplingFields, prefix: str, *, with_logprobs: bool) -> ReplyHead:
        settings = self._context.settings
        return ReplyHead(
            id=prefix + secrets.token_hex(16),
            created=int(self._context.wall_s()),
            model=self._context.model_name(fields.model),
            with_logprobs=with_logprobs,
            with_details=settings.enable_prompt_tokens_details,
            role=settings.response_role,
        )

    async def _tokens(
        self, prompts: list[str] | list[list[int]], fields: CompletionFields, limits: ModelLimits
    ) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            codec = self._context.codec
            add = fields.add_special_tokens
            return await self._context.in_worker(lambda: encode_texts(codec, texts, limits, add_special_tokens=add))
        tokens = [prompt for prompt in prompts if isinstance(prompt, list)]
        if sum(map(len, tokens)) > _LARGE_TOKENS:
            await self._context.in_worker(lambda: check_tokens(tokens, limits, "prompt"))
        else:
            check_tokens(tokens, limits, "prompt")
        return tokens

    def _prepared(self, plan: SamplingPlan, prompts: list[list[int]], limits: ModelLimits) -> _Prepared:
        cap = self._context.defaults.max_new_tokens
        return _Prepared(plan, prompts, [plan.for_prompt(len(prompt), limits, cap) for prompt in prompts])

    def _submit(
        self, prepared: _Prepared, fields: SamplingFields, tenant: Tenant, entry: Entry, record: RequestRecord
    ) -> Generation:
        """Gate two, then the engine. Nothing is awaited in between: what was counted is what is submitted."""
        plan = prepared.plan
        order = AdmissionRequest(
            prompts=[len(prompt) for prompt in prepared.prompts],
            choices=plan.n,
            max_tokens=max(params.max_tokens for params in prepared.params),
            is_named=plan.max_tokens is not None,
            priority=fields.priority,
        )
        terms = entry.admit(order)
        record.service = None if terms.service is None else terms.service.value
        scope = narrowed(tenant.scope, fields.cache_salt)
        starts: list[SequenceStart] = []
        choices: list[ChoiceText] = []
        for prompt, params in zip(prepared.prompts, prepared.params, strict=True):
            packed = pack_tokens(prompt)
            params = _capped(params, terms.max_tokens)
            for choice in range(plan.n):
                starts.append(
                    SequenceStart(
                        prompt=packed,
                        num_prompt=len(prompt),
                        params=plan.choice_params(params, choice, self._context.draw_seed),
                        n=plan.n if choice == 0 else None,
                        scope=scope,
                        tenant=tenant.name,
                        band=terms.band,
                        num_uncached=len(prompt) * terms.uncached_share if choice == 0 else 0.0,
                        queue_s=terms.queue_s if choice == 0 else None,
                        num_reserved=terms.reserved,
                    )
                )
                choices.append(self._choice_text(prompt, plan))
        mailbox = Mailbox(limit_bytes=unread_limit_bytes(len(starts), plan.params.logprobs or 0))
        submission = self._context.client.submit(starts, mailbox, record.arrival_s)
        num_prompt = sum(len(prompt) for prompt in prepared.prompts)
        clock = self._context.clock
        generation = Generation(self._context.client, submission, mailbox, choices, num_prompt, clock)
        record.note_submitted(generation)
        return generation

    def _choice_text(self, prompt: Sequence[int], plan: SamplingPlan) -> ChoiceText:
        vocabulary = self._context.codec.vocabulary
        detokenizer = make_detokenizer(vocabulary, prompt, skip_special_tokens=plan.rules.skip_special_tokens)
        interval = self._context.settings.stream_interval
        return ChoiceText(detokenizer, plan.rules, vocabulary, plan.params.stop_token_ids, interval)

    async def _answer(
        self, generation: Generation, shape: ReplyShape, fields: SamplingFields, request: Request
    ) -> Response:
        settings = self._context.settings
        options = fields.stream_options
        include_usage = settings.enable_force_include_usage or bool(options and options.include_usage)
        rules = StreamRules(
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            with_details=settings.enable_prompt_tokens_details,
            keep_alive_s=settings.sse_keep_alive_interval_s,
        )
        note = self._failure_note(record_of(request.scope))
        if fields.stream:
            return EventStream(generation, shape, rules, note)
        return await whole_reply(generation, shape, rules, note, request.receive)

    def _failure_note(self, record: RequestRecord) -> FailureNote:
        def note(error: GenerationError) -> str:
            error_id = secrets.token_hex(8)
            reason = error.gone.code if isinstance(error, EngineGoneError) else "engine_error"
            detail = error.reason if isinstance(error, SequenceFailedError) else None
            record.outcome = "error"
            self._context.metrics.on_stream_error(reason)
            self._log.warning(
                "generation_failed", request_id=record.request_id, error_id=error_id, reason=reason, detail=detail
            )
            return error_id

        return note

    def _card(self, name: str) -> dict[str, object]:
        ready = self._context.client.status.ready
        return {
            "id": name,
            "object": "model",
            "created": self._context.started_at,
            "owned_by": "tiercel",
            "root": self._context.settings.served_model_names[0],
            "parent": None,
            "max_model_len": None if ready is None else ready.max_model_len,
            "permission": [],
        }


def _capped(params: SamplingParams, most: int | None) -> SamplingParams:
    """Fewer outputs than asked for, but never fewer than the least that was asked for."""
    if most is None or most >= params.max_tokens:
        return params
    return replace(params, max_tokens=max(most, params.min_tokens, 1))
