"""The limits of tenants that several fronts of a fleet keep together.

Each front has the whole limit, and takes off what the others tell that they have allowed. Between two exchanges it
allows its share of what was left. The error is bounded by what one exchange takes: see docs/scale.md.
"""

import itertools
import math
from collections.abc import Mapping

from tiercel.fleet.peer_uses import PeerUses
from tiercel.server.tenancy.rate_bucket import RateBucket
from tiercel.server.tenancy.usage import TenantUsage, UsageBook
from tiercel.values.clock import Clock
from tiercel.values.ids import TenantId
from tiercel.values.limit_use import EXCHANGE_S, LimitUse

_KEPT = 0.5 ** (EXCHANGE_S / 5.0)  # decay of the recent requests at each exchange; the half-life is 5 s
_QUIET = 0.01  # recent requests below which a tenant counts as quiet


class _Activity:
    """One tenant while it is active here. Totals count from its beginning, and begin again with another bucket."""

    __slots__ = ("_requests", "_tokens", "_totals", "is_fresh", "life", "usage")

    def __init__(self, usage: TenantUsage, life: int) -> None:
        self.usage = usage
        self.life = life
        self.is_fresh = True  # not told yet: the other fronts do not know of its allowance
        self._requests, self._tokens = usage.requests, usage.tokens
        self._totals = _taken(usage)

    @property
    def taken(self) -> tuple[float, float]:
        """Requests and tokens that this front has allowed since the beginning."""
        requests, tokens = _taken(self.usage)
        return requests - self._totals[0], tokens - self._totals[1]

    def is_of(self, usage: TenantUsage) -> bool:
        """Return whether this is still the usage in force, with the same buckets."""
        return self.usage is usage and usage.requests is self._requests and usage.tokens is self._tokens


class LimitExchange:
    """Tells the other fronts what this front has allowed, and takes off what they have allowed."""

    def __init__(self, usages: UsageBook, clock: Clock) -> None:
        self._usages = usages
        self._clock = clock
        self._peers = PeerUses()
        self._active: dict[TenantId, _Activity] = {}  # those with limits that were asked for something lately
        self._lives = itertools.count(1)
        self._elsewhere: dict[TenantId, TenantUsage] = {}  # those with sequences at other fronts
        usages.on_asked = self._note_asked

    def tell(self) -> dict[TenantId, LimitUse]:
        """Return what this front has allowed its active tenants, and renew their allowances. Call every `EXCHANGE_S`.

        Cost: O(active tenants).
        """
        now_s = self._clock.now_s()
        self._peers.expire(now_s)
        self._count_elsewhere(self._elsewhere)
        told: dict[TenantId, LimitUse] = {}
        for name, activity in list(self._active.items()):
            usage = self._usages.limited(name)
            if usage is None:
                del self._active[name]
                continue
            if not activity.is_of(usage):
                activity = self._active[name] = _Activity(usage, next(self._lives))
            usage.asked *= _KEPT
            if activity.is_fresh:  # the others may have begun at the same time: what was left is given out
                activity.is_fresh = False
            else:
                self._renew(usage)
            told[name] = _use(activity, now_s)
            if usage.asked < _QUIET and not usage.open and _is_full(usage, now_s):
                del self._active[name]  # the message without it says that nothing is open
        return told

    def hear(self, front: bytes, number: int, uses: Mapping[TenantId, LimitUse]) -> None:
        """Take off what another front has allowed. Messages may come twice, late, or not at all.

        Tenants that are not limited here are left out, so that the memory for a peer is bounded.
        """
        now_s = self._clock.now_s()
        known = {name: use for name, use in uses.items() if self._usages.limited(name) is not None}
        for name, charge in self._peers.take(front, number, known, now_s).items():
            usage = self._usages.limited(name)
            if usage is not None:
                _drain(usage.requests, charge.requests, charge.requests_left, now_s)
                _drain(usage.tokens, charge.tokens, charge.tokens_left, now_s)
                self._note(usage)
        self._count_elsewhere({*self._elsewhere, *known})

    def _note_asked(self, usage: TenantUsage) -> None:
        if usage.is_limited:
            self._note(usage)
            usage.asked += 1

    def _note(self, usage: TenantUsage) -> None:
        activity = self._active.get(usage.tenant.name)
        if activity is None or not activity.is_of(usage):
            self._active[usage.tenant.name] = _Activity(usage, next(self._lives))
            self._renew(usage)

    def _count_elsewhere(self, names: "Mapping[TenantId, TenantUsage] | set[TenantId]") -> None:
        for name in list(names):
            count, usage = self._peers.num_open(name), self._usages.limited(name)
            if usage is not None:
                usage.open_elsewhere = count
            if count and usage is not None:
                self._elsewhere[name] = usage
            elif (before := self._elsewhere.pop(name, None)) is not None:
                before.open_elsewhere = 0

    def _renew(self, usage: TenantUsage) -> None:
        """Give this front its share of what is left of each limit."""
        if not self._peers.num_present:
            for allowance in (usage.sequence_allowance, usage.request_allowance, usage.token_allowance):
                allowance.renew()
            return
        share, now_s = self._peers.share(usage.tenant.name, usage.asked), self._clock.now_s()
        most = usage.tenant.limits.max_concurrency
        free = math.inf
        if most is not None:  # what the others may add before they tell again counts as added
            free = most - usage.open - usage.open_elsewhere - self._peers.num_reserved(usage.tenant.name)
        usage.sequence_allowance.renew(share * free)
        for bucket, allowance in (
            (usage.requests, usage.request_allowance),
            (usage.tokens, usage.token_allowance),
        ):
            allowance.renew(math.inf if bucket is None else share * bucket.left(now_s))


def _use(activity: _Activity, now_s: float) -> LimitUse:
    usage = activity.usage
    requests, tokens = usage.requests, usage.tokens
    return LimitUse(
        life=activity.life,
        requests=activity.taken[0],
        tokens=activity.taken[1],
        num_open=usage.open,
        num_reserved=usage.sequence_allowance.num_left,
        asked=usage.asked,
        requests_left=None if requests is None else requests.left(now_s) / requests.per_minute,
        tokens_left=None if tokens is None else tokens.left(now_s) / tokens.per_minute,
    )


def _taken(usage: TenantUsage) -> tuple[float, float]:
    requests, tokens = usage.requests, usage.tokens
    return (0.0 if requests is None else requests.taken), (0.0 if tokens is None else tokens.taken)


def _is_full(usage: TenantUsage, now_s: float) -> bool:
    return all(bucket is None or bucket.full_s(now_s) <= 0 for bucket in (usage.requests, usage.tokens))


def _drain(bucket: RateBucket | None, amount: float, left: float | None, now_s: float) -> None:
    """Lower a bucket by an amount, and to the part of the limit that another front has left, if it is known."""
    if bucket is None:
        return
    if left is not None:
        amount += max(0.0, bucket.left(now_s) - amount - left * bucket.per_minute)
    if amount:
        bucket.drain(amount, now_s)
