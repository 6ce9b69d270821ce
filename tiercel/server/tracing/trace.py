"""One request as a trace: a server span and a span for each stage, made at the end of the request from its record.

Nothing is measured here, and steps of the engine are not traced: its stages come from its reports, whose monotonic
clock is the same in both processes. Attributes have the names of OpenTelemetry's conventions for HTTP and generative
AI, or begin with `tiercel.` where these have none. Texts of prompts and answers are not attributes.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from tiercel.server.client.sequences import SequenceFacts
from tiercel.server.tracing.context import TraceContext
from tiercel.server.tracing.record import RequestRecord, cached_tokens

MAX_SEQUENCES = 8  # of one request that have spans
_SERVER_ERROR = 500

Attribute = str | int | float | tuple[str, ...]


class Stage(Struct, frozen=True):
    """A part of a request; a span below the server span."""

    name: str
    start_s: float  # on the monotonic clock
    end_s: float
    attributes: dict[str, Attribute]


class Trace(Struct, frozen=True):
    """One request, ready for export."""

    context: TraceContext
    name: str
    start_s: float  # on the monotonic clock
    end_s: float
    epoch_s: float  # wall clock minus monotonic clock
    attributes: dict[str, Attribute]
    stages: tuple[Stage, ...]
    error: str | None = None  # kind of failure, if the server failed


def trace_of(
    record: RequestRecord, context: TraceContext, *, method: str, route: str, status: int, epoch_s: float
) -> Trace:
    """Return the trace of a request that has ended. `epoch_s` is the wall clock minus the monotonic clock."""
    end_s = record.arrival_s + record.duration_s
    error = str(status) if status >= _SERVER_ERROR else "error" if record.outcome == "error" else None
    attributes: dict[str, Attribute] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "tiercel.request_id": record.request_id,
    }
    if error is not None:
        attributes["error.type"] = error
    if record.tenant is not None:
        attributes["tiercel.tenant"] = record.tenant
    if record.outcome is not None:
        attributes["tiercel.outcome"] = record.outcome
    attributes.update(_answer(record, route))
    stages = tuple(_stages(record, end_s))
    return Trace(context, f"{method} {route}", record.arrival_s, end_s, epoch_s, attributes, stages, error)


def _answer(record: RequestRecord, route: str) -> Iterator[tuple[str, Attribute]]:
    """Yield the attributes of the request and of its answer."""
    yield "gen_ai.operation.name", "chat" if route.endswith("/chat/completions") else "text_completion"
    yield "gen_ai.provider.name", "tiercel"
    if record.model is not None:
        yield "gen_ai.request.model", record.model
        yield "gen_ai.response.model", record.model
    sequences, generation = record.sequences, record.generation
    if not sequences or generation is None:
        return
    params, choices = sequences[0].start.params, sequences[0].start.n
    yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if choices is not None and choices > 1:
        yield "gen_ai.request.choice.count", choices
    ends = [facts.finished for facts in sequences if facts.finished is not None]
    cached, from_ddr, from_ssd = cached_tokens(ends)
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", cached
    if generation.finish_reasons:
        yield "gen_ai.response.finish_reasons", tuple(generation.finish_reasons)
    firsts = [facts.first_token_s for facts in sequences if facts.first_token_s is not None]
    if firsts:
        yield "gen_ai.response.time_to_first_chunk", min(firsts) - record.arrival_s
    yield "tiercel.sequences", len(sequences)
    counts = {
        "tiercel.cached_tokens.hbm": cached - from_ddr - from_ssd,
        "tiercel.cached_tokens.ddr": from_ddr,
        "tiercel.cached_tokens.ssd": from_ssd,
        "tiercel.preemptions": sum(end.preemptions for end in ends),
        "tiercel.swapped_tokens": sum(end.swapped_tokens for end in ends),
        "tiercel.recomputed_tokens": sum(end.recomputed_tokens for end in ends),
    }
    yield from ((name, count) for name, count in counts.items() if count)


def _stages(record: RequestRecord, end_s: float) -> Iterator[Stage]:
    if record.parsed_s is not None:
        yield Stage("parse", record.arrival_s, record.parsed_s, {})
    if record.tokenising_s is not None:
        tokenised_s = end_s if record.tokenised_s is None else record.tokenised_s
        yield Stage("tokenise", record.tokenising_s, tokenised_s, {})
    sequences = record.sequences
    for facts in sequences[:MAX_SEQUENCES]:
        yield from _engine_stages(record, facts, end_s, _choice_attributes(sequences, facts))
    if record.generation is not None and record.generation.detokenizing.count:
        detokenizing = record.generation.detokenizing
        busy: dict[str, Attribute] = {"tiercel.busy_ms": 1000 * detokenizing.busy_s}
        yield Stage("detokenise", detokenizing.first_s, detokenizing.last_s, busy)


def _choice_attributes(sequences: Sequence[SequenceFacts], facts: SequenceFacts) -> dict[str, Attribute]:
    return {"tiercel.choice": facts.choice} if len(sequences) > 1 else {}


def _engine_stages(
    record: RequestRecord, facts: SequenceFacts, end_s: float, choice: dict[str, Attribute]
) -> Iterator[Stage]:
    """Yield the stages of one sequence at the engine. A stage whose end it has not reported ends with the request."""
    if record.submitted_s is None:
        return
    finished, queued_s = facts.finished, record.queued_s(facts)
    if queued_s is None:
        yield Stage("queue", record.submitted_s, end_s, choice)
        return
    started_s = record.submitted_s + queued_s
    yield Stage("queue", record.submitted_s, started_s, choice)
    if finished is None:
        first_s = end_s if facts.first_token_s is None else facts.first_token_s
        yield Stage("prefill", started_s, first_s, choice)
        if facts.first_token_s is not None:
            yield Stage("decode", first_s, end_s, choice)
        return
    first_s = started_s + finished.prefill_s
    if finished.prefill_s:
        yield Stage("prefill", started_s, first_s, {**choice, "tiercel.cached_tokens": finished.num_cached})
    if facts.first_token_s is not None:
        yield Stage("decode", first_s, first_s + finished.decode_s, choice)
    for absence in finished.absences:
        reason = "prefix" if absence.reason is None else absence.reason
        yield Stage("swap", absence.start_s, absence.end_s, {**choice, "tiercel.reason": reason})
