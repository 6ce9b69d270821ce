"""CPU time of a step's books with many tenants and many waiting requests.

    python benchmarks/plan_scale.py [--tenants 1000] [--waiting 10000] [--steps 2000] [--real]

Each step refills, moves eligible tenants, draws the first 64 candidates, looks for starving sequences, admits and ends
some, charges the slices and settles the step before: the part of planning that fairness and the queue add, without the
cache. A refill gives quanta to every tenant at once and is the most expensive; steps with a refill are listed apart.

With --real the engine's own loop takes the steps, over the real planner and the ledger of the cache: prompts of a
tenant share a prefix, there are few blocks, and the machine only takes virtual time.

Exit code 1 if planning takes more than `--most-p99-ms` (5) at 99 %.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from itertools import islice

from tiercel.scheduler.account import Account
from tiercel.scheduler.cost import StepCosts, linear_times, work_by_payer
from tiercel.scheduler.fairness import Charge, TenantBook
from tiercel.scheduler.fairness_limits import fair_limits
from tiercel.scheduler.queue import WaitingQueue
from tiercel.scheduler.queue_order import FairOrder, WaitingSequence
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import PromptPart, SimRequest, Sources
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.tenant import TenantShare

ROWS = 256


class Bench:
    """The books of the planner, with invented slices."""

    def __init__(self, tenants: int, waiting: int, step_ms: float) -> None:
        self.rng = random.Random(0)
        self.tenants = [TenantId(f"tenant-{number}") for number in range(tenants)]
        self.costs = StepCosts(linear_times())
        weights = {tenant: self.rng.choice((0.5, 1.0, 2.0)) for tenant in self.tenants}
        self.book = TenantBook(fair_limits(step_ms), weights)
        self.queue = WaitingQueue(FairOrder(), self.book)
        self.running: dict[SeqId, Account] = {}
        self.runs: dict[Account, int] = {}
        self.now_s = 0.0
        self.count = 0
        self.charges: list[Charge] = []
        for _ in range(waiting):
            self.submit()
        self.book.refill(0.0)
        for seq in list(islice(self.queue.candidates(0.0), ROWS)):
            self.admit(seq)

    def submit(self) -> None:
        self.count += 1
        tenant = self.rng.choice(self.tenants)
        work_s = self.rng.expovariate(2.0)
        self.queue.add(WaitingSequence(SeqId(self.count), tenant, self.now_s, self.now_s, 0, 1.0, work_s), self.now_s)

    def admit(self, seq: SeqId) -> None:
        account = Account(0, self.queue[seq].tenant)
        self.running[seq] = account
        self.run(account, 1)
        self.queue.remove(seq, self.now_s)

    def run(self, account: Account, change: int) -> None:
        self.runs[account] = self.runs.get(account, 0) + change
        self.book.run(account, self.runs[account], self.now_s)

    def plan(self) -> list[SeqId]:
        self.book.refill(self.now_s)
        self.queue.refresh()
        self.queue.oldest(self.now_s, 30.0)
        return list(islice(self.queue.candidates(self.now_s), 64))

    def launch(self, admitted: list[SeqId]) -> None:
        for seq in list(islice(self.running, len(admitted))):
            self.run(self.running.pop(seq), -1)
        pieces = [(account, 1, 800) for account in self.running.values()]
        for seq in admitted:
            self.admit(seq)
            pieces.append((self.running[seq], 64, 0))
        self.charges.append(self.book.charge(self.costs.share_ms(work_by_payer(pieces)), self.now_s))
        if len(self.charges) > 1:
            charge = self.charges.pop(0)
            self.book.settle(charge, 1.05 * charge.predicted_ms, self.now_s)


class Real:
    """The whole loop with all rows in use and a queue of constant length."""

    def __init__(self, tenants: int, waiting: int) -> None:
        self.rng = random.Random(0)
        self.sources = Sources()
        self.shares = [
            TenantShare(name=TenantId(f"tenant-{number}"), weight=self.rng.choice((0.5, 1.0, 2.0)))
            for number in range(tenants)
        ]
        settings = SimSettings(blocks=8192, max_num_seqs=ROWS, max_num_batched_tokens=2048)
        self.simulation = Simulation(settings, self.shares)
        self.waiting = waiting
        self.plans: list[float] = []
        self.fill()

    def fill(self) -> None:
        """Submit requests up to the wanted length of the queue."""
        while len(self.simulation.book.waiting) < self.waiting:
            share = self.rng.choice(self.shares)
            prefix = PromptPart(self.sources.named(share.name), 128)
            own = PromptPart(self.sources.new(), self.rng.randint(16, 800))
            outputs = self.rng.randint(8, 200)
            self.simulation.submit(SimRequest(self.simulation.now_s, share.name, (prefix, own), outputs))

    def step(self) -> tuple[float, float]:
        """Return the milliseconds of planning alone, on a discarded ledger, and of the whole step."""
        simulation = self.simulation
        begun_s = time.thread_time()
        ledger = simulation.cache.ledger()
        simulation.planner.plan(ledger, simulation.now_s)
        planned_s = time.thread_time()
        simulation.step()
        ended_s = time.thread_time()
        self.fill()
        return 1e3 * (planned_s - begun_s), 1e3 * (ended_s - planned_s)


def run_real(tenants: int, waiting: int, steps: int, most_p99_ms: float) -> int:
    """Time steps of the engine's own loop. Return the exit code."""
    real = Real(tenants, waiting)
    for _ in range(100):
        real.step()
    gc.collect()
    gc.freeze()
    times = [real.step() for _ in range(steps)]
    book = real.simulation.book
    preempted = book.preemption_counts.total
    print(f"{tenants} tenants, {len(book.waiting)} waiting, {len(book.running)} running, {preempted} preempted")
    print(f"{'milliseconds':<24} {'median':>8} {'p99':>8} {'max':>8} {'steps':>7}")
    plans = [plan_ms for plan_ms, _ in times]
    print(row("plan with the ledger", plans))
    print(row("whole step of the loop", [step_ms for _, step_ms in times]))
    return int(p99_of(plans) > most_p99_ms)


def p99_of(times_ms: list[float]) -> float:
    """Return the 99th percentile, 0 of nothing."""
    ordered = sorted(times_ms)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def row(name: str, times_ms: list[float]) -> str:
    if not times_ms:
        return f"{name:<24} none"
    spread = f"{statistics.median(times_ms):8.3f} {p99_of(times_ms):8.3f} {max(times_ms):8.3f}"
    return f"{name:<24} {spread} {len(times_ms):7}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=0.2, help="longest step; small, so that refills are frequent")
    parser.add_argument("--real", action="store_true", help="the engine's loop, planner and ledger")
    parser.add_argument("--most-p99-ms", type=float, default=5.0, help="of planning, steps with a refill included")
    args = parser.parse_args()
    if args.real:
        return run_real(args.tenants, args.waiting, args.steps, args.most_p99_ms)
    bench = Bench(args.tenants, args.waiting, args.step_ms)
    gc.freeze()
    plans: list[float] = []
    refills: list[float] = []
    launches: list[float] = []
    for _ in range(args.steps):
        refills_before = bench.book.num_refills
        begun_s = time.thread_time()
        drawn = bench.plan()
        planned_s = time.thread_time()
        bench.launch(drawn[:4])
        ended_s = time.thread_time()
        (plans if bench.book.num_refills == refills_before else refills).append(1e3 * (planned_s - begun_s))
        launches.append(1e3 * (ended_s - planned_s))
        bench.now_s += 0.03
        for _ in range(4):
            bench.submit()
    print(f"{args.tenants} tenants, {len(bench.queue)} waiting, {len(bench.running)} running")
    print(f"{'milliseconds':<24} {'median':>8} {'p99':>8} {'max':>8} {'steps':>7}")
    print(row("plan, draw 64", plans))
    print(row("plan with a refill", refills))
    print(row("admit, charge, settle", launches))
    return int(p99_of(plans + refills) > args.most_p99_ms)


if __name__ == "__main__":
    sys.exit(main())
