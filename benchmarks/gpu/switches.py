"""The FastSwitch replay of `benchmarks/fastswitch.py`, in virtual time, with the measured speeds of copies.

Loop, planner and cache are real; the times of steps and copies follow the formulas of the replay.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks import fastswitch_replay, fastswitch_trace
from benchmarks.gpu.bench import Bench

CONVERSATIONS = 100
SEED = 2
PATTERN: fastswitch_trace.Pattern = "markov"
FREQUENCY = 0.04
BUILDS = (fastswitch_replay.FULL, fastswitch_replay.NO_REUSE, fastswitch_replay.ALL_OFF)


@dataclass(frozen=True, slots=True)
class Job:
    """A replay in a process of its own."""

    build: fastswitch_replay.Build
    conversations: int
    blocks: int
    copy_bytes_per_s: float

    def run(self) -> fastswitch_replay.Result:
        """Run it to its end."""
        trace = fastswitch_trace.conversations(self.conversations, SEED)
        rows = fastswitch_trace.priorities(PATTERN, len(trace), SEED)
        speed = self.copy_bytes_per_s
        return fastswitch_replay.Replay(trace, self.build, self.blocks, rows, FREQUENCY, copy_bytes_per_s=speed).run()


def run(bench: Bench, conversations: int = CONVERSATIONS) -> None:
    """Record `swapped_share`, `idle_share`, `ttft_gain`, `tbt_gain`; see the targets of the replay."""
    down, up = (bench.earlier(f"copies.both_{way}_groups") for way in ("down", "up"))
    is_measured = down is not None and up is not None
    speed = 1e9 * min(down, up) if down is not None and up is not None else fastswitch_replay.COPY_BYTES_PER_S
    if bench.is_quick:
        conversations //= 5
    blocks = fastswitch_replay.budget_blocks(
        fastswitch_replay.endless(fastswitch_trace.conversations(conversations, SEED))
    )
    jobs = [Job(build, conversations, blocks, speed) for build in BUILDS]
    with ProcessPoolExecutor(len(jobs)) as pool:
        full, fresh, off = pool.map(Job.run, jobs)
    wrong = sum(one.wrong_turns for one in (full, fresh, off))
    facts = {"gb_per_s": speed / 1e9, "is_measured_speed": is_measured, "is_virtual_time": True}
    bench.record("swapped_share", full.swapped_bytes / max(1, fresh.swapped_bytes), "", **facts)
    bench.record("idle_share", full.idle_s / full.wall_s, "", preemptions=full.preemptions, wrong_turns=wrong)
    bench.record("ttft_gain", off.ttft_p99_s / full.ttft_p99_s, "x")
    bench.record("tbt_gain", off.tbt_p999_s / full.tbt_p999_s, "x")
    if wrong:
        bench.fail("tokens", f"{wrong} turns said something else")
