"""The pipeline of a generation request of either API: body, admission, tokens, engine, answer.

A route reads the body, checks its own fields and wraps them into a `GenerationCall`; the rest is the same for all.
"""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from tiercel.request import SamplingParams, pack_tokens
from tiercel.server.api.answer_budget import AnswerRoom
from tiercel.server.api.context import ServerContext
from tiercel.server.api.deadline import DEADLINE_EXCEEDED, QUEUE_TIMEOUT, deadline_of, queue_limit_of
from tiercel.server.api.delta_encoder import ReplyShape
from tiercel.server.api.middleware import record_of
from tiercel.server.api.params import ModelLimits, SamplingPlan
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.schemas.sampling import SamplingFields, StreamOptions
from tiercel.server.api.schemas.unsupported import refuse_unsupported
from tiercel.server.api.stream import EventStream, FailureNote, StreamRules
from tiercel.server.api.time_limits import TimeLimits
from tiercel.server.api.whole import WholeReply
from tiercel.server.engine.choice_text import ChoiceText, GenerationError, SequenceFailedError
from tiercel.server.engine.generation import Generation, StreamEndedError
from tiercel.server.engine.mailbox import Mailbox, portion_tokens
from tiercel.server.engine.sequences import SequenceStart
from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.watch import run_watched
from tiercel.server.tenancy.admission import AdmissionRequest, Entry, Terms
from tiercel.server.tenancy.auth import tenant_of
from tiercel.server.tenancy.tenants import Tenant, narrowed
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.tracing.record import RequestRecord


class GenerationCall(Protocol):
    """A generation request whose body has been checked."""

    @property
    def fields(self) -> SamplingFields: ...

    @property
    def num_prompts(self) -> int: ...

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        """Return how its prompts are sampled. Errors: AdmissionError (400)."""
        ...

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        """Return the tokens of its prompts. Errors: AdmissionError (400)."""
        ...


ReadCall = tuple[GenerationCall, ReplyShape, str]
"""A checked call, the shape of its answer, and the name of the model."""


class _ReplyFields(Struct, frozen=True):
    """The fields of a body that its answer needs."""

    stream: bool
    stream_options: StreamOptions | None


class _PreparedCall(Struct, frozen=True):
    """A client request, checked and tokenised."""

    plan: SamplingPlan
    prompts: list[list[int]]
    params: list[SamplingParams]  # of each prompt


class GenerationPipeline:
    """Serves generation requests of all routes. Errors keep OpenAI's shape: the framework checks no body."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log = structlog.stdlib.get_logger("server.generation")

    def head(self, fields: SamplingFields, id_prefix: str, *, with_logprobs: bool) -> ReplyHead:
        """Return the head of the answer. Errors: AdmissionError (404) for an unknown model."""
        settings = self._context.settings
        return ReplyHead(
            id=id_prefix + secrets.token_hex(16),
            created=int(self._context.wall_s()),
            model=self._context.model_name(fields.model),
            with_logprobs=with_logprobs,
            with_details=settings.enable_prompt_tokens_details,
            role="assistant",
        )

    async def answer(self, request: Request, read: Callable[[dict[str, object]], ReadCall]) -> Response:
        """Read a body with `read`, admit, tokenise and submit its call; return the answer.

        The time limits of the request hold from its arrival to the end of its answer. Errors: AdmissionError,
        ClientGoneError.
        """
        shape, fields, generation, room = await self._admit(request, read)  # nothing larger of the body lives longer
        rules, note = self._stream_rules(fields), self._failure_note(record_of(request.scope))
        if fields.stream:
            return EventStream(generation, shape, rules, note)
        return WholeReply(generation, shape, rules, note, self._context.codec.vocabulary, room)

    async def _admit(
        self, request: Request, read: Callable[[dict[str, object]], ReadCall]
    ) -> tuple[ReplyShape, _ReplyFields, Generation, AnswerRoom]:
        tenant, record = tenant_of(request.scope), record_of(request.scope)
        record.tenant = tenant.name
        record.rate_headers = lambda: self._context.admission.rate_headers(tenant)
        with self._context.hold_body(request) as holding:
            body = await self._context.read_object(request, holding)
            refuse_unsupported(body)
            call, shape, model = read(body)
            record.note_parsed(model)
            fields = call.fields
            with self._context.admission.enter(tenant, fields.n or 1, prompts=call.num_prompts) as entry:
                limits = self._time_limits(fields, request, tenant, record)
                preparing = limits.prepare(self._prepare(call, tenant, record, holding), record)
                prepared = await run_watched(preparing, request.receive)
                with contextlib.ExitStack() as until_submitted:
                    room = until_submitted.enter_context(self._reserve(prepared, fields))
                    generation = self._submit(prepared, fields, tenant, entry, record)
                    until_submitted.pop_all()  # from here on the answer holds the room
                limits.watch(generation)
        return shape, _ReplyFields(bool(fields.stream), fields.stream_options), generation, room

    async def _prepare(
        self, call: GenerationCall, tenant: Tenant, record: RequestRecord, holding: BodyHolding
    ) -> _PreparedCall:
        with holding.displaceable():
            limits = await self._context.limits(tenant)
        plan = call.plan(limits)
        with record.tokenising():
            prompts = await call.tokenize(limits)
        cap = self._context.defaults.max_new_tokens
        return _PreparedCall(plan, prompts, [plan.for_prompt(len(prompt), limits, cap) for prompt in prompts])

    def _reserve(self, prepared: _PreparedCall, fields: SamplingFields) -> AnswerRoom:
        """Reserve the memory of a whole answer. A stream needs none. Errors: AdmissionError (400 or 503)."""
        if fields.stream:
            return AnswerRoom(lambda: None)
        plan, answers = prepared.plan, self._context.answers
        answers.check(prepared.params, plan.n, plan.max_tokens_field)
        return answers.reserve(prepared.params, plan.n)

    def _time_limits(
        self, fields: SamplingFields, request: Request, tenant: Tenant, record: RequestRecord
    ) -> TimeLimits:
        context, settings = self._context, self._context.settings
        return TimeLimits(
            deadline_of(fields, request.headers, settings.request_timeout_s, record.arrival_s),
            queue_limit_of(tenant.limits.queue_timeout_s, settings.queue_timeout_s, record.arrival_s),
            context.clock,
            context.metrics,
            lambda: context.admission.drain_s,
        )

    def _submit(
        self,
        prepared: _PreparedCall,
        fields: SamplingFields,
        tenant: Tenant,
        entry: Entry,
        record: RequestRecord,
    ) -> Generation:
        """Pass the second gate and submit. Nothing is awaited in between, so that the counts of the gate hold."""
        plan = prepared.plan
        terms = entry.admit(
            AdmissionRequest(
                prompts=[len(prompt) for prompt in prepared.prompts],
                choices=plan.n,
                max_tokens=max(params.max_tokens for params in prepared.params),
                is_named=plan.max_tokens is not None,
                priority=fields.priority,
            )
        )
        record.service = None if terms.service is None else terms.service.value
        scope = narrowed(tenant.scope, fields.cache_salt)
        starts: list[SequenceStart] = []
        choices: list[ChoiceText] = []
        for prompt, params in zip(prepared.prompts, prepared.params, strict=True):
            starts += self._starts(prompt, _capped(params, terms.max_tokens), plan, terms, scope, tenant)
            choices += [self._choice_text(prompt, plan) for _ in range(plan.n)]
        mailbox = Mailbox(portion=portion_tokens(plan.params.logprobs))
        submission = self._context.client.submit(starts, mailbox, record.arrival_s)
        num_prompt = sum(len(prompt) for prompt in prepared.prompts)
        generation = Generation(self._context.client, submission, mailbox, choices, num_prompt, self._context.clock)
        record.note_submitted(generation)
        return generation

    def _starts(
        self, prompt: list[int], params: SamplingParams, plan: SamplingPlan, terms: Terms, scope: bytes, tenant: Tenant
    ) -> list[SequenceStart]:
        """Return one sequence for each choice of a prompt; what concerns the prompt is set on the first."""
        packed = pack_tokens(prompt)
        return [
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
            for choice in range(plan.n)
        ]

    def _choice_text(self, prompt: Sequence[int], plan: SamplingPlan) -> ChoiceText:
        vocabulary = self._context.codec.vocabulary
        detokenizer = make_detokenizer(vocabulary, prompt, skip_special_tokens=plan.rules.skip_special_tokens)
        interval = self._context.settings.stream_interval
        return ChoiceText(detokenizer, plan.rules, vocabulary, plan.params.stop_token_ids, interval)

    def _stream_rules(self, fields: _ReplyFields) -> StreamRules:
        settings, options = self._context.settings, fields.stream_options
        include_usage = settings.enable_force_include_usage or bool(options and options.include_usage)
        return StreamRules(
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            with_details=settings.enable_prompt_tokens_details,
            keep_alive_s=settings.sse_keep_alive_interval_s,
        )

    def _failure_note(self, record: RequestRecord) -> FailureNote:
        def note(error: GenerationError) -> str:
            if isinstance(error, StreamEndedError) and error.end.code in (DEADLINE_EXCEEDED, QUEUE_TIMEOUT):
                record.outcome = "timeout"
                if error.end.code == QUEUE_TIMEOUT:
                    self._context.metrics.on_timeout("queue_timeout", has_tokens=False)
                return ""  # expected, and counted
            error_id = secrets.token_hex(8)
            reason = error.end.code if isinstance(error, StreamEndedError) else "engine_error"
            detail = error.reason if isinstance(error, SequenceFailedError) else None
            record.outcome = "error"
            self._context.metrics.on_stream_error(reason)
            self._log.warning(
                "generation_failed", request_id=record.request_id, error_id=error_id, reason=reason, detail=detail
            )
            return error_id

        return note


def _capped(params: SamplingParams, cap: int | None) -> SamplingParams:
    """Limit the outputs to `cap`, but not below the requested minimum."""
    if cap is None or cap >= params.max_tokens:
        return params
    return replace(params, max_tokens=max(cap, params.min_tokens, 1))
