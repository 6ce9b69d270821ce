"""Context switches under changing priorities: the FastSwitch replay on the simulated machine, in virtual time.

    python benchmarks/fastswitch.py [--seed 2] [--conversations 100] [--jobs 1] [--json FILE] [--quick]

The loop, the planner and the cache manager are the real ones; the machine computes and copies in virtual time and
checks every KV row that a step reads. Conversations of several turns arrive while their priorities, drawn in advance,
change every 25 or 50 steps; the device tier holds 40 % of what is open. Three builds of the same code and the single
ablations between them replay the same trace:

    full       neighbours are one copy, copies run beside steps, copies below are kept and written in idle time
    one by one every block is its own copy
    sync       no step runs while a copy does
    no reuse   a copy below is dropped when it was restored, and nothing is written before it must be
    all off    none of the three

Columns:

    swapped    bytes from HBM to DDR, those of write-back in idle time included
    idle       share of the time in which requests waited for copies and no step ran
    preempt.   preemptions
    copy       mean size of a copy between HBM and DDR
    TTFT, TBT  from a turn's arrival to its first token; between two tokens of a turn, waits after preemption included

Every token of every build is compared with what the model must say. Exit status 1: a target was missed, or a check of
`full` is also met by the build without the mechanism that it is about, so that it could not fail.

No second here is a measured one: `benchmarks/fastswitch_wall.py` runs such conversations on a real engine.

Source: FastSwitch (arXiv 2411.18424): conversations of 5.5 turns on average, Poisson arrivals, priorities made offline
        after two patterns, updated 0.02 and 0.04 times an iteration, 60 GB of host memory. Its 1 request/s is for an
        A10 (600 GB/s); here it is 6 conversations/s, for the machine is 7 times as fast.
Lengths: means of ShareGPT, 161 tokens a question and 338 an answer (PagedAttention, arXiv 2309.06180, figure 11).
Speed:   one H200 and an 8B model, 131,072 bytes of KV a token in bfloat16: 16 GB of weights at 4.3 TB/s, 26.8 us to
         compute a token without context and 40.7 us behind 32,768 tokens (600 TFLOPS); PCIe 5 at 50 GB/s each way.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tiercel.clock import ManualClock
from tiercel.device.sim import SimMachine, expected_outputs
from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.engine.loop import EngineLoop
from tiercel.ids import SeqId
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.plan import Slice
from tiercel.rates import Rates
from tiercel.request import Request, SamplingParams
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.tier import Route
from tiercel.wire import Report, Submit

# ---- the machine

BLOCK_TOKENS = 16
TOKEN_BYTES = 131_072  # 32 layers, 8 KV heads of 128, keys and values, bfloat16
WEIGHTS_S = 16e9 / 4.3e12  # to read all weights once
KV_BYTES_PER_S = 4.3e12
TOKEN_S = 26.8e-6  # to compute a token without context
CONTEXT_S = (40.7e-6 - 26.8e-6) / 32_768  # more for each token of context
COPY_BYTES_PER_S = 50e9  # each way between host and device
HOST_BYTES = 60e9
DISK_BYTES = 120e9
MAX_NUM_SEQS = 256
MAX_STEP_TOKENS = 2048
VOCAB = 97

# ---- the work

MOST_TURNS = 16
TURN_DECAY = 0.8563  # so that the mean is 5.5
QUESTION_TOKENS = 161  # mean
ANSWER_TOKENS = 338  # mean
CONVERSATIONS_PER_S = 6.0
THINK_S = 1.0  # mean, from the end of an answer to the next question
MAX_MODEL_LEN = 8192
BUDGET_SHARE = 0.4  # of the working set
BANDS = 100
MARKOV_KEEP = 0.7
MOST_IDLE_STEPS = 100
SERVED_SHARE = 0.4  # the upper part of the priorities: what the device tier has room for

Pattern = Literal["random", "markov"]
PATTERNS: tuple[Pattern, ...] = ("random", "markov")
FREQUENCIES = (0.02, 0.04)

# ---- targets

MOST_SWAPPED = 0.55  # of the bytes without reuse
MOST_IDLE = 0.01
LEAST_GAIN = 1.4  # over all off, of both latencies
LEAST_COPY_BLOCKS = 1.2  # on average: one by one every copy is a block


def h200_step_s(slices: Sequence[Slice]) -> float:
    """Weights are read while tokens are computed, whichever takes longer; then the KV of the context is read."""
    compute_s = sum(piece.length * (TOKEN_S + CONTEXT_S * (piece.start + piece.length / 2)) for piece in slices)
    context = sum(piece.start + piece.length for piece in slices)
    return max(WEIGHTS_S, compute_s) + context * TOKEN_BYTES / KV_BYTES_PER_S


# ---- traces


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and how long its answer is."""

    question: "array[int]"
    answer_tokens: int
    think_s: float  # before it is asked


@dataclass(frozen=True, slots=True)
class Conversation:
    """Each turn's prompt is all that was said before and its question."""

    arrival_s: float
    turns: tuple[Turn, ...]


def conversations(count: int, seed: int, scale: float = 1.0) -> list[Conversation]:
    """Geometric numbers of turns, log-normal lengths, exponential pauses. `scale`: of all lengths and pauses."""
    rng = random.Random(seed)
    found: list[Conversation] = []
    arrival_s = 0.0
    for _ in range(count):
        arrival_s += scale * rng.expovariate(CONVERSATIONS_PER_S)
        turns: list[Turn] = []
        tokens = 0
        for _ in range(rng.choices(range(1, MOST_TURNS + 1), [TURN_DECAY**number for number in range(MOST_TURNS)])[0]):
            question = _length(rng, scale * QUESTION_TOKENS, 1.2)
            answer = _length(rng, scale * ANSWER_TOKENS, 0.9)
            tokens += question + answer
            if tokens > MAX_MODEL_LEN:
                break
            words = array("I", [rng.randrange(VOCAB) for _ in range(question)])
            turns.append(Turn(words, answer, scale * rng.expovariate(1 / THINK_S) if turns else 0.0))
        if turns:
            found.append(Conversation(arrival_s, tuple(turns)))
    return found


def _length(rng: random.Random, mean: float, sigma: float) -> int:
    return min(max(int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), 4), 2048)


def priorities(pattern: Pattern, count: int, seed: int) -> Iterator[list[float]]:
    """One row an update: a priority in [0, 1) for each conversation, higher is more urgent.

    Random draws all of them anew. Markov keeps seven of ten; the others are drawn with a weight that falls with the
    updates since the conversation was last among the most urgent. Nothing here depends on how a replay goes.
    """
    rng = random.Random(f"{pattern} {seed}")
    row = [rng.random() for _ in range(count)]
    unserved = [0] * count  # updates
    while True:
        yield row
        if pattern == "random":
            row = [rng.random() for _ in range(count)]
            continue
        unserved = [
            0 if priority >= 1 - SERVED_SHARE else since + 1 for priority, since in zip(row, unserved, strict=True)
        ]
        row = [
            priority if rng.random() < MARKOV_KEEP else rng.random() ** (1 + since)
            for priority, since in zip(row, unserved, strict=True)
        ]


# ---- replay


@dataclass(frozen=True, slots=True)
class Build:
    """The parts of swapping that an arm of the benchmark has switched on."""

    name: str
    merges: bool = True
    is_async: bool = True
    has_reuse: bool = True


FULL = Build("full")
NO_REUSE = Build("no reuse", has_reuse=False)
ALL_OFF = Build("all off", merges=False, is_async=False, has_reuse=False)
BUILDS = (FULL, Build("one by one", merges=False), Build("sync", is_async=False), NO_REUSE, ALL_OFF)


@dataclass(frozen=True, slots=True)
class Result:
    """One replay in numbers. Seconds are virtual."""

    build: str
    wall_s: float
    steps: int
    turns: int
    output_tokens: int
    wrong_turns: int  # that did not say exactly what they had to
    preemptions: int
    swapped_bytes: int
    restored_bytes: int
    copies: int  # on both routes
    idle_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p999_s: float
    recomputed_tokens: int
    peak_tokens: int  # of all conversations that had begun and not ended
    real_s: float

    @property
    def copy_bytes(self) -> float:
        """Mean size of a copy."""
        return (self.swapped_bytes + self.restored_bytes) / max(self.copies, 1)

    @property
    def is_rarely_idle(self) -> bool:
        """The share of idle time is within the target."""
        return self.idle_s <= MOST_IDLE * self.wall_s

    @property
    def is_merged(self) -> bool:
        """Copies are larger than a block, on average."""
        return self.copy_bytes >= LEAST_COPY_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


class Replay:
    """One build on one trace, and all clients of it."""

    def __init__(
        self,
        trace: Sequence[Conversation],
        build: Build,
        blocks: int,
        rows: Iterator[list[float]],
        frequency: float,
        step_tokens: int = MAX_STEP_TOKENS,
        copy_bytes_per_s: float = COPY_BYTES_PER_S,
    ) -> None:
        self.build = build
        self.clock = ManualClock()
        rates = SimRates(
            block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
            spill_bytes_per_s=copy_bytes_per_s,
            restore_bytes_per_s=copy_bytes_per_s,
            merges=build.merges,
            is_async=build.is_async,
        )
        known = Rates(
            bytes_per_s_by_route={
                Route.SPILL: rates.spill_bytes_per_s,
                Route.RESTORE: rates.restore_bytes_per_s,
                Route.PERSIST: rates.disk_write_bytes_per_s,
                Route.PREFETCH: rates.disk_read_bytes_per_s,
            },
            prefill_token_s=TOKEN_S,
            prefill_context_s=CONTEXT_S,
            block_bytes=rates.block_bytes,
            block_size=BLOCK_TOKENS,
        )
        self.book = SequenceBook(open_policy("priority"), MAX_MODEL_LEN, ())
        self.cache = CacheManager(
            blocks,
            BLOCK_TOKENS,
            b"fastswitch",
            host_blocks=int(HOST_BYTES / rates.block_bytes),
            disk_blocks=int(DISK_BYTES / rates.block_bytes),
            rates=lambda: known,
            limits=TierLimits(always_loads=True, has_reuse=build.has_reuse, has_write_back=build.has_reuse),
        )
        self.machine = SimMachine(self.book, BLOCK_TOKENS, VOCAB, self.clock, MAX_NUM_SEQS + 1, h200_step_s)
        self.mover = SimMover(self.machine, self.clock, has_host=True, rates=rates)
        planner = Planner(self.book, StepLimits(MAX_NUM_SEQS, step_tokens), SwapChooser("swap", lambda: known))
        self.loop = EngineLoop(self.book, self.cache, planner, self.machine, self, self.clock, 1, self.mover)
        self.trace = trace
        self.rows = rows
        self.row: list[float] = next(rows)
        self.frequency = frequency
        self.updates = 0
        self.steps = 0
        self.idle_s = 0.0
        self.num_idle = 0  # steps in a row that did nothing, with nothing to wait for
        self.due = [(talk.arrival_s, number) for number, talk in enumerate(trace)]  # heap: next turns
        heapq.heapify(self.due)
        self.histories = [array("I") for _ in trace]
        self.next_turns = [0] * len(trace)
        self.talk_by_seq: dict[SeqId, int] = {}
        self.request_by_seq: dict[SeqId, Request] = {}
        self.said_by_seq: dict[SeqId, list[int]] = {}
        self.spoke_s: dict[SeqId, float] = {}  # when it said its last token
        self.waits_s: list[float] = []  # to the first token
        self.gaps_s: list[float] = []  # between tokens
        self.num_turns = 0
        self.num_wrong = 0
        self.open_tokens = 0
        self.peak_tokens = 0

    def run(self) -> Result:
        """Everything is asked and answered."""
        began_s = time.perf_counter()
        while self.due or not self.loop.is_idle:
            self.ask()
            if self.loop.step():
                self.steps += 1
                if int(self.steps * self.frequency) > self.updates:
                    self.updates += 1
                    self.change_priorities()
            else:
                self.pass_time()
        bytes_by_route, copies_by_route = self.mover.bytes_by_route, self.mover.copies_by_route
        return Result(
            build=self.build.name,
            wall_s=self.clock.now_s(),
            steps=self.steps,
            turns=self.num_turns,
            output_tokens=len(self.waits_s) + len(self.gaps_s),
            wrong_turns=self.num_wrong,
            preemptions=self.book.num_preemptions,
            swapped_bytes=bytes_by_route[Route.SPILL],
            restored_bytes=bytes_by_route[Route.RESTORE],
            copies=copies_by_route[Route.SPILL] + copies_by_route[Route.RESTORE],
            idle_s=self.idle_s + self.mover.stalled_s,
            ttft_p50_s=percentile(self.waits_s, 0.5),
            ttft_p99_s=percentile(self.waits_s, 0.99),
            tbt_p50_s=percentile(self.gaps_s, 0.5),
            tbt_p999_s=percentile(self.gaps_s, 0.999),
            recomputed_tokens=self.book.recomputed_tokens,
            peak_tokens=self.peak_tokens,
            real_s=time.perf_counter() - began_s,
        )

    def ask(self) -> None:
        """Send the turns that are due."""
        while self.due and self.due[0][0] <= self.clock.now_s():
            due_s, talk = heapq.heappop(self.due)
            turn = self.trace[talk].turns[self.next_turns[talk]]
            self.next_turns[talk] += 1
            self.histories[talk].extend(turn.question)
            seq = SeqId(len(self.talk_by_seq) + 1)
            request = Request(
                id=seq,
                prompt=self.histories[talk].tobytes(),
                params=SamplingParams(temperature=0.0, max_tokens=turn.answer_tokens, ignore_eos=True),
                arrival_s=due_s,
                band=self.band(talk),
            )
            self.talk_by_seq[seq] = talk
            self.request_by_seq[seq] = request
            self.said_by_seq[seq] = []
            self.open_tokens += len(turn.question)
            self.loop.take([Submit(request)])

    def band(self, talk: int) -> int:
        return int(BANDS * (1 - self.row[talk]))

    def change_priorities(self) -> None:
        self.row = next(self.rows)
        for seq in self.said_by_seq:
            band = self.band(self.talk_by_seq[seq])
            if band != self.book[seq].band:
                self.book.move(seq, band, self.clock.now_s())

    def pass_time(self) -> None:
        """Nothing can be computed until something lands or somebody asks."""
        times = [self.due[0][0]] if self.due else []
        landing_s = self.mover.next_landing_s
        if landing_s is not None:
            times.append(landing_s)
        if not times:
            self.num_idle += 1
            if self.num_idle > MOST_IDLE_STEPS:
                raise RuntimeError(f"{self.build.name}: unfinished work, nothing on its way, and steps that do nothing")
            return
        self.num_idle = 0
        before_s = self.clock.now_s()
        self.clock.advance(max(0.0, min(times) - before_s) + 1e-9)
        if len(self.book):
            self.idle_s += self.clock.now_s() - before_s

    def post(self, message: Report) -> None:
        """What the clients see."""
        now_s = self.clock.now_s()
        seqs = memoryview(message.seqs).cast("Q")
        for number, token in zip(seqs, memoryview(message.tokens).cast("I"), strict=True):
            seq = SeqId(number)
            self.said_by_seq[seq].append(token)
            if seq in self.spoke_s:
                self.gaps_s.append(now_s - self.spoke_s[seq])
            else:
                self.waits_s.append(now_s - self.request_by_seq[seq].arrival_s)
            self.spoke_s[seq] = now_s
        self.open_tokens += len(seqs)
        self.peak_tokens = max(self.peak_tokens, self.open_tokens)
        for finished in message.finished:
            self.end_turn(finished.seq)

    def end_turn(self, seq: SeqId) -> None:
        talk, request, said = self.talk_by_seq[seq], self.request_by_seq.pop(seq), self.said_by_seq.pop(seq)
        self.spoke_s.pop(seq, None)
        self.num_turns += 1
        self.num_wrong += said != expected_outputs(request, VOCAB, frozenset(), MAX_MODEL_LEN)
        self.histories[talk].extend(said)
        turns, number = self.trace[talk].turns, self.next_turns[talk]
        if number < len(turns):
            heapq.heappush(self.due, (self.clock.now_s() + turns[number].think_s, talk))
        else:
            self.open_tokens -= len(self.histories[talk])


def endless(trace: Sequence[Conversation]) -> Result:
    """The trace with room for everything: nobody is preempted. Tells the working set."""
    tokens = sum(len(turn.question) + turn.answer_tokens for talk in trace for turn in talk.turns)
    blocks = tokens // BLOCK_TOKENS + 2 * len(trace) + MAX_NUM_SEQS
    return Replay(trace, FULL, blocks, itertools.repeat([0.0] * len(trace)), 0.0).run()


def budget_blocks(reference: Result) -> int:
    """The device tier for a trace."""
    return int(BUDGET_SHARE * reference.peak_tokens / BLOCK_TOKENS)


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


# ---- report


def show(results: dict[str, Result]) -> list[str]:
    """Print one table. Returns the targets that were missed."""
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
        (f"swapped bytes, of those without reuse: {swapped:.0%} (at most {MOST_SWAPPED:.0%})", swapped <= MOST_SWAPPED),
        (f"idle: {full.idle_s / full.wall_s:.1%} (at most {MOST_IDLE:.0%})", full.is_rarely_idle),
        (f"idle, all off: {off.idle_s / off.wall_s:.1%} (control: more than {MOST_IDLE:.0%})", not off.is_rarely_idle),
        (f"TTFT p99, all off over full: {ttft:.2f} (at least {LEAST_GAIN})", ttft >= LEAST_GAIN),
        (f"TBT p99.9, all off over full: {tbt:.2f} (at least {LEAST_GAIN})", tbt >= LEAST_GAIN),
        (f"mean copy: {full.copy_bytes / block_bytes:.2f} blocks (at least {LEAST_COPY_BLOCKS})", full.is_merged),
        (
            f"mean copy, all off: {off.copy_bytes / block_bytes:.2f} blocks (control: under {LEAST_COPY_BLOCKS})",
            not off.is_merged,
        ),
        (f"turns with a lost or changed token: {wrong} of {sum(one.turns for one in results.values())}", not wrong),
    )
    for text, is_met in checks:
        print(f"  {'ok    ' if is_met else 'MISSED'} {text}")
    return [text for text, is_met in checks if not is_met]


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
