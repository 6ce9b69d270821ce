"""A small machine in virtual time, tenants that try to get more than their share, and the bound on their service.

The machine plans like the engine, with the real queue and the real tenant book: decodes first, then waiting sequences
in the order of the policy under one token budget, with preemption for debt. A step is charged before the previous one
is settled. Preemptions cost nothing, so that the bound is tight; `benchmarks/scenarios/adversary.py` has prices.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from tiercel.scheduler.account import Account
from tiercel.scheduler.aging import AgingShare
from tiercel.scheduler.fairness import Charge, TenantBook
from tiercel.scheduler.fairness_limits import FairLimits, fair_limits
from tiercel.scheduler.preemption_limiter import PreemptionLimiter
from tiercel.scheduler.preemption_order import VictimCandidate, victims
from tiercel.scheduler.preemption_rules import PreemptionRules
from tiercel.scheduler.queue import WaitingQueue
from tiercel.scheduler.queue_order import FairOrder, WaitingSequence
from tiercel.values.ids import SeqId, TenantId

BookMaker = Callable[[FairLimits, dict[TenantId, float]], TenantBook]
RulesMaker = Callable[[TenantBook], PreemptionRules]

BASE_MS, PREFILL_MS, DECODE_MS = 2.0, 0.2, 1.0
MIN_TOKENS = 4  # of a victim since it resumed

_MOOD_S = 4.0  # mean time until a schemer changes its mood


@dataclass
class Job:
    """One request on the machine."""

    seq: SeqId
    account: Account
    prompt: int
    outputs: int
    blocks: int
    arrival_s: float
    computed: int = 0
    admission: int = 0
    since_resume: int = 0
    deferred_to_s: float = 0.0
    abort_s: float = float("inf")
    is_aged: bool = False

    @property
    def prompt_left(self) -> int:
        return max(0, self.prompt - self.computed)


class Machine:
    """A machine with rows, blocks and a token budget, which plans one step after the other."""

    def __init__(
        self,
        weights: dict[str, float],
        *,
        rows: int = 8,
        blocks: int = 64,
        budget: int = 64,
        patience_s: float = 0.1,
        seed: int = 0,
        open_book: BookMaker = TenantBook,
        open_rules: RulesMaker = PreemptionRules,
        starve_s: float = 30.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.rows, self.blocks, self.budget = rows, blocks, budget
        self.limits = fair_limits(1.1 * (BASE_MS + budget * PREFILL_MS + rows * DECODE_MS), patience_s)
        self.weights = {TenantId(name): weight for name, weight in weights.items()}
        self.book = open_book(self.limits, self.weights)
        self.rules = open_rules(self.book)
        self.queue = WaitingQueue(FairOrder(), self.book)
        self.aging = AgingShare(self.limits.step_ms, starve_s=starve_s)
        self.now_s = 0.0
        self.jobs: dict[SeqId, Job] = {}
        self.running: dict[SeqId, Job] = {}
        self.preemptions = 0
        self.finished = 0
        self.service_ms: dict[Account, float] = {}  # measured
        self.first_slice_s: dict[SeqId, float] = {}
        self._count = 0
        self._free = blocks
        self._unsettled: list[tuple[Charge, float]] = []

    def submit(
        self, tenant: str, prompt: int, outputs: int, blocks: int = 1, *, band: int = 0, deferred_s: float = 0.0,
        abort_s: float = float("inf"),
    ) -> SeqId:  # fmt: skip
        self._count += 1
        seq = SeqId(self._count)
        job = Job(seq, Account(band, TenantId(tenant)), prompt, outputs, min(blocks, self.blocks), self.now_s)
        job.abort_s = self.now_s + abort_s
        self.jobs[seq] = job
        self.queue.add(self._waiting(job), self.now_s)
        if deferred_s:
            job.deferred_to_s = self.now_s + deferred_s
            self.queue.defer(seq, self.now_s)
        return seq

    def end(self, job: Job) -> None:
        if job.seq in self.queue:
            self.queue.remove(job.seq, self.now_s)
        if job.seq in self.running:
            self._stop(job)
        del self.jobs[job.seq]

    def ready(self) -> frozenset[TenantId]:
        """Return the tenants with dispatchable waiting work in band 0."""
        return frozenset(
            job.account.tenant
            for job in self.jobs.values()
            if job.account.band == 0 and job.seq in self.queue and not job.deferred_to_s
        )

    def waiting(self, tenant: str) -> int:
        return sum(job.account.tenant == tenant and job.seq in self.queue for job in self.jobs.values())

    @property
    def num_free_rows(self) -> int:
        return self.rows - len(self.running)

    def step(self) -> None:
        for job in list(self.jobs.values()):
            if job.deferred_to_s and job.deferred_to_s <= self.now_s:
                job.deferred_to_s = 0.0
                self.queue.resume(job.seq, self.now_s)
            if job.abort_s <= self.now_s and job.seq not in self.running:
                self.end(job)
        self.book.refill(self.now_s)
        self.queue.refresh()
        self._preempt()
        budget = self.budget
        pieces: list[tuple[Job, int, bool]] = [
            (job, 1, True) for job in self.running.values() if not job.prompt_left and job.seq not in self.queue
        ]
        budget -= len(pieces)
        for seq in self._candidates():
            if budget <= 0:
                break
            job = self.jobs[seq]
            if seq not in self.running and (job.blocks > self._free or len(self.running) >= self.rows):
                continue
            if seq not in self.running:
                self._start(job)
            length = min(budget, job.prompt_left)
            budget -= length
            pieces.append((job, length, False))
        self._run(pieces)

    def _candidates(self) -> list[SeqId]:
        drawn: list[SeqId] = []
        for seq in self.queue.candidates(self.now_s):
            drawn.append(seq)
            if len(drawn) >= 16:
                break
        aged = self.queue.oldest(self.now_s, self.aging.starve_s) if self.aging.is_due else None
        if aged is not None:
            self.jobs[aged].is_aged = True
            drawn = [aged, *(seq for seq in drawn if seq != aged)]
        return drawn

    def _preempt(self) -> None:
        """Preempt for the first waiting sequence: for debt, or sequences of lower bands."""
        first = next((self.jobs[seq] for seq in self.queue.candidates(self.now_s) if seq not in self.running), None)
        if first is None:
            return
        is_blocked = first.blocks > self._free or len(self.running) >= self.rows

        def may_take(job: Job) -> bool:
            if job.account.band > first.account.band:
                return is_blocked and (not job.is_aged or self.aging.is_spent)
            return self.rules.may_preempt_for_debt(first.account, job.account, self.now_s)

        candidates = [
            VictimCandidate(job.seq, job.account, False, job.admission, job.since_resume)
            for job in self.running.values()
            if may_take(job)
        ]
        limiter = PreemptionLimiter()
        for seq in victims(candidates, self.book.lead, lambda seq: self.jobs[seq].blocks, MIN_TOKENS):
            if not limiter.may_preempt():
                break
            limiter.preempt(spills=False)
            victim = self.jobs[seq]
            if victim.account.band == first.account.band:
                self.book.bar(victim.account)
            victim.is_aged = False
            self.preemptions += 1
            if seq in self.queue:
                self.queue.remove(seq, self.now_s)
            self.queue.add(self._waiting(victim), self.now_s)
            self._stop(victim)

    def _start(self, job: Job) -> None:
        self._count += 1
        job.admission = self._count
        job.since_resume = 0
        self.first_slice_s.setdefault(job.seq, self.now_s)
        self.running[job.seq] = job
        self._free -= job.blocks
        self.book.run(job.account, self._num_running(job.account), self.now_s)

    def _stop(self, job: Job) -> None:
        del self.running[job.seq]
        self._free += job.blocks
        self.book.run(job.account, self._num_running(job.account), self.now_s)

    def _num_running(self, account: Account) -> int:
        return sum(one.account == account for one in self.running.values())

    def _waiting(self, job: Job) -> WaitingSequence:
        goal_s = 0.2 if job.account.band == 0 else 5.0
        work_s = 1e-3 * PREFILL_MS * job.prompt
        return WaitingSequence(job.seq, job.account.tenant, job.arrival_s, self.now_s, job.account.band, goal_s, work_s)

    def _run(self, pieces: list[tuple[Job, int, bool]]) -> None:
        shares: dict[Account, float] = {}
        aged_ms = 0.0
        for job, length, is_decode in pieces:
            cost_ms = BASE_MS / len(pieces) + (DECODE_MS if is_decode else length * PREFILL_MS)
            shares[job.account] = shares.get(job.account, 0.0) + cost_ms
            aged_ms += cost_ms if job.is_aged else 0.0
        step_ms = sum(shares.values())
        noise = self.rng.uniform(0.8, 1.1)
        charge = self.book.charge({account: ms * noise for account, ms in shares.items()}, self.now_s)
        self.aging.add(step_ms, aged_ms)
        for account, ms in shares.items():
            self.service_ms[account] = self.service_ms.get(account, 0.0) + ms
        self.now_s += 1e-3 * step_ms if pieces else 1e-3
        for before, measured_ms in self._unsettled:
            self.book.settle(before, measured_ms, self.now_s)
        self._unsettled = [(charge, step_ms)]
        for job, length, _ in pieces:
            job.computed += length
            job.since_resume += length
            if job.computed >= job.prompt + job.outputs:
                self.end(job)
                self.finished += 1
            elif not job.prompt_left and job.seq in self.queue:
                self.queue.remove(job.seq, self.now_s)


class GapMeter:
    """Measures the largest |dS_i/w_i - dS_j/w_j| over intervals in which both tenants always had dispatchable work.

    `widest` is the largest ratio of a pair's gap to the pair's bound.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._ranges: dict[tuple[TenantId, TenantId], tuple[float, float]] = {}
        self.largest_ms = self.widest = 0.0

    def look(self) -> None:
        ready = self._machine.ready()
        served, weights = self._machine.book.served_ms, self._machine.weights
        for pair in combinations(sorted(weights), 2):
            first, second = pair
            if first not in ready or second not in ready:
                self._ranges.pop(pair, None)
                continue
            gap = served.get(first, 0.0) / weights[first] - served.get(second, 0.0) / weights[second]
            low, high = self._ranges.get(pair, (gap, gap))
            low, high = min(low, gap), max(high, gap)
            self._ranges[pair] = (low, high)
            self.largest_ms = max(self.largest_ms, high - low)
            bound_ms = sum(self._machine.limits.lead_ms(weights[name]) for name in pair)
            self.widest = max(self.widest, (high - low) / bound_ms)


class Schemer:
    """A tenant that tries to get more than its share, in a way that depends on its mood."""

    MOODS = ("flood", "hog", "giant", "pulse", "shy", "late", "trickle", "settle", "idle")

    def __init__(
        self, tenant: str, rng: random.Random, moods: tuple[str, ...] = MOODS, first: str = "", first_s: float = 0.0
    ) -> None:
        self.tenant = tenant
        self._rng = rng
        self._moods = moods
        self._mood = first or rng.choice(moods)
        self._until_s = first_s or rng.expovariate(1 / _MOOD_S)

    def act(self, machine: Machine) -> None:
        rng, mine = self._rng, machine.waiting(self.tenant)
        if machine.now_s >= self._until_s:
            self._mood = rng.choice(self._moods)
            self._until_s = machine.now_s + rng.expovariate(1 / _MOOD_S)
        match self._mood:
            case "flood":  # always has small requests that wait
                for _ in range(mine, 3):
                    machine.submit(self.tenant, rng.randint(1, 200), rng.randint(1, 10), rng.randint(1, 8))
            case "hog":  # keeps rows for long
                for _ in range(mine, 2):
                    machine.submit(self.tenant, rng.randint(1, 8), rng.randint(50, 2000), rng.randint(1, 4))
            case "giant":  # its requests need the whole machine
                if not mine:
                    machine.submit(self.tenant, rng.randint(50, 400), rng.randint(1, 50), machine.blocks)
                    machine.submit(self.tenant, rng.randint(50, 400), rng.randint(1, 50), machine.blocks)
            case "pulse":  # sudden bursts
                if not mine and rng.random() < 0.01:
                    for _ in range(rng.randint(1, 12)):
                        machine.submit(self.tenant, rng.randint(1, 300), rng.randint(1, 100), rng.randint(1, 16))
            case "shy":  # aborts before the patience is over
                if not mine:
                    machine.submit(self.tenant, 100, 10, machine.blocks, abort_s=rng.uniform(0.01, 0.12))
            case "late":  # waits without being dispatchable
                if not mine:
                    machine.submit(self.tenant, rng.randint(1, 100), 20, 4, deferred_s=rng.uniform(0.05, 3))
            case "settle":  # runs without waiting requests
                if not mine and machine.num_free_rows > machine.rows // 3:
                    machine.submit(self.tenant, 1, rng.randint(50, 2000))
            case "trickle":  # one request at a time
                if not mine and rng.random() < 0.2:
                    machine.submit(self.tenant, rng.randint(1, 20), rng.randint(1, 40))
            case _:
                pass


def widest_gap(
    seed: int, steps: int, open_book: BookMaker = TenantBook, open_rules: RulesMaker = PreemptionRules
) -> float:
    """Return the largest gap that the schemers of a seed reach, relative to its bound: above 1 the bound is broken."""
    rng = random.Random(seed)
    names = [f"t{number}" for number in range(rng.randint(2, 5))]
    machine = Machine(
        {name: rng.choice([0.5, 1.0, 1.0, 2.0, 4.0]) for name in names},
        rows=rng.choice([4, 8]),
        blocks=rng.choice([24, 64]),
        seed=seed,
        open_book=open_book,
        open_rules=open_rules,
        starve_s=rng.choice([1.0, 30.0]),
        patience_s=rng.choice([0.1, 1.0]),
    )
    always = ("hog", "giant", "settle")  # moods of the first two tenants, which nearly always have waiting requests
    alone_s = rng.choice([0.0, 10.0])  # the first tenant has the machine to itself until the others begin
    schemers: list[Schemer] = []
    for number, name in enumerate(names):
        first = "" if not alone_s else "idle" if number else "settle"
        schemers.append(Schemer(name, rng, always if number < 2 else Schemer.MOODS, first, alone_s))
    meter = GapMeter(machine)
    for number in range(steps):
        for schemer in schemers:
            schemer.act(machine)
        meter.look()
        machine.step()
        meter.look()
        if number % 500 == 0:
            machine.book.check_integrity()
            machine.queue.check_integrity()
    return meter.widest
