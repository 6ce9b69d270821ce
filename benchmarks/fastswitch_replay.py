"""A replay of FastSwitch conversations on the simulated machine, in virtual time. Parts of swapping can be off."""

import heapq
import itertools
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.checks import percentile
from benchmarks.fastswitch_trace import BANDS, MAX_MODEL_LEN, VOCAB, Conversation
from tiercel.device.sim import SimMachine, expected_outputs
from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.engine.loop import EngineLoop
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId
from tiercel.values.plan import Slice
from tiercel.values.rates import Rates
from tiercel.values.request import Request, SamplingParams
from tiercel.values.tier import Route
from tiercel.wire.frames import Report, Submit

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
BUDGET_SHARE = 0.4  # of the working set
MAX_IDLE_STEPS = 100
MAX_IDLE = 0.01
MIN_COPY_BLOCKS = 1.2  # average blocks per copy; without merging it is 1


def h200_step_s(slices: Sequence[Slice]) -> float:
    """Return the time of a step: the longer of reading weights and computing tokens, then reading the KV."""
    compute_s = sum(piece.length * (TOKEN_S + CONTEXT_S * (piece.start + piece.length / 2)) for piece in slices)
    context = sum(piece.start + piece.length for piece in slices)
    return max(WEIGHTS_S, compute_s) + context * TOKEN_BYTES / KV_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Build:
    """The mechanisms that are switched on."""

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
    """The result of one replay. Seconds are virtual."""

    build: str
    wall_s: float
    steps: int
    turns: int
    output_tokens: int
    wrong_turns: int  # turns with a lost or changed token
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
    peak_tokens: int  # largest number of tokens of open conversations
    real_s: float

    @property
    def copy_bytes(self) -> float:
        """Mean size of a copy."""
        return (self.swapped_bytes + self.restored_bytes) / max(self.copies, 1)

    @property
    def is_rarely_idle(self) -> bool:
        """True if the share of idle time is within the target."""
        return self.idle_s <= MAX_IDLE * self.wall_s

    @property
    def is_merged(self) -> bool:
        """True if copies are larger than a block on average."""
        return self.copy_bytes >= MIN_COPY_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


class Replay:
    """One build with one trace, and its clients."""

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
        self.num_idle = 0  # idle steps in a row with nothing to wait for
        self.due = [(talk.arrival_s, number) for number, talk in enumerate(trace)]  # heap: next turns
        heapq.heapify(self.due)
        self.histories = [array("I") for _ in trace]
        self.next_turns = [0] * len(trace)
        self.talk_by_seq: dict[SeqId, int] = {}
        self.request_by_seq: dict[SeqId, Request] = {}
        self.generated_by_seq: dict[SeqId, list[int]] = {}
        self.last_token_s: dict[SeqId, float] = {}  # time of its last token
        self.waits_s: list[float] = []  # to the first token
        self.gaps_s: list[float] = []  # between tokens
        self.num_turns = 0
        self.num_wrong = 0
        self.open_tokens = 0
        self.peak_tokens = 0

    def run(self) -> Result:
        """Run the trace to its end."""
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
            preemptions=self.book.preemption_counts.total,
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
            self.generated_by_seq[seq] = []
            self.open_tokens += len(turn.question)
            self.loop.take([Submit(request)])

    def band(self, talk: int) -> int:
        return int(BANDS * (1 - self.row[talk]))

    def change_priorities(self) -> None:
        self.row = next(self.rows)
        for seq in self.generated_by_seq:
            band = self.band(self.talk_by_seq[seq])
            if band != self.book[seq].band:
                self.book.move(seq, band, self.clock.now_s())

    def pass_time(self) -> None:
        """Advance the clock to the next landing or the next turn."""
        times = [self.due[0][0]] if self.due else []
        landing_s = self.mover.next_landing_s
        if landing_s is not None:
            times.append(landing_s)
        if not times:
            self.num_idle += 1
            if self.num_idle > MAX_IDLE_STEPS:
                raise RuntimeError(f"{self.build.name}: unfinished work, nothing on its way, and steps that do nothing")
            return
        self.num_idle = 0
        before_s = self.clock.now_s()
        self.clock.advance(max(0.0, min(times) - before_s) + 1e-9)
        if len(self.book):
            self.idle_s += self.clock.now_s() - before_s

    def post(self, message: Report) -> None:
        """Take a report of the loop."""
        now_s = self.clock.now_s()
        seqs = memoryview(message.seqs).cast("Q")
        for number, token in zip(seqs, memoryview(message.tokens).cast("I"), strict=True):
            seq = SeqId(number)
            self.generated_by_seq[seq].append(token)
            if seq in self.last_token_s:
                self.gaps_s.append(now_s - self.last_token_s[seq])
            else:
                self.waits_s.append(now_s - self.request_by_seq[seq].arrival_s)
            self.last_token_s[seq] = now_s
        self.open_tokens += len(seqs)
        self.peak_tokens = max(self.peak_tokens, self.open_tokens)
        for finished in message.finished:
            self.end_turn(finished.seq)

    def end_turn(self, seq: SeqId) -> None:
        talk, request, generated = self.talk_by_seq[seq], self.request_by_seq.pop(seq), self.generated_by_seq.pop(seq)
        self.last_token_s.pop(seq, None)
        self.num_turns += 1
        self.num_wrong += generated != expected_outputs(request, VOCAB, frozenset(), MAX_MODEL_LEN)
        self.histories[talk].extend(generated)
        turns, number = self.trace[talk].turns, self.next_turns[talk]
        if number < len(turns):
            heapq.heappush(self.due, (self.clock.now_s() + turns[number].think_s, talk))
        else:
            self.open_tokens -= len(self.histories[talk])


def endless(trace: Sequence[Conversation]) -> Result:
    """Replay a trace with memory for everything, to find the working set."""
    tokens = sum(len(turn.question) + turn.answer_tokens for talk in trace for turn in talk.turns)
    blocks = tokens // BLOCK_TOKENS + 2 * len(trace) + MAX_NUM_SEQS
    return Replay(trace, FULL, blocks, itertools.repeat([0.0] * len(trace)), 0.0).run()


def budget_blocks(reference: Result) -> int:
    """Return the number of device blocks for a trace."""
    return int(BUDGET_SHARE * reference.peak_tokens / BLOCK_TOKENS)
