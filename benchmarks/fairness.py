"""The guarantees of the scheduler and the measured values: the real loop, planner and books in virtual time.

    python benchmarks/fairness.py [--seeds 20] [--steps 5000] [--only bound,weights,...]

Every line shows a guarantee, its target and the measured value. In virtual time no figure depends on the machine.
Exit code 1 if a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable

from benchmarks.scenarios.adversary import widest_gap
from benchmarks.scenarios.mixes import (
    run_long_prompts,
    run_mixed,
    run_overload,
    run_returning,
    run_saturated,
    run_shared_prefixes,
    run_waiting,
)
from benchmarks.scenarios.progress import draw_mix, play

Verdict = tuple[str, bool]
"""What was measured beside its target, and whether the target is reached."""


def bound(seeds: int, steps: int) -> Verdict:
    parts = [widest_gap(seed, steps) for seed in range(seeds)]
    return f"largest gap {max(parts):.2f} of the bound ({seeds} seeds x {steps} steps, target <= 1)", max(parts) <= 1


def weights() -> Verdict:
    shares = run_saturated((1.0, 3.0), seconds=90.0, window_s=60.0)
    low, high = 4 * min(shares.parts), 4 * max(shares.parts)
    text = f"{low:.3f} to {high:.3f} of its share in any 60 s (target 0.95 to 1.05), {shares.preemptions} preemptions"
    return text, low >= 0.95 and high <= 1.05


def back() -> Verdict:
    parts = run_returning().parts
    is_kept = min(parts) >= 0.47 and max(parts) <= 0.53
    return f"{100 * min(parts):.1f} to {100 * max(parts):.1f} % (target 50 +- 3)", is_kept


def prefixes() -> Verdict:
    fair, yardstick = run_shared_prefixes(seconds=30.0), run_shared_prefixes(seconds=30.0, is_yardstick=True)
    part = fair.hit_rate / yardstick.hit_rate
    text = f"{100 * part:.1f} % of longest-prefix-match's hits, {100 * yardstick.hit_rate:.1f} % (target >= 95)"
    return text, part >= 0.95


def throughput() -> Verdict:
    fair, first_come = run_mixed("fair"), run_mixed("fcfs")
    part = first_come.virtual_s / fair.virtual_s
    text = (
        f"{100 * part:.1f} % of fcfs on the same trace (target >= 98), Jain {fair.jain:.3f}, {first_come.jain:.3f},"
        f" preemptions {fair.preemptions}"
    )
    return text, part >= 0.98


def goals() -> Verdict:
    found = run_overload()
    parts = {one.name: one.ttft_kept for one in found.tenants if one.ttft_kept is not None}
    kept = ", ".join(f"{name} {100 * part:.1f} %" for name, part in parts.items())
    batch = found.tenants[-1]
    text = f"{kept} within the TTFT goal (target >= 95); batch finished {batch.finished} of {batch.requests}"
    return text, bool(parts) and min(parts.values()) >= 0.95


def starvation() -> Verdict:
    last = run_waiting(seconds=80.0).tenants[1]
    text = f"longest wait behind a higher band without end {last.starved_s:.1f} s, finished {last.finished} of 1"
    return text, last.finished == 1


def long() -> Verdict:
    first_come = run_long_prompts("fcfs").useful_tokens_per_s
    alone, with_ddr = (run_long_prompts("fair", host_blocks=blocks) for blocks in (0, 65_536))
    parts = alone.useful_tokens_per_s / first_come, with_ddr.useful_tokens_per_s / first_come
    text = (
        f"six tenants with prompts of 100,000 tokens: useful tokens/s {100 * parts[0]:.1f} % of fcfs without DDR"
        f" (target >= 90), {100 * parts[1]:.1f} % with it (target >= 97); fcfs {first_come:,.0f}"
    )
    return text, parts[0] >= 0.9 and parts[1] >= 0.97


def progress(seeds: int) -> Verdict:
    worst: dict[str, float] = {"fair": 1e9, "priority": 1e9}
    tokens = dict(worst)
    repeated, ended = 0.0, True
    for seed in range(seeds):
        mix = draw_mix(seed, 2000)
        first_come = play(mix, "fcfs", 2000)
        for policy in ("fair", "priority"):
            found = play(mix, policy, 2000, first_come.until_s)
            worst[policy] = min(worst[policy], found.useful_ms / first_come.useful_ms)
            tokens[policy] = min(tokens[policy], found.useful_tokens / first_come.useful_tokens)
            repeated, ended = max(repeated, found.worst_window), ended and found.ended == len(mix.requests)
    text = (
        f"{seeds} random mixes: at least {100 * worst['fair']:.1f} % (fair), {100 * worst['priority']:.1f} % (priority)"
        f" of the work of fcfs in the time of its 2,000 steps (target >= 85; tokens after 2,000 steps of their own"
        f" {100 * tokens['fair']:.1f} %, {100 * tokens['priority']:.1f} %);"
        f" repeated at most {100 * repeated:.1f} % of 1,000 steps (target <= 10)"
    )
    return text, min(worst.values()) >= 0.85 and repeated <= 0.1 and ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    guarantees: dict[str, Callable[[], Verdict]] = {
        "bound": lambda: bound(args.seeds, args.steps),
        "weights": weights,
        "back": back,
        "prefixes": prefixes,
        "throughput": throughput,
        "goals": goals,
        "starvation": starvation,
        "long": long,
        "progress": lambda: progress(args.seeds),
    }
    missed = 0
    for name in args.only.split(",") if args.only else guarantees:
        began_s = time.process_time()
        text, is_kept = guarantees[name]()
        spent_s = time.process_time() - began_s
        print(f"{name:<12} {text}  [{spent_s:.0f} s of processor time]{'' if is_kept else '  MISSED'}", flush=True)
        missed += not is_kept
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
