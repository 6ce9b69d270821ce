"""What the books of a step cost with many tenants and many waiting requests: milliseconds of processor time.

    python benchmarks/plan_scale.py [--tenants 1000] [--waiting 10000] [--steps 2000]

Each step refills, takes over who is eligible, draws the first 64 candidates, looks for starving work, admits and ends
some, charges the slices and settles the step before: all that fairness and the queue add to planning, no cache. A
refill gives quanta to every tenant at once and is the dearest step, so steps with one are listed by themselves.
"""

import argparse
import gc
import random
import statistics
import time
from itertools import islice

from scheduler.cost import Piece, StepCosts, linear_times
from scheduler.fairness import Account, Charge, TenantBook, fair_limits
from scheduler.queue import Fair, Waiting, WaitingQueue
from tiercel.ids import SeqId, TenantId

ROWS = 256


class Bench:
    """Books as the planner would use them, with slices that are made up."""

    def __init__(self, tenants: int, waiting: int, step_ms: float) -> None:
        self.rng = random.Random(0)
        self.tenants = [TenantId(f"tenant-{number}") for number in range(tenants)]
        self.costs = StepCosts(linear_times())
        weights = {tenant: self.rng.choice((0.5, 1.0, 2.0)) for tenant in self.tenants}
        self.book = TenantBook(fair_limits(step_ms), weights)
        self.queue = WaitingQueue(Fair(), self.book)
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
        self.queue.add(Waiting(SeqId(self.count), tenant, self.now_s, self.now_s, 0, 1.0, work_s), self.now_s)

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
        pieces = [Piece(account, 1, 800, True) for account in self.running.values()]
        for seq in admitted:
            self.admit(seq)
            pieces.append(Piece(self.running[seq], 64, 0, False))
        self.charges.append(self.book.charge(self.costs.share_ms(pieces), self.now_s))
        if len(self.charges) > 1:
            charge = self.charges.pop(0)
            self.book.settle(charge, 1.05 * charge.predicted_ms, self.now_s)


def row(name: str, times_ms: list[float]) -> str:
    if not times_ms:
        return f"{name:<24} none"
    ordered = sorted(times_ms)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{name:<24} {statistics.median(ordered):8.3f} {p99:8.3f} {ordered[-1]:8.3f} {len(ordered):7}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=0.2, help="longest step; small, so that refills are frequent")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
