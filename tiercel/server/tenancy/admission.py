"""Admission control: a finite queue and tenant limits, checked before any work.

First gate (`Admission.enter`), before tokenising: places in the queue, concurrent sequences, requests per minute.
Second gate (`Entry.admit`), after tokenising: tokens per minute and the goal for the first token. A request over the
limits of its tenant is refused with 429, a request to an overloaded server with 503, both with Retry-After.
"""

import contextlib
import enum
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiercel.server.http.failure import SHUTTING_DOWN
from tiercel.server.tenancy.allowance import Allowance
from tiercel.server.tenancy.forecast import HALF_LIFE_S, IDLE_HALF_LIFE_S
from tiercel.server.tenancy.overload import OverloadControl, OverloadLevel
from tiercel.server.tenancy.rate_bucket import RateBucket, show_wait
from tiercel.server.tenancy.tenants import DEFAULT_TENANT, Tenant
from tiercel.server.tenancy.usage import TenantUsage, UsageBook
from tiercel.values.clock import Clock
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId
from tiercel.values.limit_use import EXCHANGE_S
from tiercel.values.tenant import LAST_BAND

_MAX_RETRY_S = 60
_UNKNOWN_RETRY_S = 2
_MIN_MARGIN = 0.1  # smallest share of a goal kept as a margin: the network time to the client is not measured
_MAX_MARGIN = 1 / 3  # largest share of a goal kept as a margin for errors of the forecast
_CALM_PRESSURE = 0.5  # below it the server takes work that can wait
_FOR_OTHERS = "; the rest is kept for the other fronts for a moment"
_PRESSURE_S = 10.0  # wait in the queue that counts as overload if no tenant has a goal


class AdmissionQueue(Protocol):
    """The facts about the engine's queue that admission needs."""

    @property
    def num_tokenless(self) -> int: ...


class RejectionCounter(Protocol):
    """The counter of refusals; see `metrics`."""

    def on_rejected(self, reason: str) -> None: ...

    def on_throttled(self, tenant: TenantId, reason: str) -> None: ...


class ServiceLevel(enum.Enum):
    """The level of service of a request, for the response header."""

    FULL = "full"
    SHORTENED = "shortened"  # fewer output tokens than it asked for
    DEFERRED = "deferred"  # a later band, and perhaps fewer output tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """The size of a request, known once it is tokenised."""

    prompts: Sequence[int]  # tokens of each prompt
    choices: int = 1  # per prompt
    max_tokens: int = 0  # maximum outputs of a sequence
    is_named: bool = True  # max_tokens was given by the client; otherwise outputs are charged at the end
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms on which an admitted request is served."""

    band: int
    service: ServiceLevel | None = None  # None: the tenant allows full service only
    max_tokens: int | None = None  # a cap below the requested max_tokens
    uncached_share: float = 1.0  # expected, of its prompts
    queue_s: float | None = None  # expected wait before its first slice
    reserved: int = 0  # outputs of each sequence, charged to the tokens per minute


class Admission:
    """Admission control. The queue is the sequences without a first token, submitted or only admitted."""

    def __init__(
        self, queue: AdmissionQueue, counter: RejectionCounter, clock: Clock, usages: UsageBook, *, max_queued: int
    ) -> None:
        self._queue = queue
        self._counter = counter
        self._clock = clock
        self._usages = usages
        self._max_queued = max_queued
        self._overload = OverloadControl(clock)
        self._reserved = 0
        self._is_closed = False

    @property
    def max_queued(self) -> int:
        """The maximum number of waiting sequences."""
        return self._max_queued

    @property
    def is_closed(self) -> bool:
        """Whether the server drains; True from the first signal on."""
        return self._is_closed

    @property
    def drain_s(self) -> float:
        """The seconds until the sequences that wait now have left the queue, for Retry-After."""
        return self._retry_after_s(self._queue.num_tokenless)

    @property
    def is_calm(self) -> bool:
        """Whether the queue is so short that work that can wait may be added."""
        return not self._is_closed and self._pressure() < _CALM_PRESSURE

    @property
    def num_reserved(self) -> int:
        """The number of sequences that are admitted but not submitted yet."""
        return self._reserved

    def set_max_queued(self, max_queued: int) -> None:
        """Change the number of places. If it becomes lower, waiting sequences stay."""
        self._max_queued = max_queued

    def close(self) -> None:
        """Refuse all further requests."""
        self._is_closed = True

    @contextlib.contextmanager
    def enter(
        self, tenant: Tenant = DEFAULT_TENANT, choices: int = 1, *, prompts: int = 1, field: str = "prompt"
    ) -> "Generator[Entry]":
        """First gate: reserve places for `choices` of each prompt until the request is submitted or fails.

        `field` has the prompts. Errors: AdmissionError: 429 or 503 with Retry-After, or 400 for more sequences than the
        queue can hold.
        """
        sequences = choices * prompts
        level = self._overload.feed(self._pressure())
        usage = self._usages.of(tenant)
        self._check_open(usage, choices, prompts, field)
        entry = Entry(self._usages, usage, self._counter, self._clock, level)
        self._reserved += sequences
        usage.reserved += sequences
        is_submitted = False
        try:
            yield entry
            is_submitted = True
        finally:
            if not is_submitted:
                entry.refund()
                usage.sequence_allowance.note(-sequences)
            self._reserved -= sequences
            usage.reserved -= sequences
            self._usages.close(usage)

    def rate_headers(self, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers with the remaining part of a tenant's limits per minute."""
        usage, now_s = self._usages.of(tenant), self._clock.now_s()
        headers = [
            (f"x-ratelimit-{field}-{name}".encode(), text.encode())
            for name, bucket in (("requests", usage.requests), ("tokens", usage.tokens))
            if bucket is not None
            for field, text in _figures(bucket, now_s)
        ]
        self._usages.close(usage)
        return headers

    def _check_open(self, usage: TenantUsage, choices: int, prompts: int, field: str) -> None:
        """Check the first gate: permanent limits first. Only a request that passes is charged."""
        if self._is_closed:
            self._counter.on_rejected(SHUTTING_DOWN)
            raise shutting_down()
        self._usages.on_asked(usage)
        sequences, limits = choices * prompts, usage.tenant.limits
        places = self._max_queued
        if limits.queue_share is not None:
            places = max(int(self._max_queued * limits.queue_share), 1)
        max_sequences = places if limits.max_concurrency is None else min(places, limits.max_concurrency)
        if sequences > max_sequences:
            is_own = max_sequences < self._max_queued
            raise _never_fits(choices, prompts, max_sequences, field, is_own=is_own)
        if limits.max_concurrency is not None:
            used = usage.open + usage.open_elsewhere
            excess, is_allowed = used + sequences - limits.max_concurrency, usage.sequence_allowance.has(sequences)
            if excess > 0 or not is_allowed:
                raise self._throttled(
                    usage,
                    "concurrency",
                    f"concurrent requests: Limit {limits.max_concurrency}, Used {used}, Requested {sequences}"
                    f"{_FOR_OTHERS if excess <= 0 else ''}",
                    self._retry_after_s(excess) if excess > 0 else EXCHANGE_S,
                )
        if limits.queue_share is not None and usage.queued + sequences > places:
            raise self._throttled(
                usage,
                "queue_share",
                f"waiting requests: Limit {places}, Used {usage.queued}, Requested {sequences}",
                self._retry_after_s(usage.queued + sequences - places),
            )
        queued = self._queue.num_tokenless + self._reserved
        if queued + sequences > self._max_queued:
            self._counter.on_rejected("queue_full")
            raise overloaded(self._retry_after_s(queued + sequences - self._max_queued))
        bucket, now_s = usage.requests, self._clock.now_s()
        if bucket is not None and (problem := _take(bucket, usage.request_allowance, 1, now_s)) is not None:
            raise self._throttled(usage, "requests", f"requests per min (RPM): {problem.text}", problem.wait_s)
        usage.sequence_allowance.note(sequences)

    def _throttled(self, usage: TenantUsage, reason: str, limit: str, retry_s: float) -> AdmissionError:
        return throttled(self._counter, usage, reason, limit, retry_s)

    def _pressure(self) -> float:
        """Return the larger of the fill of the queue and its length relative to the tightest goal."""
        fill = (self._queue.num_tokenless + self._reserved) / self._max_queued
        queue_s = self._usages.throughput.queue_s(self._usages.backlog) or 0.0
        return max(fill, queue_s / (self._usages.goal_s or _PRESSURE_S))

    def _retry_after_s(self, excess: int) -> float:
        started_per_s = self._usages.started_per_s
        return _UNKNOWN_RETRY_S if started_per_s is None else _bounded(excess / started_per_s)


class Entry:
    """A request that passed the first gate. Its places are returned when the `with` of `Admission.enter` ends."""

    def __init__(
        self, usages: UsageBook, usage: TenantUsage, counter: RejectionCounter, clock: Clock, level: OverloadLevel
    ) -> None:
        self._usages = usages
        self._usage = usage
        self._counter = counter
        self._clock = clock
        self._level = level
        self._charged = 0

    def admit(self, request: AdmissionRequest) -> Terms:
        """Second gate: check and charge tokens. The charge is returned if the request fails before it is submitted.

        Errors: AdmissionError: 429 for tokens per minute, 503 for a goal that cannot be kept, both with Retry-After;
        400 for a prompt with more tokens than the tenant's limit per minute.
        """
        usage = self._usage
        band = usage.tenant.share.band_of(request.priority)
        own = sum(request.prompts) * usage.uncached_share
        late_s = self._late_s(band, own)
        best_effort = usage.tenant.best_effort
        if late_s > 0 and best_effort is None:
            self._counter.on_rejected("deadline")
            self._counter.on_throttled(usage.tenant.name, "deadline")
            raise overloaded(_bounded(late_s))
        level = OverloadLevel.DEFERRED if late_s > 0 else self._level
        service, max_tokens = None, request.max_tokens
        if best_effort is not None:
            service = ServiceLevel.FULL
            cap = best_effort.max_tokens
            if level >= OverloadLevel.SHORTENED and cap is not None and cap < max_tokens:
                service, max_tokens = ServiceLevel.SHORTENED, cap
            if level >= OverloadLevel.DEFERRED and best_effort.band is not None and best_effort.band > band:
                service, band = ServiceLevel.DEFERRED, best_effort.band
        reserved = self._charge(request, max_tokens if request.is_named else 0)
        return Terms(
            band=min(band, LAST_BAND),
            service=service,
            max_tokens=max_tokens if max_tokens < request.max_tokens else None,
            uncached_share=usage.uncached_share,
            queue_s=self._usages.queue_s(usage, band, own),
            reserved=reserved,
        )

    def refund(self) -> None:
        """Return the charged tokens to the tenant: the request failed before it was submitted."""
        if self._charged and self._usage.tokens is not None:
            self._usage.tokens.settle(-self._charged, self._clock.now_s())
        self._charged = 0

    def _late_s(self, band: int, own: float) -> float:
        """Return the seconds by which the first token is forecast to miss the goal because of the queue; 0 if none.

        A prompt that would miss the goal even on an idle server is checked for its time in the queue only; otherwise it
        would never be served.
        """
        usage, usages = self._usage, self._usages
        slo = usage.tenant.share.slo
        if slo.ttft_s is None or slo.kind != "interactive" or usages.tokens_ahead(usage, band, own) <= 0:
            return 0.0
        compute_s = usages.throughput.queue_s(own)
        if compute_s is None:
            return 0.0
        if compute_s <= slo.ttft_s:
            queue_s = usages.queue_s(usage, band, own)
            now_s, forecast_error = self._clock.now_s(), usage.forecast_error
            margin_s = min(max(forecast_error.spread_s(now_s), _MIN_MARGIN * slo.ttft_s), _MAX_MARGIN * slo.ttft_s)
            half_life_s = IDLE_HALF_LIFE_S if usages.is_fair and not usage.backlog_by_band else HALF_LIFE_S
            extra_s = forecast_error.at_s(now_s, half_life_s) + margin_s
        else:
            queue_s, extra_s = usages.throughput.queue_s(usages.tokens_ahead(usage, band, own)), 0.0
        return 0.0 if queue_s is None else max(queue_s + extra_s - slo.ttft_s, 0.0)

    def _charge(self, request: AdmissionRequest, max_tokens: int) -> int:
        """Charge the prompts and the requested outputs; return the outputs charged per sequence.

        The charge for outputs is at most a full bucket, and is corrected at the end of each sequence.
        """
        bucket, now_s = self._usage.tokens, self._clock.now_s()
        if bucket is None:
            return 0
        prompts, sequences = sum(request.prompts), request.choices * len(request.prompts)
        if prompts > bucket.per_minute:
            raise AdmissionError(
                400,
                f"The prompt has {prompts} tokens, more than the {bucket.per_minute:.0f} that"
                f" {self._usage.tenant.name} may use in a minute. Please reduce the length of the input prompt.",
                code="tenant_limit_exceeded",
                param="input_tokens",
            )
        reserved = min(max_tokens, int(bucket.per_minute - prompts) // max(sequences, 1))
        charge = prompts + reserved * sequences
        if (problem := _take(bucket, self._usage.token_allowance, charge, now_s)) is not None:
            text = f"tokens per min (TPM): {problem.text}"
            raise throttled(self._counter, self._usage, "tokens", text, problem.wait_s)
        self._charged = charge
        return reserved


def _figures(bucket: RateBucket, now_s: float) -> list[tuple[str, str]]:
    left = max(int(bucket.left(now_s) + 1e-6), 0)
    return [("limit", f"{bucket.per_minute:.0f}"), ("remaining", f"{left}"), ("reset", show_wait(bucket.full_s(now_s)))]


@dataclass(frozen=True, slots=True)
class _Shortage:
    """The reason why an amount cannot be taken, and the seconds until it may be."""

    text: str
    wait_s: float


def _take(bucket: RateBucket, allowance: Allowance, amount: int, now_s: float) -> _Shortage | None:
    """Take an amount from a bucket and from this front's part of it, or nothing, and return why."""
    is_allowed = allowance.has(amount)
    if is_allowed and bucket.take(amount, now_s):
        allowance.note(amount)
        return None
    used = math.ceil(bucket.per_minute - bucket.left(now_s) - 1e-6)
    text = f"Limit {bucket.per_minute:.0f}, Used {used}, Requested {amount}{'' if is_allowed else _FOR_OTHERS}"
    return _Shortage(text, max(bucket.wait_s(amount, now_s), 0.0 if is_allowed else EXCHANGE_S))


def _bounded(retry_s: float) -> float:
    return min(max(math.ceil(retry_s), 1), _MAX_RETRY_S)


def throttled(counter: RejectionCounter, usage: TenantUsage, reason: str, limit: str, retry_s: float) -> AdmissionError:
    """Return the refusal for a tenant that exceeds one of its limits."""
    name = usage.tenant.name
    counter.on_rejected(f"tenant_{reason}")
    counter.on_throttled(name, reason)
    return AdmissionError(
        429,
        f"Rate limit reached for {name} on {limit}. Please try again in {show_wait(retry_s)}.",
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        retry_after_s=max(math.ceil(retry_s), 1),
    )


def overloaded(retry_after_s: float) -> AdmissionError:
    """Return the refusal of an overloaded server."""
    return AdmissionError(
        503,
        "The engine is currently busy and cannot accept new requests. Please try again later.",
        code="overloaded",
        kind="server_error",
        retry_after_s=retry_after_s,
    )


def _never_fits(choices: int, prompts: int, max_sequences: int, field: str, *, is_own: bool) -> AdmissionError:
    """Return the refusal for a request with more sequences than the queue can hold."""
    holder = "your key may have" if is_own else "the queue of this server holds"
    return AdmissionError(
        400,
        f"This request asks for {choices * prompts} sequences (n={choices} for each of {prompts} in {field}), but"
        f" {holder} {max_sequences}. Please reduce n or {field}.",
        param="n" if choices > 1 else field,
    )


def shutting_down() -> AdmissionError:
    """Return the refusal of a server that drains."""
    return AdmissionError(
        503,
        "The server is shutting down and takes no new requests.",
        code=SHUTTING_DOWN,
        kind="server_error",
        retry_after_s=5,
    )
