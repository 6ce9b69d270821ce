"""The scheduling policy: the order of waiting sequences, the fairness between tenants, and the charges of steps."""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, KeysView, Mapping

from tiercel.scheduler.account import Account
from tiercel.scheduler.aging import AgingShare
from tiercel.scheduler.cost import StepCosts, StepWork, linear_times, work_by_payer
from tiercel.scheduler.fairness import NO_CHARGE, Charge, NoFairness, TenantBook
from tiercel.scheduler.fairness_limits import fair_limits
from tiercel.scheduler.preemption_budget import PreemptionBudget
from tiercel.scheduler.preemption_counts import PreemptionCounts
from tiercel.scheduler.preemption_rules import PreemptionRules
from tiercel.scheduler.queue import WaitingQueue
from tiercel.scheduler.queue_order import WaitingSequence, open_order
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.service_survey import ServiceSurvey
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FairGauges
from tiercel.values.plan import PreemptionReason, Slice
from tiercel.values.tenant import PolicyName, Slo, Tenants, TenantShare, served_band

_DEFAULT_GOAL_S = 5.0  # TTFT goal of tenants that have none; longer than the goals of others
_BATCH_GOAL_S = 60.0  # of batch tenants, behind all interactive requests of the last minute

_Payer = tuple[Account, bool, bool]
"""The account that pays for a slice, whether the slice is aged, and whether it repeats work."""

Holdings = Mapping[Account, float]
"""What each account holds of all blocks or rows, as a part of the whole. For the beneficiary: what it would hold."""


def _billed(piece: Slice) -> tuple[tuple[int, int], ...]:
    """Return the tokens and the context of a slice; of a decode and, apart from it, of its proposed tokens."""
    if not piece.proposed:
        return ((piece.length, piece.start),)
    return ((1, piece.start), (len(piece.proposed), piece.start + 1))


class Policy:
    """The operator's choice of `fair`, `priority` or `fcfs`, over one queue. Written by the SequenceBook.

    `priority` is `fair` without the gate between tenants and with arrival as the key. `fcfs` also has no aging, and
    serves all sequences in one band.

    One order decides who is admitted and who is preempted (docs/decisions/0054). Its first part, the band, stands in
    the account of a sequence, and nothing else in the scheduler knows the band that a request asked for.
    """

    def __init__(
        self, name: PolicyName, costs: StepCosts, fair: TenantBook | NoFairness, aging: AgingShare | None
    ) -> None:
        self.name: PolicyName = name
        self.costs = costs
        self.fair = fair
        self.rules = PreemptionRules(fair)
        self.aging = aging
        self.preemption_budget = PreemptionBudget()
        self.queue = WaitingQueue(open_order(name), fair)
        self._share_by_tenant: dict[TenantId, TenantShare] = {}
        self._running: dict[Account, int] = {}
        self._deferred: set[SeqId] = set()
        self._stalled: set[TenantId] = set()
        self._charges: deque[tuple[Charge, float]] = deque()  # of launched steps in order, with the predicted time
        self._num_admissions = 0
        self._survey = ServiceSurvey()
        self._ready_weights: dict[int, float] = {}  # by band, computed at most once per step

    # ---- tenants

    def account(self, tenant: TenantId, band: int) -> Account:
        """Return the account of a tenant's sequences of a band, with the band in which the policy serves them."""
        return Account(served_band(self.name, band), tenant)

    def slo(self, tenant: TenantId) -> Slo:
        """Return the tenant's latency goals."""
        share = self._share_by_tenant.get(tenant)
        return share.slo if share is not None else Slo()

    def share(self, tenant: TenantId) -> TenantShare | None:
        """Return the tenant as configured; None if it is not."""
        return self._share_by_tenant.get(tenant)

    @property
    def tenants(self) -> KeysView[TenantId]:
        """The configured tenants."""
        return self._share_by_tenant.keys()

    def set_tenants(self, tenants: Tenants, now_s: float) -> None:
        """Set the weights and goals of all tenants."""
        for share in tenants.tenants:
            self.set_share(share.name, share, now_s)
        for tenant in self.tenants - {share.name for share in tenants.tenants}:
            self.set_share(tenant, None, now_s)

    def set_share(self, tenant: TenantId, share: TenantShare | None, now_s: float) -> None:
        """Set the weight and goals of one tenant; None removes the tenant."""
        if share is None:
            del self._share_by_tenant[tenant]
        else:
            self._share_by_tenant[tenant] = share
        self._resume(tenant, now_s)
        self.fair.set_weight(tenant, 1.0 if share is None else share.weight, now_s)

    # ---- events

    def rename(self, name: PolicyName) -> None:
        """Begin a change to another policy: `account` answers for it. Call `switch` when the sequences have moved."""
        self.name = name

    def switch(
        self, waiting: Iterable[tuple[SequenceProgress, float]], running: Iterable[SequenceProgress], now_s: float, *,
        step_ms: float, patience_s: float,
    ) -> None:  # fmt: skip
        """End a change to another policy: see `rename`.

        `waiting` are the sequences in the queue, each with the time since it waits; `running` those that hold blocks.
        Deficits begin anew, because a policy without accounts keeps none. The totals of service continue.
        """
        name = self.name
        self.fair, self.aging = _open_fairness(name, step_ms, patience_s, self.fair.served_ms)
        self.rules = PreemptionRules(self.fair)
        self.fair.set_weights({one.name: one.weight for one in self._share_by_tenant.values()}, now_s)
        self._running = dict(Counter(one.account for one in running))
        for account, count in self._running.items():
            self.fair.run(account, count, now_s)
        self.queue = WaitingQueue(open_order(name), self.fair)
        self._deferred.clear()
        self._stalled.clear()
        self._ready_weights.clear()
        # The steps in flight were charged to the book of the policy before.
        self._charges = deque((NO_CHARGE, predicted_ms) for _, predicted_ms in self._charges)
        for sequence, since_s in waiting:
            self.queue.add(self._waiting(sequence, since_s), now_s)

    def set_pace(self, step_ms: float, patience_s: float, now_s: float) -> None:
        """Rescale quanta and debt limits to a new maximum step time. Deficits are cut to the new quantum."""
        self.fair.set_limits(fair_limits(step_ms, patience_s), now_s)
        if self.aging is not None:
            self.aging = AgingShare(step_ms)

    def wait(self, sequence: SequenceProgress, since_s: float, now_s: float) -> None:
        """Queue a sequence for its first slice, for its resumption or for the rest of its prompt."""
        waiting = self._waiting(sequence, since_s)
        if sequence.id in self.queue:
            self.queue.update(waiting, now_s)
        else:
            self.queue.add(waiting, now_s)

    def admit(self, sequence: SequenceProgress, now_s: float) -> None:
        """Record that a sequence holds blocks. It stays in the queue until its prompt is computed."""
        self._num_admissions += 1
        sequence.admission = self._num_admissions
        self._change_running(sequence.account, 1, now_s)
        self._resume(sequence.account.tenant, now_s)

    def release(self, sequence: SequenceProgress, now_s: float) -> None:
        """Record that a sequence holds no blocks any more."""
        self._change_running(sequence.account, -1, now_s)
        self._resume(sequence.account.tenant, now_s)

    def leave(self, sequence: SequenceProgress, now_s: float) -> None:
        """Take a sequence out of the queue: its prompt is computed, or it waits until its last step has committed."""
        if sequence.id in self.queue:
            self.queue.remove(sequence.id, now_s)
        self._deferred.discard(sequence.id)

    def end(self, sequence: SequenceProgress, now_s: float) -> None:
        """Forget a sequence that has ended."""
        self.preemption_budget.catch_up(sequence.id)
        self.leave(sequence, now_s)

    def preempt(self, sequence: SequenceProgress, reason: PreemptionReason, price_ms: float) -> None:
        """Record a preemption. After one for debt, the account is barred while an eligible account waits."""
        if reason in ("debt", "share"):
            self.preemption_budget.spend(sequence.id, price_ms)
        if reason == "debt":
            self.fair.bar(sequence.account, price_ms)

    def defer(self, seqs: Iterable[SeqId], at_quota: tuple[TenantId, ...], now_s: float) -> None:
        """Mark the sequences and tenants that were not dispatchable in the planned step.

        The sequences wait for a transfer, or for a prefix that another sequence computes. The tenants are at their
        quota.
        """
        for seq in seqs:
            if seq in self.queue:
                self.queue.defer(seq, now_s)
                self._deferred.add(seq)
        for tenant in at_quota:  # until the tenant holds less or may hold more
            self.queue.stall(tenant, now_s, is_stalled=True)
            self._stalled.add(tenant)

    # ---- planning a step

    def begin(self, now_s: float) -> None:
        """Begin a plan: refill deficits, and make deferred sequences dispatchable again."""
        self.fair.refill(now_s)  # before the deferred sequences return, so that it does not wait for them
        for seq in self._deferred:
            if seq in self.queue:
                self.queue.resume(seq, now_s)
        self._deferred.clear()
        self._ready_weights.clear()
        self.queue.refresh()

    def candidates(self, now_s: float, closed: Container[Account] = ()) -> Iterator[SeqId]:
        """Yield the sequences that want a slice of a prompt or an admission, in order, without `closed` accounts."""
        return self.queue.candidates(now_s, closed)

    def waits_behind(self, victim: SequenceProgress, beneficiary: SequenceProgress | None, now_s: float) -> bool:
        """Return whether a waiting victim is not admitted before the waiting sequence that it was preempted for.

        Otherwise a victim whose place in the queue is before the beneficiary's would take its own blocks back. A victim
        of a higher band does not wait: its band was raised since, or the beneficiary was starving. Neither does a
        victim wait while the beneficiary is held back because of its own account's debt.
        """
        if beneficiary is None or beneficiary.account.band > victim.account.band:
            return False
        return self.fair.may_admit(beneficiary.account, now_s)

    def starving(self, now_s: float) -> SeqId | None:
        """Return the sequence that may have the aging share of this step."""
        if self.aging is None or not self.aging.is_due:
            return None
        return self.queue.oldest(now_s, self.aging.starve_s)

    def reason(
        self, holder: Account, first: Account, now_s: float, holdings: Callable[[], Holdings], *, is_aged: bool,
        price_ms: float = 0.0,
    ) -> PreemptionReason | None:  # fmt: skip
        """Return why a sequence of `holder` may be preempted for a waiting one of `first`; None if it may not.

        `is_aged`: the sequence runs on the aging share. `holdings` is called only if the answer depends on it.
        `price_ms`: the price of the preemption. A debt or a share must be worth the price; a higher band always is.
        """
        if holder.band > first.band:
            is_protected = is_aged and self.aging is not None and not self.aging.is_spent
            return None if is_protected else "band"
        if self.rules.may_preempt_for_debt(first, holder, now_s, price_ms=price_ms):
            return "debt"
        if self.rules.is_shut_out(first, now_s):
            held = holdings()
            would_hold, victim_holds = held.get(first, 0.0), held.get(holder, 0.0)
            if self.rules.may_preempt_for_share(
                first, holder, would_hold=would_hold, victim_holds=victim_holds, now_s=now_s, price_ms=price_ms
            ):
                return "share"
        return None

    def sort_key(self, sequence: SequenceProgress) -> tuple[float, ...]:
        """Return a key that sorts waiting sequences as `candidates` yields them. For a few sequences only."""
        is_spent = not self.fair.is_eligible(sequence.account)
        return (*self.queue.sort_key(self.queue[sequence.id], is_spent=is_spent), sequence.id)

    def prefill_share(self, account: Account) -> float:
        """Return the part of a step's prompt tokens that the account may have while others of its band wait.

        An eligible account may have all of them: the gate puts it first for that purpose.
        """
        if self.fair.is_eligible(account):
            return 1.0
        weight = self._ready_weights.get(account.band)
        if weight is None:
            weight = self._ready_weights[account.band] = self.fair.ready_weight(account.band)
        return self.fair.weight(account) / weight if weight else 1.0

    # ---- launched steps

    @property
    def launched_ms(self) -> float:
        """The predicted milliseconds of the step launched last; 0 if no step is in flight."""
        return self._charges[-1][1] if self._charges else 0.0

    @property
    def in_flight_ms(self) -> float:
        """The predicted milliseconds of all steps in flight."""
        return sum(predicted_ms for _, predicted_ms in self._charges)

    def launch(self, pieces: list[tuple[SequenceProgress, Slice]], now_s: float) -> None:
        """Charge a launched step."""
        works = work_by_payer(
            (
                self._payer_again(one) if piece.start < one.repeated_until else (one.account, one.is_aged, False),
                tokens,
                start,
            )
            for one, piece in pieces
            for tokens, start in _billed(piece)
        )
        whole = StepWork.of(works.values())
        predicted_ms = self.costs.step_ms(whole.tokens, whole.prompt_context, whole.decodes, whole.decode_context)
        charge = NO_CHARGE
        if self.aging is not None:
            charge = self._charge(self.aging, pieces, self.costs.share_ms(works), predicted_ms, now_s)
        for sequence, piece in pieces:
            # It waits for the rest of its prompt: with less work, and from now on.
            if not piece.samples and sequence.id in self.queue:
                self.queue.update(self._waiting(sequence, now_s), now_s)
        self._charges.append((charge, predicted_ms))

    def settle(self, measured_ms: float, now_s: float) -> None:
        """Correct the charge of the oldest launched step by its measured time; 0 if the step was void."""
        charge, predicted_ms = self._charges.popleft()
        self.fair.settle(charge, measured_ms, now_s)
        self.costs.correct(predicted_ms, measured_ms)

    def survey(self, counts: PreemptionCounts, now_s: float) -> Iterator[FairGauges | None]:
        """Collect the gauges of fairness in pieces: see `ServiceSurvey.pieces`."""
        yield from self._survey.pieces(self.queue, self.fair.served_ms, self._share_by_tenant, counts, now_s)

    def check_integrity(self) -> None:
        """Check the queue, the preemption budget and the deficits. Errors: InvariantError."""
        self.queue.check_integrity()
        self.preemption_budget.check_integrity()
        self.fair.check_integrity()

    # ---- inside

    def _charge(
        self,
        aging: AgingShare,
        pieces: list[tuple[SequenceProgress, Slice]],
        ms_by_payer: dict[_Payer, float],
        predicted_ms: float,
        now_s: float,
    ) -> Charge:
        shares: dict[Account, float] = {}
        aged_ms = repeated_ms = 0.0
        for (account, is_aged, is_repeated), share_ms in ms_by_payer.items():
            shares[account] = shares.get(account, 0.0) + share_ms
            aged_ms += share_ms if is_aged else 0.0
            repeated_ms += share_ms if is_repeated else 0.0
        aging.add(predicted_ms, aged_ms)
        self.preemption_budget.launch(predicted_ms - repeated_ms)
        if self.preemption_budget.has_outstanding:
            for sequence, piece in pieces:
                if piece.start + piece.length >= sequence.repeated_until:
                    self.preemption_budget.catch_up(sequence.id)
        return self.fair.charge(shares, now_s)

    def _payer_again(self, sequence: SequenceProgress) -> _Payer:
        """Return who pays for a slice that repeats work."""
        return self.rules.payer(sequence.account, sequence.preempted_for), sequence.is_aged, True

    def _waiting(self, sequence: SequenceProgress, since_s: float) -> WaitingSequence:
        slo = self.slo(sequence.request.tenant)
        uncached = sequence.num_tokens - max(sequence.scheduled, sequence.cached_tokens)
        # A stream that was cut by the death of an engine goes first once: its client has waited before.
        goes_first = bool(sequence.request.outputs) and sequence.first_launch_s is None
        goal_s = slo.ttft_s or (_BATCH_GOAL_S if slo.kind == "batch" else _DEFAULT_GOAL_S)
        return WaitingSequence(
            seq=sequence.id,
            tenant=sequence.request.tenant,
            arrival_s=sequence.request.arrival_s,
            since_s=since_s,
            band=sequence.account.band,
            ttft_goal_s=0.0 if goes_first else goal_s,
            work_s=0.0 if goes_first else self.costs.recompute_ms(uncached, sequence.num_tokens - uncached) / 1e3,
        )

    def _change_running(self, account: Account, change: int, now_s: float) -> None:
        count = self._running[account] = self._running.get(account, 0) + change
        if not count:
            del self._running[account]
        self.fair.run(account, count, now_s)

    def _resume(self, tenant: TenantId, now_s: float) -> None:
        """Make a tenant's sequences dispatchable again, until a plan finds that its quota is still full."""
        if tenant in self._stalled:
            self.queue.stall(tenant, now_s, is_stalled=False)
            self._stalled.remove(tenant)


def open_policy(
    name: PolicyName, costs: StepCosts | None = None, *, step_ms: float = 100.0, patience_s: float = 2.0
) -> Policy:
    """Return a new policy. `step_ms` is the longest step, to which quanta and debt limits are proportional."""
    costs = costs or StepCosts(linear_times())
    return Policy(name, costs, *_open_fairness(name, step_ms, patience_s, {}))


def _open_fairness(
    name: PolicyName, step_ms: float, patience_s: float, served_ms: dict[TenantId, float]
) -> tuple[TenantBook | NoFairness, AgingShare | None]:
    """Return the book of deficits, which only `fair` keeps, and the aging share, which `fcfs` does not have."""
    is_fair = name == "fair"
    fair = TenantBook(fair_limits(step_ms, patience_s), served_ms=served_ms) if is_fair else NoFairness(served_ms)
    return fair, AgingShare(step_ms) if name != "fcfs" else None
