"""The queue of waiting sequences: order, stale items, deferral and age, compared with a sorted list."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiercel.scheduler.account import Account
from tiercel.scheduler.fairness import NoFairness, TenantBook
from tiercel.scheduler.fairness_limits import fair_limits
from tiercel.scheduler.queue import WaitingQueue
from tiercel.scheduler.queue_order import ArrivalOrder, FairOrder, WaitingSequence, open_order
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId, TenantId


class ScriptedGate(NoFairness):
    """A gate with scripted eligible, barred and ageing accounts. Records the numbers of waiting sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: set[Account] = set()
        self.barred: set[Account] = set()
        self.ageless: set[Account] = set()
        self.changed: set[Account] = set()
        self.counts: dict[Account, tuple[int, int]] = {}

    def is_eligible(self, account: Account) -> bool:
        return account not in self.spent

    def may_admit(self, account: Account, now_s: float) -> bool:
        return account not in self.barred

    def may_age(self, account: Account) -> bool:
        return account not in self.ageless

    def wait(self, account: Account, num_waiting: int, num_ready: int, now_s: float) -> None:
        self.counts[account] = (num_waiting, num_ready)

    def take_changed(self) -> set[Account]:
        changed, self.changed = self.changed, set()
        return changed

    def set_eligible(self, account: Account, *, is_eligible: bool) -> None:
        (self.spent.discard if is_eligible else self.spent.add)(account)
        self.changed.add(account)


def waiting(
    seq: int, *, tenant: str = "a", arrival_s: float = 0.0, band: int = 0, goal_s: float = 0.0, work_s: float = 0.0
) -> WaitingSequence:
    return WaitingSequence(SeqId(seq), TenantId(tenant), arrival_s, arrival_s, band, goal_s, work_s)


def queue_of(*items: WaitingSequence, order: FairOrder | ArrivalOrder | None = None) -> WaitingQueue:
    queue = WaitingQueue(order or FairOrder(), NoFairness())
    for item in items:
        queue.add(item, 0.0)
    return queue


def candidates(queue: WaitingQueue, now_s: float = 0.0) -> list[int]:
    return list(queue.candidates(now_s))


def test_a_lower_band_number_goes_first() -> None:
    assert candidates(queue_of(waiting(1, band=2), waiting(2, band=-1, work_s=99), waiting(3, band=0))) == [2, 3, 1]


def test_accounts_with_deficit_go_first_in_a_band() -> None:
    gate = ScriptedGate()
    queue = WaitingQueue(FairOrder(), gate)
    for item in (waiting(1, tenant="a"), waiting(2, tenant="b", arrival_s=5), waiting(3, tenant="a", band=1)):
        queue.add(item, 0.0)
    gate.set_eligible(Account(0, TenantId("a")), is_eligible=False)
    queue.refresh()
    assert candidates(queue) == [2, 1, 3]
    gate.set_eligible(Account(0, TenantId("a")), is_eligible=True)
    queue.refresh()
    assert candidates(queue) == [1, 2, 3]


def test_many_accounts_whose_eligibility_changes_at_once_are_all_found() -> None:
    gate = ScriptedGate()
    queue = WaitingQueue(FairOrder(), gate)
    for number in range(300):
        queue.add(waiting(number, tenant=f"t{number}", arrival_s=number), 0.0)
    for number in range(0, 300, 2):
        gate.set_eligible(Account(0, TenantId(f"t{number}")), is_eligible=False)
    queue.refresh()
    assert candidates(queue) == [*range(1, 300, 2), *range(0, 300, 2)]
    queue.check_integrity()


def test_a_small_alpha_is_earliest_deadline_first_and_a_large_one_shortest_work_first() -> None:
    rng = random.Random(1)
    items = [
        waiting(seq, tenant=rng.choice("abc"), arrival_s=rng.random(), goal_s=rng.random(), work_s=rng.random())
        for seq in range(200)
    ]
    by_deadline = sorted(items, key=lambda one: one.arrival_s + one.ttft_goal_s)
    assert candidates(queue_of(*items, order=FairOrder(alpha=0.0))) == [one.seq for one in by_deadline]
    by_work = sorted(items, key=lambda one: one.work_s)
    assert candidates(queue_of(*items, order=FairOrder(alpha=1e6))) == [one.seq for one in by_work]


def test_a_sequence_with_a_cached_prefix_goes_before_an_equal_one_without() -> None:
    assert candidates(queue_of(waiting(1, work_s=2.0), waiting(2, work_s=0.1))) == [2, 1]


def test_priority_ignores_tenants() -> None:
    items = (waiting(1, tenant="a", arrival_s=3, band=0), waiting(2, tenant="b", arrival_s=2, band=1, work_s=-9))
    third = waiting(3, tenant="c", arrival_s=1, band=1)
    assert candidates(queue_of(*items, third, order=ArrivalOrder())) == [1, 3, 2]
    assert candidates(queue_of(waiting(8), waiting(7), order=ArrivalOrder())) == [7, 8], "the id breaks ties"


def test_policies_by_name() -> None:
    assert [type(open_order(name)) for name in ("fair", "priority", "fcfs")] == [FairOrder, ArrivalOrder, ArrivalOrder]
    with pytest.raises(InvariantError):
        open_order("lottery")


def test_aborts_leave_nothing_behind() -> None:
    queue = queue_of(*(waiting(seq, tenant=f"t{seq % 7}", arrival_s=seq) for seq in range(1000)))
    rng = random.Random(2)
    for seq in rng.sample(range(1000), 990):
        queue.remove(SeqId(seq), 0.0)
        assert seq not in queue
    queue.check_integrity()
    left = candidates(queue)
    assert len(left) == len(queue) == 10
    assert left == sorted(left)


def test_a_changed_priority_moves_a_sequence() -> None:
    gate = ScriptedGate()
    queue = WaitingQueue(FairOrder(), gate)
    queue.add(waiting(1), 0.0)
    queue.add(waiting(2, work_s=1.0), 0.0)
    queue.update(waiting(2, band=-1), 0.0)
    assert candidates(queue) == [2, 1]
    assert gate.counts == {Account(0, TenantId("a")): (1, 1), Account(-1, TenantId("a")): (1, 1)}
    queue.update(waiting(2, band=0, work_s=-1.0), 0.0)
    assert candidates(queue) == [2, 1]
    assert gate.counts[Account(-1, TenantId("a"))] == (0, 0)


def test_an_update_does_not_count_as_a_return_from_idle() -> None:
    book = TenantBook(fair_limits(10.0))
    queue = WaitingQueue(FairOrder(), book)
    account = Account(0, TenantId("a"))
    queue.add(waiting(1), 0.0)
    book.refill(0.0)
    queue.update(waiting(1, work_s=3.0), 1.0)
    assert book.is_eligible(account)
    state = book.state(account)
    assert state is not None
    assert state.elapsed_patience_s(1.0) == 1.0


def test_a_deferred_sequence_is_left_out_and_keeps_its_place() -> None:
    gate = ScriptedGate()
    queue = WaitingQueue(FairOrder(), gate)
    for item in (waiting(1), waiting(2, arrival_s=1)):
        queue.add(item, 0.0)
    queue.defer(SeqId(1), 0.0)
    queue.defer(SeqId(1), 0.0)
    assert candidates(queue) == [2]
    assert gate.counts[Account(0, TenantId("a"))] == (2, 1)
    queue.update(waiting(1, arrival_s=-1), 0.0)
    assert candidates(queue) == [2]
    queue.resume(SeqId(1), 0.0)
    assert candidates(queue) == [1, 2]
    queue.defer(SeqId(1), 0.0)
    queue.remove(SeqId(1), 0.0)
    assert gate.counts[Account(0, TenantId("a"))] == (1, 1)
    queue.check_integrity()


def test_a_barred_tenant_is_left_out() -> None:
    gate = ScriptedGate()
    queue = WaitingQueue(FairOrder(), gate)
    for item in (waiting(1), waiting(2, tenant="b"), waiting(3)):
        queue.add(item, 0.0)
    gate.barred.add(Account(0, TenantId("a")))
    assert candidates(queue) == [2]


def test_the_oldest_starving_sequence_is_found_in_any_band() -> None:
    gate = ScriptedGate()
    queue = WaitingQueue(FairOrder(), gate)
    for item in (waiting(1, arrival_s=5), waiting(2, tenant="b", band=3, arrival_s=2), waiting(3, arrival_s=9)):
        queue.add(item, 0.0)
    assert queue.oldest(31.0, 30.0) is None
    assert queue.oldest(32.0, 30.0) == 2
    gate.ageless.add(Account(3, TenantId("b")))
    assert queue.oldest(35.0, 30.0) == 1
    queue.remove(SeqId(1), 35.0)
    assert queue.oldest(38.0, 30.0) is None


def test_iterating_changes_nothing_and_a_change_ends_it() -> None:
    queue = queue_of(*(waiting(seq, tenant=f"t{seq % 3}", arrival_s=-seq) for seq in range(50)))
    assert candidates(queue) == candidates(queue) == list(range(49, -1, -1))
    walk = queue.candidates(0.0)
    next(walk)
    queue.remove(SeqId(7), 0.0)
    with pytest.raises(InvariantError):
        next(walk)
    with pytest.raises(InvariantError):
        queue.add(waiting(8), 0.0)
    with pytest.raises(KeyError):
        queue.remove(SeqId(7), 0.0)


TENANTS = st.sampled_from("abcd")
BANDS = st.integers(0, 2)
TIMES = st.integers(0, 5)


class QueueAgainstList(RuleBasedStateMachine):
    """Applies every operation to the queue and to a plain list, and compares the queue with the sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = ScriptedGate()
        self.queue = WaitingQueue(FairOrder(alpha=2.0), self.gate)
        self.items: dict[SeqId, WaitingSequence] = {}
        self.deferred: set[SeqId] = set()
        self.count = 0

    @rule(tenant=TENANTS, band=BANDS, arrival=TIMES, goal=TIMES, work=TIMES)
    def add(self, tenant: str, band: int, arrival: int, goal: int, work: int) -> None:
        self.count += 1
        item = waiting(self.count, tenant=tenant, band=band, arrival_s=arrival, goal_s=goal, work_s=work)
        self.items[item.seq] = item
        self.queue.add(item, 0.0)

    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        if self.items:
            seq = sorted(self.items)[number % len(self.items)]
            del self.items[seq]
            self.deferred.discard(seq)
            self.queue.remove(seq, 0.0)

    @rule(number=st.integers(0, 99), tenant=TENANTS, band=BANDS, work=TIMES)
    def place(self, number: int, tenant: str, band: int, work: int) -> None:
        if self.items:
            seq = sorted(self.items)[number % len(self.items)]
            before = self.items[seq]
            self.items[seq] = waiting(seq, tenant=tenant, band=band, arrival_s=before.arrival_s, work_s=work)
            self.queue.update(self.items[seq], 0.0)

    @rule(number=st.integers(0, 99))
    def defer_or_resume(self, number: int) -> None:
        if self.items:
            seq = sorted(self.items)[number % len(self.items)]
            if seq in self.deferred:
                self.deferred.remove(seq)
                self.queue.resume(seq, 0.0)
            else:
                self.deferred.add(seq)
                self.queue.defer(seq, 0.0)

    @rule(tenant=TENANTS, band=BANDS, is_eligible=st.booleans())
    def set_eligible(self, tenant: str, band: int, is_eligible: bool) -> None:
        self.gate.set_eligible(Account(band, TenantId(tenant)), is_eligible=is_eligible)
        self.queue.refresh()

    @rule(tenant=TENANTS, band=BANDS)
    def bar(self, tenant: str, band: int) -> None:
        self.gate.barred ^= {Account(band, TenantId(tenant))}

    @invariant()
    def yields_what_sorting_would(self) -> None:
        ready = [one for one in self.items.values() if one.seq not in self.deferred]

        def place(one: WaitingSequence) -> tuple[int, bool, float, int]:
            key = one.arrival_s + one.ttft_goal_s + 2.0 * one.work_s
            return (one.band, Account(one.band, one.tenant) in self.gate.spent, key, one.seq)

        admissible = [one for one in ready if Account(one.band, one.tenant) not in self.gate.barred]
        assert candidates(self.queue) == [one.seq for one in sorted(admissible, key=place)]
        oldest = min(((one.since_s, one.seq) for one in ready), default=(0.0, None))[1]
        assert self.queue.oldest(100.0, 1.0) == oldest
        assert len(self.queue) == len(self.items)
        self.queue.check_integrity()


TestQueueAgainstList = QueueAgainstList.TestCase
TestQueueAgainstList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
