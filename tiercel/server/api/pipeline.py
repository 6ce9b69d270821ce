"""The pipeline of a generation request of either API: body, admission, tokens, engine, answer.

A route reads the body, checks its own fields and wraps them into a `GenerationCall`; the rest is the same for all.
"""

import contextlib
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.answer_budget import repeated_bytes
from tiercel.server.api.begun import BegunAnswer
from tiercel.server.api.context import ServerContext
from tiercel.server.api.deadline import DEADLINE_EXCEEDED, QUEUE_TIMEOUT, deadline_of, queue_limit_of
from tiercel.server.api.delta_encoder import ReplyShape
from tiercel.server.api.expansion import LISTED_TOKEN_BYTES, check_submission
from tiercel.server.api.hold import Hold
from tiercel.server.api.middleware import record_of
from tiercel.server.api.params import ModelLimits, SamplingPlan
from tiercel.server.api.prompt import encode_bad_words, with_drawable_tokens
from tiercel.server.api.replies.embeddings import PooledShape
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.schemas.sampling import SamplingFields, StreamOptions
from tiercel.server.api.schemas.unsupported import refuse_unsupported
from tiercel.server.api.stream import EventStream, FailureNote, StreamRules
from tiercel.server.api.submission import Echo, PreparedCall, submit, without_effect
from tiercel.server.api.time_limits import TimeLimits
from tiercel.server.api.whole import WholeReply
from tiercel.server.client.choice_text import GenerationError, SequenceFailedError
from tiercel.server.client.generation import Generation, StreamEndedError
from tiercel.server.client.prompt_answer import text_starts
from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.watch import run_watched
from tiercel.server.tenancy.auth import is_of_batch, tenant_of
from tiercel.server.tenancy.tenants import Tenant, narrowed
from tiercel.server.tracing.record import RequestRecord
from tiercel.values.errors import AdmissionError


class GenerationCall(Protocol):
    """A generation request whose body has been checked."""

    @property
    def fields(self) -> SamplingFields: ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def field(self) -> str:
        """The field that has its prompts, for refusals."""
        ...

    @property
    def expanded_bytes(self) -> int:
        """The memory of what the body stands for beyond its own values, counted before `tokenize` expands it."""
        ...

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        """Return how its prompts are sampled; called behind `tokenize`. Errors: AdmissionError (400)."""
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
    with_tokens: bool
    kept: int | None
    num_choices: int


class GenerationPipeline:
    """Serves generation requests of all routes. Errors keep OpenAI's shape: the framework checks no body."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._log = structlog.stdlib.get_logger("server.generation")

    def head(self, fields: SamplingFields, id_prefix: str, *, with_logprobs: bool) -> ReplyHead:
        """Return the head of the answer. Errors: AdmissionError (404) for an unknown model."""
        settings, status = self._context.settings, self._context.client.status
        return ReplyHead(
            id=id_prefix + secrets.token_hex(16),
            created=int(self._context.wall_s()),
            model=self._context.model_name(fields.model),
            with_logprobs=with_logprobs,
            with_details=settings.enable_prompt_tokens_details,
            role="assistant",
            service_tier=None if fields.service_tier is None else _served_tier(fields),
            with_tokens=bool(fields.return_token_ids),
            with_prompt_logprobs=fields.prompt_logprobs is not None,
            read_fingerprint=lambda: status.ready.fingerprint or None if status.ready is not None else None,
            names_token_ids=bool(fields.return_tokens_as_token_ids) or settings.return_tokens_as_token_ids,
        )

    async def answer(
        self, request: Request, read: Callable[[dict[str, object]], ReadCall], own_fields: Collection[str] = ()
    ) -> Response:
        """Read a body with `read`, admit, tokenise and submit its call; return the answer.

        `own_fields` of the route have names that are refused elsewhere.

        The time limits of the request hold from its arrival to the end of its answer. Errors: AdmissionError,
        ClientGoneError.
        """
        return self.answer_of(await self.begin(request, read, own_fields))

    def answer_of(self, begun: BegunAnswer) -> Response:
        """Return the answer to a request that has been submitted."""
        if begun.is_streamed:
            return EventStream(begun.generation, begun.shape, begun.rules, begun.note, begun.room)
        return WholeReply(
            begun.generation,
            begun.shape,
            begun.rules,
            begun.note,
            self._context.codec.vocabulary,
            begun.room,
            begun.kept,
            begun.num_choices,
            self._context.in_worker if isinstance(begun.shape, PooledShape) else None,
        )

    async def begin(
        self, request: Request, read: Callable[[dict[str, object]], ReadCall], own_fields: Collection[str] = ()
    ) -> BegunAnswer:
        """Check a request and submit its generation. The caller makes the answer, or aborts the generation.

        Errors: those of `answer`.
        """
        # The parsed body may be large. Only these four values outlive the call, so that it is freed here.
        shape, fields, generation, room = await self._admit(request, read, own_fields)
        rules, note = self._stream_rules(fields), self._failure_note(record_of(request.scope))
        return BegunAnswer(
            shape, generation, room, rules, note, bool(fields.stream), kept=fields.kept, num_choices=fields.num_choices
        )

    async def _admit(
        self, request: Request, read: Callable[[dict[str, object]], ReadCall], own_fields: Collection[str]
    ) -> tuple[ReplyShape, _ReplyFields, Generation, Hold]:
        tenant, record = tenant_of(request.scope), record_of(request.scope)
        record.tenant, record.is_of_batch = tenant.name, is_of_batch(request.scope)
        record.rate_headers = lambda: self._context.admission.rate_headers(tenant)
        with self._context.hold_body(request) as holding:
            body = await self._context.read_object(request, holding)
            refuse_unsupported(body, own_fields)
            call, shape, model = read(body)
            holding.grow(call.expanded_bytes)
            record.note_parsed(model)
            fields = call.fields
            idle = without_effect(fields, self._context.settings, is_of_batch=record.is_of_batch)
            record.ignored_fields = fields.ignored_names + idle
            with self._context.admission.enter(
                tenant, fields.num_choices, prompts=call.num_prompts, field=call.field
            ) as entry:
                limits = self._time_limits(fields, request, tenant, record)
                preparing = limits.prepare(self._prepare(call, tenant, record, holding), record)
                prepared = await run_watched(preparing, request.receive)
                holding.grow(self._submission_bytes(prepared))
                with contextlib.ExitStack() as until_submitted:
                    room = until_submitted.enter_context(self._reserve(prepared, fields))
                    generation, prompts = await submit(self._context, prepared, fields, tenant, entry, record)
                    shape.begin(prompts)
                    until_submitted.pop_all()  # from here on the answer holds the room
                limits.watch(generation)
        plan = prepared.plan
        reply = _ReplyFields(plan.is_streamed, fields.stream_options, plan.returns_tokens, plan.kept, plan.n)
        return shape, reply, generation, room

    async def _prepare(
        self, call: GenerationCall, tenant: Tenant, record: RequestRecord, holding: BodyHolding
    ) -> PreparedCall:
        with holding.displaceable():
            limits = await self._context.limits(tenant)
        with record.tokenising():
            prompts = await call.tokenize(limits)
            holding.grow(LISTED_TOKEN_BYTES * sum(map(len, prompts)))
            plan = await self._planned(call, limits)
            if call.fields.bad_words:
                plan = await self._with_bad_words(plan, call.fields.bad_words, limits)
            plan = replace(plan, params=with_drawable_tokens(plan.params, self._context.codec))
        plan = await self._with_grammar(plan, limits, tenant, call.fields.cache_salt, record)
        cap = self._context.defaults.max_new_tokens
        skips = call.fields.skip_special_tokens is True  # as in vLLM, a prompt is repeated with them by default
        echoes = [] if plan.echo is None else await self._echoed(plan.echo, prompts, plan, skips_specials=skips)
        return PreparedCall(plan, prompts, echoes, [plan.for_prompt(len(prompt), limits, cap) for prompt in prompts])

    async def _planned(self, call: GenerationCall, limits: ModelLimits) -> SamplingPlan:
        """Return the plan of a call. The schemas of a request may take a tenth of a second, so they get a thread."""
        if call.fields.may_constrain:
            return await self._context.in_worker(lambda: call.plan(limits))
        return call.plan(limits)

    async def _with_grammar(
        self, plan: SamplingPlan, limits: ModelLimits, tenant: Tenant, cache_salt: str | None, record: RequestRecord
    ) -> SamplingPlan:
        """Return the plan with the checked grammar of its constraint. Errors: AdmissionError (400)."""
        constraint = plan.constraint
        if constraint is None:
            return plan
        if not limits.has_grammars:
            raise AdmissionError(
                400,
                f"{constraint.field} is not supported for this model: its tokenizer cannot be used for grammars",
                code="unsupported_parameter",
                param=constraint.field.partition(".")[0],
            )
        scope = narrowed(tenant.scope, cache_salt)
        grammar = await self._context.grammars.checked_grammar(constraint, limits.vocab_size, tenant.name, scope)
        record.ignored_fields += grammar.ignored
        return replace(plan, params=replace(plan.params, grammar=grammar.text))

    def _submission_bytes(self, prepared: PreparedCall) -> int:
        """Return what the engine gets of a call. Errors: AdmissionError (413) if it is too much."""
        lengths = [len(prompt) for prompt in prepared.prompts]
        limit_bytes = self._context.settings.max_pending_body_bytes
        return check_submission(lengths, prepared.params[0], prepared.plan.n, limit_bytes)

    def _reserve(self, prepared: PreparedCall, fields: SamplingFields) -> Hold:
        """Reserve the memory of a whole answer. Of a stream, only what repeats the prompt takes memory.

        Errors: AdmissionError (400 or 503).
        """
        plan, answers, params = prepared.plan, self._context.answers, prepared.params
        lengths = [len(prompt) * (plan.n if plan.is_streamed else 1) for prompt in prepared.prompts]
        in_events = plan.is_streamed and plan.echo is not None
        answers.check_prompts(params, lengths, in_events=in_events)
        if not plan.is_streamed:
            answers.check(params, plan.n, plan.max_tokens_field, is_parsed=plan.is_parsed)
        texts = [echo.text or "" for echo in prepared.echoes]
        shown_tokens = sum(map(len, prepared.prompts)) if plan.returns_tokens else 0
        repeated = repeated_bytes(texts, shown_tokens, plan.kept or plan.n)
        answers.check_repeated(repeated, plan.n, "return_token_ids" if plan.returns_tokens else "echo")
        other_bytes = plan.pooled_bytes * len(params) + repeated + plan.held_bytes
        choices = 0 if plan.is_streamed else plan.n
        return answers.reserve(params, choices, lengths, other_bytes, is_parsed=plan.is_parsed, in_events=in_events)

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

    async def _echoed(
        self, texts: Sequence[str | None], prompts: Sequence[list[int]], plan: SamplingPlan, *, skips_specials: bool
    ) -> list[Echo]:
        """Return the texts of prompts that the answer repeats; None stands for a prompt that was given as tokens."""
        codec, has_logprobs = self._context.codec, plan.params.logprobs is not None

        def decode() -> list[Echo]:
            echoes: list[Echo] = []
            for text, tokens in zip(texts, prompts, strict=True):
                text = codec.decode(tokens, skip_special_tokens=skips_specials) if text is None else text
                echoes.append(Echo(text, text_starts(tokens, text, codec.vocabulary) if has_logprobs else ()))
            return echoes

        return await self._context.in_worker(decode)

    async def _with_bad_words(self, plan: SamplingPlan, words: Sequence[str], limits: ModelLimits) -> SamplingPlan:
        """Return the plan with the tokens of bad words. Errors: AdmissionError (400)."""
        codec = self._context.codec
        tokens = await self._context.in_worker(lambda: encode_bad_words(words, codec, limits))
        return replace(plan, params=replace(plan.params, bad_words=tokens))

    def _stream_rules(self, fields: _ReplyFields) -> StreamRules:
        settings, options = self._context.settings, fields.stream_options
        is_forced = settings.enable_force_include_usage
        include_usage = is_forced or bool(options and options.include_usage)
        return StreamRules(
            include_usage=include_usage,
            continuous_usage=is_forced or (include_usage and bool(options and options.continuous_usage_stats)),
            with_tokens=fields.with_tokens,
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
            if isinstance(error, SequenceFailedError) and error.is_of_request:
                record.outcome = "error"
                self._context.metrics.on_grammar_error()
                self._log.info("grammar_failed", request_id=record.request_id, detail=error.reason)
                return ""  # the client's, who is told why
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


def _served_tier(fields: SamplingFields) -> str:
    return "flex" if fields.service_tier == "flex" else "default"
