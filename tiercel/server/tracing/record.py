"""The record of one HTTP request, for its log line, its `Server-Timing` header and its trace."""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence

from tiercel.server.client.generation import Generation
from tiercel.server.client.sequences import SequenceFacts
from tiercel.server.tracing.context import TraceContext
from tiercel.values.clock import Clock
from tiercel.values.outcome import Finished


class RequestRecord:
    """Times and counts of a request, filled while it is served. Contains no texts and no keys. Times are monotonic."""

    def __init__(self, request_id: str, clock: Clock, trace: TraceContext | None = None) -> None:
        self.request_id = request_id
        self.trace = trace
        self.arrival_s = clock.now_s()
        self.end_s: float | None = None  # of the response
        self.status: int | None = None  # of the response, once it has started
        self.outcome: str | None = None  # why it ended, if not by a finish reason
        self.is_generation = False
        self.is_of_batch = False  # the server has sent it to itself, as a line of a batch
        self.generation: Generation | None = None
        self.background: asyncio.Task[None] | None = None  # which goes on with the generation after the answer
        self.tenant: str | None = None
        self.model: str | None = None  # under the name that the client used
        self.ignored_fields: tuple[str, ...] = ()  # of the body, unknown and without effect
        self.service: str | None = None  # full | shortened | deferred; None = the tenant has full service only
        self.score: str | None = None  # what the scores of the answer are; see `PoolingStyle.score`
        self.rate_headers: Callable[[], list[tuple[bytes, bytes]]] | None = None
        self.parsed_s: float | None = None  # when the body had been read and its fields checked
        self.tokenising_s: float | None = None
        self.tokenised_s: float | None = None
        self.submitted_s: float | None = None  # to the engine
        self._clock = clock

    def note_parsed(self, model: str) -> None:
        """Record that the body was read and its fields are valid."""
        self.model = model
        self.parsed_s = self._clock.now_s()

    @contextlib.contextmanager
    def tokenising(self) -> Generator[None]:
        """Record the time in which prompts are rendered and tokenised."""
        self.tokenising_s = self._clock.now_s()
        yield
        self.tokenised_s = self._clock.now_s()

    def note_submitted(self, generation: Generation) -> None:
        """Record that the request was submitted to the engine."""
        self.submitted_s = self._clock.now_s()
        self.generation = generation

    def close(self) -> None:
        """Record the end of the response."""
        self.end_s = self._clock.now_s()

    @property
    def is_settled(self) -> bool:
        """True when the engine has reported the end of every sequence."""
        return all(facts.finished is not None for facts in self.sequences)

    @property
    def sequences(self) -> Sequence[SequenceFacts]:
        """The sequences of the request, in the order of the choices."""
        return self.generation.facts if self.generation is not None else ()

    @property
    def duration_s(self) -> float:
        """Seconds from the arrival to the end of the response, or to now."""
        return (self._clock.now_s() if self.end_s is None else self.end_s) - self.arrival_s

    @property
    def finish(self) -> str | None:
        """The reason for the end of the request: the distinct finish reasons of its choices, or why it ended early."""
        reasons = self.generation.finish_reasons if self.generation is not None else ()
        return self.outcome or ",".join(reasons) or None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return additional response headers: the tenant's limits, the service level, ignored fields and times."""
        headers = [] if self.rate_headers is None else self.rate_headers()
        if self.service is not None:
            headers.append((b"x-tiercel-service", self.service.encode()))
        if self.score is not None:
            headers.append((b"x-tiercel-score", self.score.encode()))
        if self.ignored_fields:
            headers.append((b"x-tiercel-ignored-fields", ", ".join(self.ignored_fields).encode()))
        if self.is_generation:
            stages = {**self.stages(), "total": self.duration_s}
            timing = ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in stages.items())
            headers.append((b"server-timing", timing.encode()))
        return headers

    def stages(self) -> dict[str, float]:
        """Return the seconds of the stages known so far; of several sequences the longest, for `ttft` the shortest.

        `ttft` is counted from the arrival and includes the stages before it; `detokenise` and `swap` lie within others.
        """
        sequences, stages = self.sequences, dict[str, float]()
        ends = [facts.finished for facts in sequences if facts.finished is not None]
        if self.parsed_s is not None:
            stages["parse"] = self.parsed_s - self.arrival_s
        if self.tokenising_s is not None and self.tokenised_s is not None:
            stages["tokenise"] = self.tokenised_s - self.tokenising_s
        if waits := [wait for facts in sequences if (wait := self.queued_s(facts)) is not None]:
            stages["queue"] = max(waits)
        if prefills := [prefill for facts in sequences if (prefill := _prefill_s(facts)) is not None]:
            stages["prefill"] = max(prefills)
        if firsts := [facts.first_token_s for facts in sequences if facts.first_token_s is not None]:
            stages["ttft"] = min(firsts) - self.arrival_s
        if ends:
            stages["decode"] = max(end.decode_s for end in ends)
            if away_s := max(map(_away_s, ends)):
                stages["swap"] = away_s
        if self.generation is not None and self.generation.detokenizing.count:
            stages["detokenise"] = self.generation.detokenizing.busy_s
        return stages

    def queued_s(self, facts: SequenceFacts) -> float | None:
        """Return the seconds that a sequence waited at the engine for its first slice; None if not known yet."""
        if self.submitted_s is None:
            return None
        if facts.started_s is not None:
            return max(0.0, facts.started_s - self.submitted_s)
        if facts.finished is not None:
            return max(0.0, facts.arrival_s + facts.finished.queued_s - self.submitted_s)
        return None

    def summary(self) -> dict[str, object]:
        """Return the fields of the log line."""
        sequences = self.sequences
        ends = [facts.finished for facts in sequences if facts.finished is not None]
        gaps = sorted(gap for facts in sequences for gap in facts.gaps_s)
        stages = self.stages()
        cached, from_ddr, from_ssd = cached_tokens(ends)
        return {
            "request_id": self.request_id,
            "trace_id": None if self.trace is None else self.trace.trace_id,
            "tenant": self.tenant,
            "model": self.model,
            "sequences": len(sequences),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": cached,
            "cached_hbm_tokens": cached - from_ddr - from_ssd,
            "cached_ddr_tokens": from_ddr,
            "cached_ssd_tokens": from_ssd,
            "output_tokens": self.output_tokens,
            **{f"{name}_ms": _ms(stages.get(name)) for name in ("parse", "tokenise", "queue", "ttft")},
            "itl_p50_ms": _ms(_quantile(gaps, 0.5)),
            "itl_p99_ms": _ms(_quantile(gaps, 0.99)),
            "itl_max_ms": _ms(gaps[-1] if gaps else None),
            **{f"{name}_ms": _ms(stages.get(name)) for name in ("prefill", "decode", "swap", "detokenise")},
            "preemptions": sum(end.preemptions for end in ends),
            "swapped_tokens": sum(end.swapped_tokens for end in ends),
            "recomputed_tokens": sum(end.recomputed_tokens for end in ends),
            "finish_reason": self.finish,
            **({"ignored_fields": ",".join(self.ignored_fields)} if self.ignored_fields else {}),
            "duration_ms": _ms(self.duration_s),
        }

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt counted once."""
        return sum(facts.start.num_prompt for facts in self.sequences if facts.start.n is not None)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(facts.num_outputs for facts in self.sequences)


def cached_tokens(ends: Sequence[Finished]) -> tuple[int, int, int]:
    """Return the prompt tokens that were cached: in all, from DDR, and from SSD."""
    return (
        sum(end.num_cached for end in ends),
        sum(end.num_cached_ddr for end in ends),
        sum(end.num_cached_ssd for end in ends),
    )


def _prefill_s(facts: SequenceFacts) -> float | None:
    """Return the prefill time as the engine measured it, or as measured here while the sequence runs."""
    if facts.finished is not None:
        return facts.finished.prefill_s
    if facts.started_s is None or facts.first_token_s is None:
        return None
    return facts.first_token_s - facts.started_s


def _away_s(end: Finished) -> float:
    """Return the seconds of absence after preemptions. A restore before the first slice is part of the queue time."""
    return sum(absence.end_s - absence.start_s for absence in end.absences if absence.reason is not None)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
