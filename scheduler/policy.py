"""Whose turn it is: the order of those who wait, what each tenant is owed, and what a step is charged for."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, KeysView, Mapping

from tiercel.ids import SeqId, TenantId
from tiercel.outcome import FairGauges, TenantGauges
from tiercel.plan import PreemptionReason, Slice
from tiercel.request import Request
from tiercel.scheduler.aging import AgingShare
from tiercel.scheduler.cost import BilledSlice, StepCosts, linear_times
from tiercel.scheduler.fairness import Account, Charge, TenantBook
from tiercel.scheduler.fairness_limits import fair_limits
from tiercel.scheduler.preemption_budget import PreemptionBudget
from tiercel.scheduler.preemption_counts import PreemptionCounts
from tiercel.scheduler.queue import OpenGate, WaitingQueue
from tiercel.scheduler.queue_order import WaitingSequence, open_order
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.service_window import ServiceWindow, by_band, gap_ms, jain
from tiercel.settings import PolicyName
from tiercel.tenant import Slo, Tenants, TenantShare

Holdings = Mapping[Account, float]
"""What accounts hold of all blocks or rows, as parts of the whole; of the one that asks: what it would hold."""


class Policy:
    """The operator's choice of `fair`, `priority` or `fcfs`, over one queue.

    `priority` is `fair` without the gate between tenants and with arrival as the key, `fcfs` without bands and without
    aging too. Written by the SequenceBook.
    """

    def __init__(self, name: PolicyName, costs: StepCosts, fair: TenantBook | None, aging: AgingShare | None) -> None:
        self.name = name
        self.costs = costs
        self.fair = fair
        self.aging = aging
        self.preemption_budget = PreemptionBudget()
        self.queue = WaitingQueue(open_order(name), fair or OpenGate())
        self._served_ms: dict[TenantId, float] = fair.served_ms if fair is not None else {}
        self._share_by_tenant: dict[TenantId, TenantShare] = {}
        self._running: dict[Account, int] = {}
        self._deferred: set[SeqId] = set()
        self._stalled: set[TenantId] = set()
        self._charges: deque[tuple[Charge, float]] = deque()  # launched steps in order, with their prediction
        self._num_admitted = 0
        self._window = ServiceWindow()
        self._ready_weights: dict[int, float] = {}  # by band, as of this step

    # ---- words

    def rank(self, request: Request, band: int) -> tuple[float, ...]:
        """A total order that never changes by itself: who may take room from whom in order to grow."""
        if self.name == "fcfs":
            return (request.arrival_s, request.id)
        return (band, request.arrival_s, request.id)

    def slo(self, tenant: TenantId) -> Slo:
        """What the tenant's requests aim at."""
        share = self._share_by_tenant.get(tenant)
        return share.slo if share is not None else Slo()

    def share(self, tenant: TenantId) -> TenantShare | None:
        """The tenant as configured; None when it is not."""
        return self._share_by_tenant.get(tenant)

    # ---- what happens

    def set_tenants(self, tenants: Tenants, now_s: float) -> None:
        """Set new weights and goals for all tenants at once."""
        for share in tenants.tenants:
            self.set_share(share.name, share, now_s)
        for tenant in self.tenants - {share.name for share in tenants.tenants}:
            self.set_share(tenant, None, now_s)

    @property
    def tenants(self) -> KeysView[TenantId]:
        """The tenants as configured."""
        return self._share_by_tenant.keys()

    def set_share(self, tenant: TenantId, share: TenantShare | None, now_s: float) -> None:
        """Set weight and goals of one tenant; None: it is not configured any more."""
        if share is None:
            del self._share_by_tenant[tenant]
        else:
            self._share_by_tenant[tenant] = share
        if tenant in self._stalled:
            self._resume((tenant,), now_s)
        if self.fair is not None:
            self.fair.set_weight(tenant, 1.0 if share is None else share.weight, now_s)

    def switch(
        self, name: PolicyName, waiting: Iterable[tuple[SequenceProgress, float]], now_s: float, *, step_ms: float,
        patience_s: float,
    ) -> None:  # fmt: skip
        """Another policy for the same sequences: `waiting` are those in the queue, each since when.

        Deficits start anew, because nobody is owed what a policy without accounts served. Service since the start of
        the engine goes on from where it stood.
        """
        self.name = name
        self.fair, self.aging = _open_fairness(name, step_ms, patience_s)
        if self.fair is not None:
            self.fair.served_ms = self._served_ms
            self.fair.set_shares({one.name: one.weight for one in self._share_by_tenant.values()}, 1.0, now_s)
            for account, count in self._running.items():
                self.fair.run(account, count, now_s)
        self.queue = WaitingQueue(open_order(name), self.fair or OpenGate())
        self._deferred.clear()
        self._stalled.clear()
        self._ready_weights.clear()
        # What flies was charged to the books before.
        self._charges = deque((Charge(0.0, ()), predicted_ms) for _, predicted_ms in self._charges)
        for sequence, since_s in waiting:
            self.queue.add(self._waiting(sequence, since_s), now_s)

    def set_pace(self, step_ms: float, patience_s: float, now_s: float) -> None:
        """Fairness measured out by another longest step. Deficits stay, as far as the new quantum allows."""
        if self.fair is not None:
            self.fair.set_limits(fair_limits(step_ms, patience_s), now_s)
        if self.aging is not None:
            self.aging = AgingShare(step_ms)

    def wait(self, sequence: SequenceProgress, since_s: float, now_s: float) -> None:
        """It waits for its first slice, for its way back, or for the rest of its prompt."""
        waiting = self._waiting(sequence, since_s)
        if sequence.id in self.queue:
            self.queue.place(waiting, now_s)
        else:
            self.queue.add(waiting, now_s)

    def admit(self, sequence: SequenceProgress, now_s: float) -> None:
        """It holds blocks from now on. It stays in the queue until its prompt is through."""
        self._num_admitted += 1
        sequence.admitted = self._num_admitted
        self._run(sequence.account, 1, now_s)
        self._resume((sequence.account.tenant,), now_s)

    def decode(self, sequence: SequenceProgress, now_s: float) -> None:
        """Its prompt is through: it waits for nobody's turn any more."""
        self._forget(sequence.id, now_s)

    def release(self, sequence: SequenceProgress, now_s: float) -> None:
        """It holds no blocks any more."""
        self._run(sequence.account, -1, now_s)
        self._resume((sequence.account.tenant,), now_s)

    def leave(self, sequence: SequenceProgress, now_s: float) -> None:
        """It has ended, or does not wait while its last step is under way."""
        self._forget(sequence.id, now_s)

    def end(self, sequence: SequenceProgress, now_s: float) -> None:
        """The sequence has ended."""
        self.preemption_budget.make_up(sequence.id)  # how much of it was done again by now nobody counts
        self._forget(sequence.id, now_s)

    def preempt(self, sequence: SequenceProgress, reason: PreemptionReason, price_ms: float) -> None:
        """The sequence is preempted at this price. For debt, its account stays out while an eligible one waits."""
        if reason in ("debt", "share"):
            self.preemption_budget.spend(sequence.id, price_ms)
        if reason == "debt" and self.fair is not None:
            self.fair.bar(sequence.account, price_ms)

    def defer(self, seqs: Iterable[SeqId], at_quota: tuple[TenantId, ...], now_s: float) -> None:
        """Not dispatchable in the step just planned: nobody waits on them.

        Something of these sequences is on its way; those tenants hold all that they may.
        """
        for seq in seqs:
            if seq in self.queue:
                self.queue.defer(seq, now_s)
                self._deferred.add(seq)
        for tenant in at_quota:  # until it holds less, or may hold more
            self.queue.stall(tenant, now_s, is_stalled=True)
            self._stalled.add(tenant)

    # ---- one step

    def begin(self, now_s: float) -> None:
        """Before anything is drawn: quanta, and who is eligible by now."""
        if self.fair is not None:
            self.fair.refill(now_s)  # before those come back who could not be dispatched: nobody waits on them
        for seq in self._deferred:
            if seq in self.queue:
                self.queue.resume(seq, now_s)
        self._deferred.clear()
        self._ready_weights.clear()
        self.queue.refresh()

    def candidates(self, now_s: float, closed: Container[Account] = ()) -> Iterator[SeqId]:
        """Who wants a slice of a prompt, or to be admitted, in order; lazily. `closed`: none of these accounts."""
        return self.queue.candidates(now_s, closed)

    def starving(self, now_s: float) -> SeqId | None:
        """Who may have the aging share of this step."""
        if self.aging is None or not self.aging.is_due:
            return None
        return self.queue.oldest(now_s, self.aging.starve_s)

    def reason(
        self, holder: Account, first: Account, now_s: float, holdings: Callable[[], Holdings], *, is_aged: bool,
        price_ms: float = 0.0,
    ) -> PreemptionReason | None:  # fmt: skip
        """Why a sequence of one account may be preempted for one that waits; None: it may not.

        `is_aged`: it runs on the share of those who starve. `holdings` is asked only where it matters. `price_ms`:
        what preempting it costs; a debt or a share must be worth that, a higher band always is.
        """
        if holder.band > first.band:
            is_protected = is_aged and self.aging is not None and not self.aging.is_spent
            return None if is_protected else "band"
        if self.fair is None:
            return None
        if self.fair.may_take_for_debt(first, holder, now_s, price_ms=price_ms):
            return "debt"
        if self.fair.is_shut_out(first, now_s):
            held = holdings()
            would_hold, victim_holds = held.get(first, 0.0), held.get(holder, 0.0)
            if self.fair.may_take_for_share(
                first, holder, would_hold=would_hold, victim_holds=victim_holds, now_s=now_s, price_ms=price_ms
            ):
                return "share"
        return None

    def debtors(self, creditor: Account, now_s: float) -> frozenset[Account]:
        """Who owes so much, and for so long, that its sequences pause or give way for this one's."""
        return self.fair.debtors(creditor, now_s) if self.fair is not None else frozenset()

    def place(self, sequence: SequenceProgress) -> tuple[float, ...]:
        """Where it stands among those that wait; for sorting a few."""
        waiting, account = self.queue[sequence.id], sequence.account
        is_spent = self.fair is not None and not self.fair.is_eligible(account)
        return (*self.queue.place_of(waiting, is_spent=is_spent), sequence.id)

    def prefill_share(self, account: Account) -> float:
        """Which part of a step's prompt tokens its tenant may have while others of its band wait, too.

        All of it for one that is owed service: the gate has let it go first for that.
        """
        if self.fair is None or self.fair.is_eligible(account):
            return 1.0
        weight = self._ready_weights.get(account.band)
        if weight is None:
            weight = self._ready_weights[account.band] = self.fair.ready_weight(account.band)
        return self.fair.weight(account) / weight if weight else 1.0

    def lead(self, account: Account) -> float:
        """How far a tenant is ahead of its share."""
        return self.fair.lead(account) if self.fair is not None else 0.0

    @property
    def launched_ms(self) -> float:
        """Predicted milliseconds of the step launched last; 0 when none is in flight."""
        return self._charges[-1][1] if self._charges else 0.0

    def launch(self, pieces: list[tuple[SequenceProgress, Slice]], now_s: float) -> None:
        """A step is launched: charge it."""
        prompts = [piece for _, piece in pieces if piece.length > 1]
        decodes = [piece for _, piece in pieces if piece.length == 1]
        predicted_ms = self.costs.step_ms(
            sum(piece.length for piece in prompts),
            sum(piece.start for piece in prompts),
            len(decodes),
            sum(piece.start for piece in decodes),
        )
        charge = Charge(0.0, ())
        if self.aging is not None:
            shares: dict[Account, float] = {}
            aged_ms = repeated_ms = 0.0
            for (account, is_aged, is_repeated), share_ms in self.costs.share_ms(
                BilledSlice(self._payment(sequence, piece), piece.length, piece.start, piece.length == 1)
                for sequence, piece in pieces
            ).items():
                shares[account] = shares.get(account, 0.0) + share_ms
                aged_ms += share_ms if is_aged else 0.0
                repeated_ms += share_ms if is_repeated else 0.0
            self.aging.add(predicted_ms, aged_ms)
            self.preemption_budget.launch(predicted_ms - repeated_ms)
            if self.preemption_budget.owes:
                for sequence, piece in pieces:
                    if piece.start + piece.length >= sequence.redo_until:
                        self.preemption_budget.make_up(sequence.id)
            if self.fair is not None:
                charge = self.fair.charge(shares, now_s)
        for sequence, _ in pieces:
            if sequence.id in self.queue:  # for the rest of its prompt: less work, and it has waited since now
                self.queue.place(self._waiting(sequence, now_s), now_s)
        self._charges.append((charge, predicted_ms))

    def settle(self, measured_ms: float, now_s: float) -> None:
        """The oldest launched step took so long; 0 when it was void."""
        charge, predicted_ms = self._charges.popleft()
        if self.fair is not None:
            self.fair.settle(charge, measured_ms, now_s)
        self.costs.correct(predicted_ms, measured_ms)

    def standing(self, tally: PreemptionCounts, now_s: float) -> FairGauges:
        """How fair it was, tenant by tenant, and who gave way. Cost: O(tenants)."""
        *_, told = self.standings(tally, now_s)
        return told or FairGauges()

    def standings(self, tally: PreemptionCounts, now_s: float) -> Iterator[FairGauges | None]:
        """Find out the same in pieces of about 1 ms: the last one is the answer, the others are None."""
        since: dict[TenantId, float] = {}
        for number, (tenant, since_s) in enumerate(self.queue.waits(), 1):
            since[tenant] = min(since.get(tenant, since_s), since_s)
            if number % _AT_ONCE == 0:
                yield None
        served_ms, shares = self._served_ms, self._share_by_tenant
        self._window.note(served_ms, since, now_s)
        yield None
        competing = self._window.per_weight_ms(_Weights(shares))
        yield None
        rivals = by_band(competing, {tenant: shares[tenant].band for tenant in competing if tenant in shares})
        worst, largest = min(map(jain, rivals), default=None), max(map(gap_ms, rivals), default=None)
        yield None
        told: list[TenantGauges] = []
        for number, tenant in enumerate(dict.fromkeys((*served_ms, *since, *tally.tenants)), 1):
            told.append(
                TenantGauges(
                    tenant=tenant,
                    service_s=served_ms.get(tenant, 0.0) / 1e3,
                    starving_s=max(0.0, now_s - since.get(tenant, now_s)),
                    preemptions=tally.of(tenant),
                )
            )
            if number % _AT_ONCE == 0:
                yield None
        yield FairGauges(
            competing=sum(map(len, rivals)),
            jain=worst,
            gap_s=None if largest is None else largest / 1e3,
            tenants=tuple(told),
        )

    def check_integrity(self) -> None:
        """Errors: InvariantError."""
        self.queue.check_integrity()
        self.preemption_budget.check_integrity()
        if self.fair is not None:
            self.fair.check_integrity()

    # ---- inside

    def _waiting(self, sequence: SequenceProgress, since_s: float) -> WaitingSequence:
        slo = self.slo(sequence.request.tenant)
        uncached = sequence.num_tokens - max(sequence.scheduled, sequence.near_tokens)
        return WaitingSequence(
            seq=sequence.id,
            tenant=sequence.request.tenant,
            arrival_s=sequence.request.arrival_s,
            since_s=since_s,
            band=sequence.band,
            ttft_goal_s=slo.ttft_s or (_BATCH_GOAL_S if slo.kind == "batch" else _GOAL_S),
            work_s=self.costs.recompute_ms(uncached, sequence.num_tokens - uncached) / 1e3,
        )

    def _payment(self, sequence: SequenceProgress, piece: Slice) -> tuple[Account, bool, bool]:
        """Who pays for a slice; whether it runs on the aging share; whether its tokens were computed before.

        What a preemption threw away is computed again at the cost of the account that gained by it.
        """
        account = sequence.account
        is_repeated = piece.start < sequence.redo_until
        if is_repeated and self.fair is not None:
            account = self.fair.payer(account, sequence.culprit)
        return account, sequence.is_aged, is_repeated

    def _run(self, account: Account, change: int, now_s: float) -> None:
        count = self._running[account] = self._running.get(account, 0) + change
        if not count:
            del self._running[account]
        if self.fair is not None:
            self.fair.run(account, count, now_s)

    def _resume(self, tenants: Iterable[TenantId], now_s: float) -> None:
        """Its own limits keep nothing of the tenant back any more, as far as is known."""
        for tenant in self._stalled.intersection(tenants):
            self.queue.stall(tenant, now_s, is_stalled=False)
            self._stalled.remove(tenant)

    def _forget(self, seq: SeqId, now_s: float) -> None:
        if seq in self.queue:
            self.queue.remove(seq, now_s)
        self._deferred.discard(seq)


class _Weights(Mapping[TenantId, float]):
    """The weights of the configured tenants, without a copy."""

    def __init__(self, shares: Mapping[TenantId, TenantShare]) -> None:
        self._shares = shares

    def __getitem__(self, tenant: TenantId) -> float:
        return self._shares[tenant].weight

    def __iter__(self) -> Iterator[TenantId]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)


_AT_ONCE = 512  # tenants in one piece of a standing
_GOAL_S = 5.0  # of those who name none: behind those who do
_BATCH_GOAL_S = 60.0  # nobody watches: behind everything that came in the last minute


def open_policy(
    name: PolicyName, costs: StepCosts | None = None, *, step_ms: float = 100.0, patience_s: float = 2.0
) -> Policy:
    """The policy that the operator chose. `step_ms` is the longest step, by which fairness is measured out."""
    costs = costs or StepCosts(linear_times())
    return Policy(name, costs, *_open_fairness(name, step_ms, patience_s))


def _open_fairness(name: PolicyName, step_ms: float, patience_s: float) -> tuple[TenantBook | None, AgingShare | None]:
    """What tenants are owed, which only `fair` keeps, and the share of those who starve where there are bands."""
    fair = TenantBook(fair_limits(step_ms, patience_s)) if name == "fair" else None
    return fair, AgingShare(step_ms) if name != "fcfs" else None
