"""The queue, running sequences and limits of each tenant, and the forecast waiting time of a request."""

from collections.abc import Callable

from tiercel.server.client.sequences import SequenceFacts, SequenceStage
from tiercel.server.tenancy.allowance import Allowance
from tiercel.server.tenancy.forecast import DrainRate, ForecastError, PromptThroughput
from tiercel.server.tenancy.rate_bucket import RateBucket
from tiercel.server.tenancy.tenants import Tenant, TenantTable
from tiercel.values.clock import Clock
from tiercel.values.ids import TenantId
from tiercel.values.tenant import PolicyName, TenantShare, served_band

_SMOOTHING = 0.1


class TenantUsage:
    """The usage of one tenant. Changed by `UsageBook`, at the gates by `Admission`, and by `LimitExchange`."""

    __slots__ = (
        "asked",
        "backlog_by_band",
        "drain_rate",
        "forecast_error",
        "open_elsewhere",
        "request_allowance",
        "requests",
        "reserved",
        "running",
        "sequence_allowance",
        "tenant",
        "token_allowance",
        "tokens",
        "uncached_share",
        "waiting",
    )

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.reserved = 0  # sequences that passed the first gate and are not submitted yet
        self.waiting = 0  # sequences without a first token
        self.running = 0  # sequences with a first token
        self.backlog_by_band: dict[int, float] = {}  # uncached prompt tokens of waiting sequences
        self.uncached_share = 1.0  # moving average over its prompts
        self.drain_rate = DrainRate()
        self.forecast_error = ForecastError()
        limits = tenant.limits
        self.requests = None if limits.requests_per_minute is None else RateBucket(limits.requests_per_minute)
        self.tokens = None if limits.tokens_per_minute is None else RateBucket(limits.tokens_per_minute)
        self.asked = 0.0  # recent requests, also refused ones; counted if there are other fronts
        self.open_elsewhere = 0  # sequences at other fronts that have not ended
        self.sequence_allowance = Allowance()
        self.request_allowance = Allowance()
        self.token_allowance = Allowance()

    @property
    def is_limited(self) -> bool:
        """Whether the tenant has a limit that the fronts of a fleet keep together."""
        limits = self.tenant.limits
        return (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrency) != (None, None, None)

    @property
    def queued(self) -> int:
        """The number of places in the queue that the tenant holds."""
        return self.reserved + self.waiting

    @property
    def open(self) -> int:
        """The number of sequences that have not ended."""
        return self.queued + self.running

    def change(self, tenant: Tenant, now_s: float) -> None:
        """Replace the limits. The used share of each old limit counts against the new limit."""
        self.tenant = tenant
        self.requests = _changed(self.requests, tenant.limits.requests_per_minute, now_s)
        self.tokens = _changed(self.tokens, tenant.limits.tokens_per_minute, now_s)


def _changed(bucket: RateBucket | None, per_minute: int | None, now_s: float) -> RateBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return RateBucket(per_minute)
    bucket.change(per_minute, now_s)
    return bucket


class UsageBook:
    """The usage of every tenant. A removed tenant is kept until its last sequence has ended."""

    def __init__(self, clock: Clock, policy: PolicyName = "priority") -> None:
        self._clock = clock
        self._policy: PolicyName = policy
        self._usage_by_name: dict[TenantId, TenantUsage] = {}
        self._waiting: dict[TenantId, TenantUsage] = {}  # tenants with a backlog
        self._backlog_by_band: dict[int, float] = {}
        self._table: TenantTable | None = None
        self._num_waiting = 0  # sequences of all tenants without a first token
        self._start_rate = DrainRate()  # counts sequences in place of tokens
        self.throughput = PromptThroughput()
        self.on_asked: Callable[[TenantUsage], None] = lambda usage: None
        """Called for every request that reaches the first gate."""

    def __len__(self) -> int:
        return len(self._usage_by_name)

    @property
    def is_fair(self) -> bool:
        """Whether the engine shares a band by weight."""
        return self._policy == "fair"

    @property
    def goal_s(self) -> float | None:
        """The tightest goal for the time to the first token."""
        return None if self._table is None else self._table.tightest_ttft_s

    @property
    def started_per_s(self) -> float | None:
        """The sequences per second that leave the queue with a first token while it is not empty; None = unknown."""
        return self._start_rate.tokens_per_s

    @property
    def backlog(self) -> float:
        """The uncached prompt tokens of all waiting sequences."""
        return sum(self._backlog_by_band.values())

    def set_policy(self, policy: PolicyName) -> None:
        """Set the policy of the engine, which the forecasts follow."""
        self._policy = policy

    def set_table(self, table: TenantTable) -> None:
        """Replace the tenants."""
        self._table = table
        now_s = self._clock.now_s()
        for name, usage in list(self._usage_by_name.items()):
            tenant = table.by_name.get(name)
            if tenant is not None:
                usage.change(tenant, now_s)
            else:
                self._forget_idle(usage)

    def of(self, tenant: Tenant) -> TenantUsage:
        """Return the usage of a tenant, with the limits in force."""
        usage = self._usage_by_name.get(tenant.name)
        if usage is None:
            newest = tenant if self._table is None else self._table.by_name.get(tenant.name, tenant)
            usage = self._usage_by_name[tenant.name] = TenantUsage(newest)
        return usage

    def limited(self, name: TenantId) -> TenantUsage | None:
        """Return the usage of a tenant of the table that has limits which fronts keep together, else None."""
        tenant = None if self._table is None else self._table.by_name.get(name)
        usage = None if tenant is None else self.of(tenant)
        return usage if usage is not None and usage.is_limited else None

    def close(self, usage: TenantUsage) -> None:
        """Remove the usage of a removed tenant without open sequences. Call after a reservation was returned."""
        self._forget_idle(usage)

    def counts(self, name: TenantId) -> tuple[int, int]:
        """Return the numbers of running and of waiting sequences of a tenant."""
        usage = self._usage_by_name.get(name)
        return (0, 0) if usage is None else (usage.running, usage.queued)

    def tokens_ahead(self, usage: TenantUsage, band: int, own: float) -> float:
        """Return the prompt tokens computed before or together with the `own` tokens of a new request in this band.

        If the engine shares a band by weight, a tenant waits at most for its own queue at its own share.
        """
        served, backlog = self._served_band(band), self._backlog_by_band.items()
        before = sum(tokens for other, tokens in backlog if self._served_band(other) < served)
        beside = sum(tokens for other, tokens in backlog if self._served_band(other) == served)
        if self.is_fair and beside:
            weights = sum(
                other.tenant.share.weight for other in self._waiting.values() if band in other.backlog_by_band
            )
            weight = usage.tenant.share.weight
            if band not in usage.backlog_by_band:
                weights += weight
            mine = usage.backlog_by_band.get(band, 0.0) + own
            beside = min(beside, mine * weights / weight - own)
        return before + beside

    def queue_s(self, usage: TenantUsage, band: int, own: float) -> float | None:
        """Return the seconds until the `own` prompt tokens of a new request in this band are computed.

        If the engine shares a band by weight, the measured drain rate of the tenant's own queue decides, with the wait
        behind the whole queue as the upper bound. As the measurement ages, the tenant's share of the total throughput
        replaces it. Returns None before any throughput is known.
        """
        whole_s = self.throughput.queue_s(self.tokens_ahead(usage, band, own) + own)
        speed = usage.drain_rate.tokens_per_s
        if not self.is_fair or speed is None or whole_s is None:
            return whole_s
        mine = sum(tokens for other, tokens in usage.backlog_by_band.items() if other <= band) + own
        before = sum(tokens for other, tokens in self._backlog_by_band.items() if other < band)
        before -= sum(tokens for other, tokens in usage.backlog_by_band.items() if other < band)
        everything = sum(tokens for other, tokens in self._backlog_by_band.items() if other <= band) + own
        before_s, everything_s = self.throughput.queue_s(max(before, 0.0)), self.throughput.queue_s(everything)
        assert before_s is not None
        assert everything_s is not None
        drained_s = min(before_s + mine / speed, max(everything_s, whole_s))
        return whole_s + usage.drain_rate.freshness(self._clock.now_s()) * (drained_s - whole_s)

    def on_moved(self, facts: SequenceFacts, before: SequenceStage | None) -> None:
        """Update the counts when a sequence is submitted, gets its first token or leaves."""
        start = facts.start
        usage = self._named(start.tenant)
        self._count_starts(facts, before)
        if before is SequenceStage.WAITING:
            usage.waiting -= 1
            self._add_backlog(usage, start.band, -start.num_uncached)
        elif before is SequenceStage.RUNNING:
            usage.running -= 1
        if facts.stage is SequenceStage.WAITING:
            usage.waiting += 1
            self._add_backlog(usage, start.band, start.num_uncached)
        elif facts.stage is SequenceStage.RUNNING:
            usage.running += 1
            usage.drain_rate.note(start.num_uncached, self._clock.now_s())
            if facts.first_token_s is not None:
                usage.forecast_error.note(facts.first_token_s - facts.arrival_s, start.queue_s, self._clock.now_s())
        else:
            usage.sequence_allowance.note(-1)
            self._forget_idle(usage)

    def _count_starts(self, facts: SequenceFacts, before: SequenceStage | None) -> None:
        """Measure how fast the queue drains, in the time in which it is not empty."""
        now_s = self._clock.now_s()
        if facts.stage is SequenceStage.RUNNING:
            self._start_rate.note(1.0, now_s)
        self._num_waiting += (facts.stage is SequenceStage.WAITING) - (before is SequenceStage.WAITING)
        if self._num_waiting:
            self._start_rate.begin(now_s)
        else:
            self._start_rate.pause(now_s)

    def on_finished(self, facts: SequenceFacts) -> None:
        """Correct the charge for the outputs of an ended sequence to their number."""
        start, finished = facts.start, facts.finished
        usage = self._usage_by_name.get(start.tenant)
        if usage is None:
            return
        if usage.tokens is not None and facts.num_outputs != start.num_reserved:
            usage.tokens.settle(facts.num_outputs - start.num_reserved, self._clock.now_s())
        if finished is not None and start.n is not None and facts.first_token_s is not None:
            share = 1 - finished.num_cached / start.num_prompt
            usage.uncached_share += _SMOOTHING * (share - usage.uncached_share)

    def on_prompts(self, tokens: int, busy_s: float) -> None:
        """Record a step that computed `tokens` prompt tokens while sequences waited."""
        self.throughput.note_step(tokens, busy_s)

    def _served_band(self, band: int) -> int:
        """Return the band in which the engine serves requests of a band."""
        return served_band(self._policy, band)

    def _named(self, name: TenantId) -> TenantUsage:
        usage = self._usage_by_name.get(name)
        return usage if usage is not None else self.of(Tenant(TenantShare(name=name)))

    def _add_backlog(self, usage: TenantUsage, band: int, tokens: float) -> None:
        for backlog in (usage.backlog_by_band, self._backlog_by_band):
            left = backlog.get(band, 0.0) + tokens
            if left > 0.5:  # smaller amounts are rounding errors
                backlog[band] = left
            else:
                backlog.pop(band, None)
        if usage.backlog_by_band:
            self._waiting[usage.tenant.name] = usage
            usage.drain_rate.begin(self._clock.now_s())
        else:
            self._waiting.pop(usage.tenant.name, None)
            usage.drain_rate.pause(self._clock.now_s())

    def _forget_idle(self, usage: TenantUsage) -> None:
        name = usage.tenant.name
        has_left = self._table is not None and name not in self._table.by_name
        if has_left and not usage.open:
            self._usage_by_name.pop(name, None)
