"""What the scheduler promises, and what it keeps: the real loop, planner and books in virtual time.

    python benchmarks/fairness.py [--seeds 20] [--steps 5000] [--only bound,weights,...]

Every line is a promise, its target, and what was measured. Virtual time: no figure depends on the machine.
"""

import argparse
import time
from collections.abc import Callable

from simulation.adversary import widest_gap
from simulation.scenario import mixed, overload, returning, saturating, shared_prefixes, waits


def bound(seeds: int, steps: int) -> str:
    parts = [widest_gap(seed, steps) for seed in range(seeds)]
    return f"largest gap {max(parts):.2f} of the bound ({seeds} seeds x {steps} steps, target <= 1)"


def weights() -> str:
    shares = saturating((1.0, 3.0), seconds=90.0, window_s=60.0)
    low, high = 4 * min(shares.parts), 4 * max(shares.parts)
    return f"{low:.3f} to {high:.3f} of its share in any 60 s (target 0.95 to 1.05), {shares.preemptions} preemptions"


def back() -> str:
    parts = returning().parts
    return f"{100 * min(parts):.1f} to {100 * max(parts):.1f} % (target 50 +- 3)"


def prefixes() -> str:
    fair, yardstick = shared_prefixes(seconds=30.0), shared_prefixes(seconds=30.0, is_yardstick=True)
    part = fair.hit_rate / yardstick.hit_rate
    return f"{100 * part:.1f} % of longest-prefix-match's hits, {100 * yardstick.hit_rate:.1f} % (target >= 95)"


def throughput() -> str:
    fair, first_come = mixed("fair"), mixed("fcfs")
    part = first_come.virtual_s / fair.virtual_s
    return (
        f"{100 * part:.1f} % of fcfs on the same trace (target >= 98), Jain {fair.jain:.3f}, {first_come.jain:.3f},"
        f" preemptions {fair.preemptions}"
    )


def goals() -> str:
    found = overload()
    kept = ", ".join(f"{one.name} {100 * one.ttft_kept:.1f} %" for one in found.tenants if one.ttft_kept is not None)
    batch = found.tenants[-1]
    return f"{kept} within the TTFT goal (target >= 95); batch finished {batch.finished} of {batch.requests}"


def starvation() -> str:
    last = waits(seconds=80.0).tenants[1]
    return f"longest wait behind a higher band without end {last.starved_s:.1f} s, finished {last.finished} of 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    promises: dict[str, Callable[[], str]] = {
        "bound": lambda: bound(args.seeds, args.steps),
        "weights": weights,
        "back": back,
        "prefixes": prefixes,
        "throughput": throughput,
        "goals": goals,
        "starvation": starvation,
    }
    for name in args.only.split(",") if args.only else promises:
        began_s = time.process_time()
        print(f"{name:<12} {promises[name]()}  [{time.process_time() - began_s:.0f} s of processor time]", flush=True)


if __name__ == "__main__":
    main()
