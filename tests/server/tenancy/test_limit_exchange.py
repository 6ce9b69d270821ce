"""Several fronts keep the limits of one tenant together, with messages that are late, lost or doubled."""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.server.tenancy.admission import Admission, AdmissionRequest
from tiercel.server.tenancy.limit_exchange import LimitExchange
from tiercel.server.tenancy.tenants import Limits, Tenant, make_table
from tiercel.server.tenancy.usage import UsageBook
from tiercel.values.clock import ManualClock
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId
from tiercel.values.limit_use import EXCHANGE_S, LimitUse
from tiercel.values.tenant import TenantShare

NAME = TenantId("acme")
TICK_S = 0.05


class NoQueue:
    """An engine that is never full, and a counter that does not count."""

    num_tokenless = 0

    def on_rejected(self, reason: str) -> None: ...

    def on_throttled(self, tenant: TenantId, reason: str) -> None: ...


class Front:
    """One front: its gates, its limits and its open sequences."""

    def __init__(self, number: int, limits: Limits, clock: ManualClock) -> None:
        self.identity = bytes([number]) * 16
        self.clock = clock
        self.tenant = Tenant(TenantShare(name=NAME), limits=limits)
        self.usages = UsageBook(clock)
        self.usages.set_table(make_table((self.tenant,), version=1, source="file"))
        self.admission = Admission(NoQueue(), NoQueue(), clock, self.usages, max_queued=10_000)
        self.exchange = LimitExchange(self.usages, clock)
        self.ends_s: list[float] = []

    @property
    def num_open(self) -> int:
        return len(self.ends_s)

    def ask(self, tokens: int, lasts_s: float) -> bool:
        """Ask for one sequence. Return whether it was admitted."""
        try:
            with self.admission.enter(self.tenant) as entry:
                entry.admit(AdmissionRequest(prompts=[tokens], is_named=False))
        except AdmissionError as error:
            assert error.status == 429
            assert (error.retry_after_s or 0) >= 1
            return False
        self.usages.of(self.tenant).running += 1
        self.ends_s.append(self.clock.now_s() + lasts_s)
        return True

    def end_some(self) -> None:
        now_s = self.clock.now_s()
        ended = sum(end_s <= now_s for end_s in self.ends_s)
        self.usages.of(self.tenant).running -= ended
        self.usages.of(self.tenant).sequence_allowance.note(-ended)
        self.ends_s = [end_s for end_s in self.ends_s if end_s > now_s]


@dataclass
class Fleet:
    """Fronts that hear each other after a delay; some messages are lost, and some come twice."""

    fronts: list[Front]
    clock: ManualClock
    rng: random.Random
    is_on: bool = True
    delay_s: float = 0.02
    loss: float = 0.0
    _due: deque[tuple[float, Front, int, Mapping[TenantId, LimitUse]]] = field(default_factory=deque)
    _number: int = 0
    _told_s: float = 0.0

    @staticmethod
    def of(count: int, limits: Limits, seed: int, *, is_on: bool = True, loss: float = 0.0) -> "Fleet":
        clock = ManualClock(1000.0)
        fronts = [Front(number, limits, clock) for number in range(count)]
        fleet = Fleet(fronts, clock, random.Random(seed), is_on=is_on, loss=loss)
        fleet.tick(EXCHANGE_S + 4 * TICK_S)  # the fronts have heard of each other
        return fleet

    def tick(self, seconds: float = TICK_S) -> None:
        """Let time pass: sequences end, and fronts tell each other what they have allowed."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            now_s = self.clock.now_s()
            for front in self.fronts:
                front.end_some()
            while self._due and self._due[0][0] <= now_s:
                _, sender, number, uses = self._due.popleft()
                for front in self.fronts:
                    if front is not sender and self.is_on and self.rng.random() >= self.loss:
                        for _ in range(self.rng.choice((1, 1, 2))):
                            front.exchange.hear(sender.identity, number, uses)
            if now_s - self._told_s >= EXCHANGE_S - 1e-9:
                self._told_s = now_s
                self._number += 1
                due_s, number = now_s + self.delay_s, self._number
                self._due.extend((due_s, front, number, front.exchange.tell()) for front in self.fronts)


def admitted(fleet: Fleet, seconds: float, asks_per_s: float, weights: list[float]) -> tuple[list[int], int]:
    """Ask for a while, as often as the weights say. Return the admissions of each front, and the most open."""
    counts, most = [0] * len(fleet.fronts), 0
    for _ in range(round(seconds / TICK_S)):
        for _ in range(int(asks_per_s * TICK_S) + (fleet.rng.random() < asks_per_s * TICK_S % 1)):
            [number] = fleet.rng.choices(range(len(weights)), weights)
            counts[number] += fleet.fronts[number].ask(10, fleet.rng.uniform(0.2, 3))
        most = max(most, sum(front.num_open for front in fleet.fronts))
        fleet.tick()
    return counts, most


@pytest.mark.parametrize("seed", fast_and_slow([1, *fresh_seeds(2)], fresh_seeds(40)))
def test_requests_a_minute_hold_over_all_fronts(seed: int) -> None:
    rng = random.Random(seed)
    count, limit, minutes = rng.randint(2, 5), rng.choice((6, 60, 600)), 4
    weights = [rng.choice((0.0, 0.1, 1.0)) + 1e-3 for _ in range(count)]
    most = limit * (minutes + 1)  # a full bucket, and what flows in
    slack = 1.1 * count + 0.02 * most
    for is_on in (True, False):
        fleet = Fleet.of(count, Limits(requests_per_minute=limit), seed, is_on=is_on, loss=0.1)
        counts, _ = admitted(fleet, 60 * minutes, 2 * count * limit / 60 + 1, weights)
        if is_on:
            assert sum(counts) <= most + slack, (seed, counts)
            assert sum(counts) >= 0.9 * most - slack, (seed, counts)  # what one front does not use, others get
        elif min(weights) > 0.1:
            assert sum(counts) > most + slack, "without the exchange each front allows the whole limit"


@pytest.mark.parametrize("seed", fast_and_slow([1, *fresh_seeds(2)], fresh_seeds(40)))
def test_tokens_a_minute_hold_over_all_fronts(seed: int) -> None:
    fleet = Fleet.of(3, Limits(tokens_per_minute=6000), seed)
    counts, _ = admitted(fleet, 120, 60, [1, 1, 1])
    assert 0.9 * 6000 * 3 <= 10 * sum(counts) <= 1.03 * 6000 * 3, (seed, counts)


@pytest.mark.parametrize("seed", fast_and_slow([1, *fresh_seeds(2)], fresh_seeds(40)))
def test_concurrency_holds_over_all_fronts_but_for_two_requests_of_each(seed: int) -> None:
    rng = random.Random(seed)
    count, limit = rng.randint(2, 5), rng.choice((1, 4, 32))
    fleet = Fleet.of(count, Limits(max_concurrency=limit), seed)
    counts, most = admitted(fleet, 60, 40.0, [1.0] * count)
    assert most <= limit + 2 * count, (seed, most, limit)
    assert sum(counts) > 0.5 * 60 * limit / 1.6, (seed, counts)  # a sequence lasts 1.6 s in the mean
    _, without = admitted(Fleet.of(count, Limits(max_concurrency=limit), seed, is_on=False), 60, 40.0, [1.0] * count)
    assert without >= 0.8 * min(limit * count, 50), "without the exchange each front allows the whole limit"


def test_one_front_alone_has_the_whole_limit() -> None:
    fleet = Fleet.of(1, Limits(requests_per_minute=50, max_concurrency=50), 1)
    assert [fleet.fronts[0].ask(1, 100) for _ in range(60)].count(True) == 50


def test_a_burst_at_one_of_two_fronts_gets_a_half_at_once_and_nearly_all_soon() -> None:
    fleet = Fleet.of(2, Limits(requests_per_minute=60), 1)
    first = fleet.fronts[0]
    assert 28 <= sum(first.ask(1, 1) for _ in range(60)) <= 31
    for _ in range(6):
        fleet.tick(EXCHANGE_S)
        for _ in range(60):
            first.ask(1, 1)
    assert first.usages.of(first.tenant).requests is not None
    assert sum(front.usages.of(front.tenant).requests.taken for front in fleet.fronts) >= 58  # type: ignore[union-attr]


def test_a_front_that_has_ended_frees_its_sequences() -> None:
    fleet = Fleet.of(2, Limits(max_concurrency=2), 1)
    assert fleet.fronts[0].ask(1, 1000)
    fleet.tick(1)
    assert fleet.fronts[0].ask(1, 1000)
    fleet.tick(1)
    assert not fleet.fronts[1].ask(1, 1)
    fleet.fronts.pop(0)
    fleet.tick(4)
    assert fleet.fronts[0].ask(1, 1)


def test_a_front_that_starts_later_learns_the_level() -> None:
    fleet = Fleet.of(1, Limits(requests_per_minute=60), 1)
    while fleet.fronts[0].ask(1, 1):
        pass
    fleet.tick(20)  # a third of the limit is left, and the requests are not recent any more
    fleet.fronts.append(Front(7, fleet.fronts[0].tenant.limits, fleet.clock))
    fleet.tick(1)
    assert 1 <= sum(fleet.fronts[1].ask(1, 1) for _ in range(60)) <= 6


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_burst_of_a_quiet_tenant_at_all_fronts_is_admitted_once(count: int) -> None:
    fleet = Fleet.of(count, Limits(requests_per_minute=60, max_concurrency=1000), 1)
    fleet.tick(200)
    total = 0
    for _ in range(30):
        total += sum(front.ask(1, 1000) for front in fleet.fronts for _ in range(20))
        fleet.tick(0.1)
    assert total <= 60 + 3 + count
    fleet = Fleet.of(count, Limits(max_concurrency=60), 1)
    fleet.tick(200)
    for _ in range(30):
        for front in fleet.fronts:
            for _ in range(20):
                front.ask(1, 1000)
        fleet.tick(0.1)
    assert 50 <= sum(front.num_open for front in fleet.fronts) <= 60 + count


@pytest.mark.parametrize("count", [1, 2])
def test_a_slot_that_is_free_again_is_used_at_once(count: int) -> None:
    """Short sequences one after the other, with no more at a time than there are places."""
    fleet = Fleet.of(count, Limits(max_concurrency=8 * count), 1)
    refused = 0
    for step in range(600):
        for front in fleet.fronts:
            while front.num_open < 4:
                if not front.ask(1, TICK_S):
                    refused += step > 40  # the first exchanges share the places by requests that were asked for
                    break
        fleet.tick()
    assert refused == 0


def test_limits_that_are_taken_away_and_given_back_lock_nobody_out() -> None:
    limits = Limits(max_concurrency=3)
    fleet = Fleet.of(2, limits, 1)
    first, second = fleet.fronts
    for _ in range(3):
        assert first.ask(1, 8)
        fleet.tick(2 * EXCHANGE_S)
    assert not second.ask(1, 1)
    for changed in (Limits(), limits):
        for front in fleet.fronts:
            front.tenant = Tenant(TenantShare(name=NAME), limits=changed)
            front.usages.set_table(make_table((front.tenant,), version=2, source="file"))
        fleet.tick(10)
    assert second.ask(1, 1)


def test_a_reload_at_one_front_gives_nothing_back_at_another() -> None:
    fleet = Fleet.of(2, Limits(requests_per_minute=60), 1)
    first, second = fleet.fronts
    for _ in range(4):
        while first.ask(1, 0.1):
            pass
        fleet.tick(EXCHANGE_S)
    first.tenant = Tenant(TenantShare(name=NAME), limits=Limits(max_concurrency=5))
    first.usages.set_table(make_table((first.tenant,), version=2, source="file"))
    first.ask(1, 0.1)
    fleet.tick(1)
    assert sum(second.ask(1, 0.1) for _ in range(60)) <= 10


def test_a_front_with_a_smaller_limit_lowers_no_other_one() -> None:
    fleet = Fleet.of(1, Limits(requests_per_minute=600), 1)
    assert fleet.fronts[0].ask(1, 0.1)
    small = Front(7, Limits(requests_per_minute=6), fleet.clock)
    fleet.fronts.append(small)
    assert small.ask(1, 0.1)
    fleet.tick(1)
    bucket = fleet.fronts[0].usages.of(fleet.fronts[0].tenant).requests
    assert bucket is not None
    assert bucket.left(fleet.clock.now_s()) >= 490  # five sixths of each limit are left


def test_a_quiet_tenant_is_told_no_more() -> None:
    fleet = Fleet.of(1, Limits(requests_per_minute=60), 1)
    front = fleet.fronts[0]
    assert front.ask(1, 0.1)
    assert NAME in front.exchange.tell()
    fleet.tick(60)
    assert front.exchange.tell() == {}
