"""Context switches under changing priorities: the FastSwitch replay on the simulated machine, in virtual time.

    python benchmarks/fastswitch.py [--seed 2] [--conversations 100] [--jobs 1] [--json FILE] [--quick]

The loop, the planner and the cache manager are the real ones; the machine computes and copies in virtual time and
checks every KV row that a step reads. Conversations of several turns arrive while their priorities, drawn in advance,
change every 25 or 50 steps; the device tier holds 40 % of the open conversations. Three builds of the same code and
the single ablations between them replay the same trace:

    full       neighbouring blocks are copied together, beside steps; copies below are kept, and written in idle time
    one by one every block is copied by itself
    sync       no step runs during a copy
    no reuse   a copy below is dropped when it is restored, and nothing is written in advance
    all off    all three switched off

Columns:

    swapped    bytes from HBM to DDR, including write-back in idle time
    idle       share of the time in which requests waited for copies and no step ran
    preempt.   preemptions
    copy       mean size of a copy between HBM and DDR
    TTFT, TBT  from a turn's arrival to its first token; between two tokens of a turn, with waits after a preemption

The targets are those of the default load. `--quick` contends less for the device tier and misses the one for TTFT.

Every token of every build is compared with the expected one. Exit status 1: a target is missed, or a check of `full`
is also met by the build without the mechanism in question.

No time here is measured: `benchmarks/fastswitch_wall.py` runs such conversations on a real engine.

Source: FastSwitch (arXiv 2411.18424): conversations of 5.5 turns on average, Poisson arrivals, priorities drawn offline
        in two patterns, updated 0.02 and 0.04 times per iteration, 60 GB of host memory. Its 1 request/s is for an
        A10 (600 GB/s); here it is 6 conversations/s, because the machine is 7 times as fast.
Lengths: means of ShareGPT, 161 tokens per question and 338 per answer (PagedAttention, arXiv 2309.06180, figure 11).
Speed:   one H200 and an 8B model, 131,072 bytes of KV per token in bfloat16: 16 GB of weights at 4.3 TB/s, 26.8 us to
         compute a token without context and 40.7 us after 32,768 tokens (600 TFLOPS); PCIe 5 at 50 GB/s each way.
"""

import argparse
import itertools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.checks import missed_checks
from benchmarks.fastswitch_replay import (
    ALL_OFF,
    BLOCK_TOKENS,
    BUILDS,
    FULL,
    MAX_IDLE,
    MIN_COPY_BLOCKS,
    NO_REUSE,
    TOKEN_BYTES,
    Build,
    Replay,
    Result,
    budget_blocks,
    endless,
)
from benchmarks.fastswitch_trace import FREQUENCIES, PATTERNS, Pattern, conversations, priorities

MAX_SWAPPED = 0.55  # of the bytes without reuse
MIN_GAIN = 1.4  # ratio of both latencies, all off over full


@dataclass(frozen=True, slots=True)
class Job:
    """One replay to run."""

    build: Build
    pattern: Pattern
    frequency: float
    count: int
    seed: int
    blocks: int

    def run(self) -> Result:
        trace = conversations(self.count, self.seed)
        rows = priorities(self.pattern, len(trace), self.seed)
        return Replay(trace, self.build, self.blocks, rows, self.frequency).run()


def show(results: dict[str, Result]) -> list[str]:
    """Print one table. Return the targets that were missed."""
    full, off, fresh = results[FULL.name], results[ALL_OFF.name], results[NO_REUSE.name]
    print("                swapped restored   idle preempt.     copy TTFT p50     p99   TBT p50   p99.9 tokens/s")
    for name, one in results.items():
        columns = (
            f"{name:10s}",
            f"{one.swapped_bytes / 1e9:6.1f} GB",
            f"{one.restored_bytes / 1e9:5.1f} GB",
            f"{one.idle_s / one.wall_s:6.1%}",
            f"{one.preemptions:8d}",
            f"{one.copy_bytes / 2**20:4.1f} MiB",
            f"{one.ttft_p50_s:6.2f} s",
            f"{one.ttft_p99_s:5.2f} s",
            f"{1e3 * one.tbt_p50_s:6.1f} ms",
            f"{one.tbt_p999_s:5.2f} s",
            f"{one.tokens_per_s:8.0f}",
        )
        print(" ", *columns)
    swapped = full.swapped_bytes / max(fresh.swapped_bytes, 1)
    ttft, tbt = off.ttft_p99_s / full.ttft_p99_s, off.tbt_p999_s / full.tbt_p999_s
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES
    wrong = sum(one.wrong_turns for one in results.values())
    checks = (
        (f"swapped bytes, of those without reuse: {swapped:.0%} (at most {MAX_SWAPPED:.0%})", swapped <= MAX_SWAPPED),
        (f"idle: {full.idle_s / full.wall_s:.1%} (at most {MAX_IDLE:.0%})", full.is_rarely_idle),
        (f"idle, all off: {off.idle_s / off.wall_s:.1%} (control: more than {MAX_IDLE:.0%})", not off.is_rarely_idle),
        (f"TTFT p99, all off over full: {ttft:.2f} (at least {MIN_GAIN})", ttft >= MIN_GAIN),
        (f"TBT p99.9, all off over full: {tbt:.2f} (at least {MIN_GAIN})", tbt >= MIN_GAIN),
        (f"mean copy: {full.copy_bytes / block_bytes:.2f} blocks (at least {MIN_COPY_BLOCKS})", full.is_merged),
        (
            f"mean copy, all off: {off.copy_bytes / block_bytes:.2f} blocks (control: under {MIN_COPY_BLOCKS})",
            not off.is_merged,
        ),
        (f"turns with a lost or changed token: {wrong} of {sum(one.turns for one in results.values())}", not wrong),
    )
    return missed_checks(checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=2, help="2: a trace of 5.5 turns a conversation")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="replays at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one pattern, one frequency, 20 conversations")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    count = 20 if arguments.quick else arguments.conversations
    trace = conversations(count, arguments.seed)
    reference = endless(trace)
    blocks = budget_blocks(reference)
    turns = sum(len(talk.turns) for talk in trace)
    print(
        f"{len(trace)} conversations, {turns} turns, {reference.output_tokens} tokens to say; working set "
        f"{reference.peak_tokens * TOKEN_BYTES / 1e9:.1f} GB, device tier "
        f"{blocks * BLOCK_TOKENS * TOKEN_BYTES / 1e9:.1f} GB\n"
        f"with room for all: {reference.wall_s:.1f} s, {reference.tokens_per_s:.0f} tokens/s, TTFT p99 "
        f"{reference.ttft_p99_s:.2f} s, TBT p99.9 {1e3 * reference.tbt_p999_s:.1f} ms"
    )
    kinds: list[tuple[Pattern, float]] = list(itertools.product(PATTERNS, FREQUENCIES))
    kinds = kinds[-1:] if arguments.quick else kinds
    jobs = [
        Job(build, pattern, frequency, count, arguments.seed, blocks)
        for pattern, frequency in kinds
        for build in BUILDS
    ]
    results: list[Result] = []
    missed: list[str] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(arguments.jobs)) if arguments.jobs > 1 else None
        coming = iter(pool.map(Job.run, jobs) if pool else map(Job.run, jobs))
        for pattern, frequency in kinds:
            part = list(itertools.islice(coming, len(BUILDS)))
            print(f"\n{pattern}, {frequency} updates a step: {part[0].steps} steps")
            missed += show({one.build: one for one in part})
            sys.stdout.flush()
            results += part
    print(
        f"\n{sum(one.preemptions for one in results)} preemptions in {len(results)} replays, "
        f"{sum(one.wrong_turns for one in results)} turns with a changed token; {time.perf_counter() - began_s:.0f} s"
    )
    if arguments.json:
        rows = [
            {"pattern": job.pattern, "frequency": job.frequency, **asdict(one)}
            for job, one in zip(jobs, results, strict=True)
        ]
        facts = {"seed": arguments.seed, "blocks": blocks, "endless": asdict(reference), "replays": rows}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
