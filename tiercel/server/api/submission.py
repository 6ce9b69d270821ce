"""The submission of a prepared request: the second gate, its sequences, and the prompts of its choices."""

import asyncio
import contextlib
from array import array
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from tiercel.server.api.context import ServerContext
from tiercel.server.api.params import SamplingPlan
from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.server.client.choice_text import ChoiceText
from tiercel.server.client.client import Submission
from tiercel.server.client.collector import Mailbox, portion_tokens
from tiercel.server.client.generation import Generation
from tiercel.server.client.logprobs import DrawnTokens
from tiercel.server.client.prompt_answer import PromptAnswer
from tiercel.server.client.sequences import SequenceFacts, SequenceStart
from tiercel.server.tenancy.admission import AdmissionRequest, Entry, Terms
from tiercel.server.tenancy.tenants import Tenant, narrowed
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.tracing.record import RequestRecord
from tiercel.settings.settings import ServerSettings
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import SamplingParams, pack_tokens
from tiercel.values.tenant import LAST_BAND

_AT_ONCE = 128  # sequences of one request that one turn of the event loop submits: about 10 ms


class Echo(Struct, frozen=True):
    """The text of a prompt that the answer repeats."""

    text: str | None
    starts: Sequence[int]  # the character at which each token begins, if log-probabilities are asked for


_NO_ECHO = Echo(None, ())


class PreparedCall(Struct, frozen=True):
    """A client request, checked and tokenised."""

    plan: SamplingPlan
    prompts: list[list[int]]
    echoes: list[Echo]  # of the prompts, if the answer repeats them
    params: list[SamplingParams]  # of each prompt


async def submit(
    context: ServerContext,
    prepared: PreparedCall,
    fields: SamplingFields,
    tenant: Tenant,
    entry: Entry,
    record: RequestRecord,
) -> tuple[Generation, list[PromptAnswer]]:
    """Pass the second gate and submit. Return also the prompt of each choice of the answer.

    Nothing is awaited in between, so that the counts of the gate hold, unless there are so many sequences that other
    requests would wait for them: then the loop turns after each slice. All places stay reserved until the end.
    """
    plan = prepared.plan
    terms = entry.admit(
        AdmissionRequest(
            prompts=[len(prompt) for prompt in prepared.prompts],
            choices=plan.n,
            max_tokens=max(params.max_tokens for params in prepared.params),
            is_named=plan.max_tokens is not None,
            priority=LAST_BAND if record.is_of_batch else _priority(fields, tenant),
        )
    )
    record.service = None if terms.service is None else terms.service.value
    scope = narrowed(tenant.scope, fields.cache_salt)
    choices: list[ChoiceText] = []
    answers: list[PromptAnswer] = []
    seqs: list[SeqId] = []
    books: list[SequenceFacts] = []
    client, mailbox = context.client, Mailbox(portion=portion_tokens(plan.params.logprobs))
    num_prompts, at_once = len(prepared.prompts), max(_AT_ONCE // plan.n, 1)
    with contextlib.ExitStack() as until_whole:
        until_whole.callback(lambda: client.abort(seqs, FinishReason.ABORT))
        for first in range(0, num_prompts, at_once):
            if first:
                await asyncio.sleep(0)
            starts: list[SequenceStart] = []
            slice_ = range(first, min(first + at_once, num_prompts))
            for index in slice_:
                prompt, params = prepared.prompts[index], _capped(prepared.params[index], terms.max_tokens)
                starts += _starts(context, prompt, params, plan, terms, scope, tenant)
                choices += [_choice_text(context, prompt, plan) for _ in range(plan.n)]
            submission = client.submit(starts, mailbox, record.arrival_s, first=first * plan.n)
            seqs += submission.seqs
            books += submission.facts
            for index in slice_:
                answers += _prompt_answers(context, prepared, index, books)
        until_whole.pop_all()
    whole = Submission(tuple(seqs), tuple(books))
    num_tokens = sum(map(len, prepared.prompts))
    generation = Generation(client, whole, mailbox, choices, num_tokens, context.clock)
    record.note_submitted(generation)
    return generation, answers


def _prompt_answers(
    context: ServerContext, prepared: PreparedCall, index: int, books: Sequence[SequenceFacts]
) -> Iterator[PromptAnswer]:
    """Yield the prompt of each choice of one prompt.

    Of a whole answer, the first choice computes what all of them repeat.
    """
    plan, vocabulary = prepared.plan, context.codec.vocabulary
    echo = prepared.echoes[index] if prepared.echoes else _NO_ECHO
    kept = array("I", prepared.prompts[index])  # as long as the request runs
    for choice in range(plan.kept or plan.n):
        facts = books[index * plan.n + (choice if plan.is_streamed else 0)]
        logprobs = DrawnTokens(facts.prompt_logprobs, vocabulary)
        yield PromptAnswer(kept, echo.text, logprobs, facts.read_pooled, echo.starts)


def _starts(
    context: ServerContext,
    prompt: list[int],
    params: SamplingParams,
    plan: SamplingPlan,
    terms: Terms,
    scope: bytes,
    tenant: Tenant,
) -> list[SequenceStart]:
    """Return one sequence for each choice of a prompt; what concerns the prompt is set on the first."""
    packed = pack_tokens(prompt)
    return [
        SequenceStart(
            prompt=packed,
            num_prompt=len(prompt),
            params=plan.choice_params(params, choice, context.draw_seed),
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


def _choice_text(context: ServerContext, prompt: Sequence[int], plan: SamplingPlan) -> ChoiceText:
    vocabulary = context.codec.vocabulary
    detokenizer = make_detokenizer(
        vocabulary,
        prompt,
        skip_special_tokens=plan.rules.skip_special_tokens,
        visible_texts=plan.rules.visible_texts,
    )
    return ChoiceText(
        detokenizer,
        plan.rules,
        vocabulary,
        plan.params.stop_token_ids,
        context.settings.stream_interval,
        returns_tokens=plan.returns_tokens,
    )


def without_effect(fields: SamplingFields, settings: ServerSettings, *, is_of_batch: bool) -> tuple[str, ...]:
    """Return the known fields of a request that do not act: those about its order, where something else decides it."""
    idle: list[str] = []
    if fields.priority is not None and (is_of_batch or settings.scheduling_policy == "fcfs"):
        idle.append("priority")
    if fields.service_tier == "flex" and (is_of_batch or settings.scheduling_policy == "fcfs"):
        idle.append("service_tier")
    return tuple(idle)


def _priority(fields: SamplingFields, tenant: Tenant) -> int | None:
    """Return the priority of a request. The tier `flex` is served one band below the tenant's own."""
    if fields.service_tier != "flex":
        return fields.priority
    below = tenant.share.band + 1
    return below if fields.priority is None else max(below, fields.priority)


def _capped(params: SamplingParams, cap: int | None) -> SamplingParams:
    """Limit the outputs to `cap`, but not below the requested minimum."""
    if cap is None or cap >= params.max_tokens:
        return params
    return replace(params, max_tokens=max(cap, params.min_tokens, 1) if params.max_tokens else 0)
