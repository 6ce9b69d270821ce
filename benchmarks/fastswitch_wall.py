"""The FastSwitch conversations in wall time: the real engine on the CPU, real tokens, real copies, three arms.

    python benchmarks/fastswitch_wall.py [--runs 3] [--conversations 20] [--seed 2] [--json FILE] [--quick]
                                         [--control NAME]

`benchmarks/fastswitch.py` replays its traces on a simulated machine in virtual time. Here a random Llama computes every
token on one thread, and blocks are copied between a device pool and a DDR pool of the same machine
(`cpu_device_pool`). Conversations and changing priorities are drawn as there, with questions, answers and pauses scaled
by 0.35; each turn is sent when it is due, and priorities are drawn anew every 25 steps. The device pool holds 40 % of
the open tokens at the peak of a run with memory for everything, and at least the longest conversation. The tokens of
that run are the reference.

    full       victims are swapped; copies below are kept, and written in idle time
    no reuse   victims are swapped; a copy below is dropped when it is restored; nothing is written in advance
    recompute  no lower tier; victims are recomputed

The arms take turns on one trace, each with empty tiers, medians of --runs. Exit status 1: a turn did not end, a token
differs from the reference, an arm did not do what its name says, or a check is missed: `full` swaps out fewer bytes
than `no reuse`, and its tokens/s and its P99 time to first token are no worse than those of `recompute` (TOLERANCE).
--control runs another arm in place of `full`, so that a check must fail.

Limits: on a CPU both pools are the same memory, and a copy takes processor time and bandwidth from concurrent steps.
`benchmarks/gpu/` measures links, copy engines and an idle host.
"""

import argparse
import heapq
import itertools
import json
import select
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from msgspec.structs import replace

from benchmarks.checks import missed_checks, percentile
from benchmarks.fastswitch_replay import BUDGET_SHARE
from benchmarks.fastswitch_trace import BANDS, Conversation, conversations, priorities
from benchmarks.random_llama import random_llama
from tiercel.device.cpu import CpuDevice
from tiercel.engine.assembly import Engine, assemble
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.base import Model
from tiercel.engine.models.registry import load_model
from tiercel.engine.wake import Wake
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import Request, SamplingParams
from tiercel.values.tier import Route
from tiercel.wire.frames import FromEngine, Report, Submit

SCALE = 0.35
STEPS_AN_UPDATE = 25
BLOCK = 16
POSITIONS = 8192  # maximum context of the model
ROWS = 16
TOLERANCE = 0.02  # relative, for "no worse"
WAIT_LIMIT_S = 240.0  # limit of one run

TOKEN_BYTES = 4 * 4 * 32 * 2 * 4  # of KV: layers, heads, head size, keys and values, float32

MODEL = random_llama(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=POSITIONS,
)


@dataclass(frozen=True, slots=True)
class Arm:
    """The mechanisms that are switched on."""

    name: str
    has_host: bool = True
    has_reuse: bool = True


FULL, NO_REUSE, RECOMPUTE = Arm("full"), Arm("no reuse", has_reuse=False), Arm("recompute", has_host=False)
ARMS = (FULL, NO_REUSE, RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run, in wall-clock seconds."""

    arm: str
    wall_s: float
    turns: int
    tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p999_s: float
    preemptions: int
    swaps: int
    down_bytes: int
    up_bytes: int
    recomputed_tokens: int
    peak_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.wall_s


class Clients:
    """All conversations of one run, and the loop that serves them."""

    def __init__(self, trace: Sequence[Conversation], seed: int) -> None:
        self.generated: dict[tuple[int, int], list[int]] = {}  # by conversation and turn
        self.waits_s: list[float] = []
        self.gaps_s: list[float] = []
        self.peak_tokens = 0
        self.unfinished = sum(len(talk.turns) for talk in trace)
        self._trace = trace
        self._rows = priorities("markov", len(trace), seed)
        self._row = next(self._rows)
        self._began_s = time.monotonic()
        self._due = [(self._began_s + talk.arrival_s, number) for number, talk in enumerate(trace)]
        heapq.heapify(self._due)
        self._histories = [array("I") for _ in trace]
        self._turns = [0] * len(trace)
        self._open: dict[
            SeqId, tuple[int, float]
        ] = {}  # conversation, and the time at which it was due or had its last token
        self._open_tokens = 0

    def ask(self, engine: Engine, number: int) -> int:
        """Send the turns that are due. Return the number of the next sequence."""
        while self._due and self._due[0][0] <= time.monotonic():
            due_s, talk = heapq.heappop(self._due)
            turn = self._trace[talk].turns[self._turns[talk]]
            question = array("I", [3 + token for token in turn.question])
            self._histories[talk].extend(question)
            self._open_tokens += len(question)
            seq, number = SeqId(number), number + 1
            self._open[seq] = talk, due_s
            self.generated[talk, self._turns[talk]] = []
            request = Request(
                id=seq,
                prompt=self._histories[talk].tobytes(),
                params=SamplingParams(temperature=0.0, max_tokens=turn.answer_tokens, ignore_eos=True),
                arrival_s=due_s,
                band=self._band(talk),
            )
            engine.loop.take([Submit(request)])
        return number

    def change_priorities(self, engine: Engine) -> None:
        """Draw the next row and move the open sequences to their bands."""
        self._row = next(self._rows)
        for seq, (talk, _) in self._open.items():
            engine.loop.book.move(seq, self._band(talk), time.monotonic())

    def rest_s(self) -> float:
        """Return the seconds until the next turn is due."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else 0.05

    def hear(self, message: Report) -> None:
        """Take the tokens and ends of the posted reports."""
        now_s = time.monotonic()
        seqs = memoryview(message.seqs).cast("Q")
        for seq, token in zip(seqs, memoryview(message.tokens).cast("I"), strict=True):
            talk, since_s = self._open[SeqId(seq)]
            generated = self.generated[talk, self._turns[talk]]
            (self.gaps_s if generated else self.waits_s).append(now_s - since_s)
            generated.append(token)
            self._open[SeqId(seq)] = talk, now_s
        self._open_tokens += len(seqs)
        self.peak_tokens = max(self.peak_tokens, self._open_tokens)
        for finished in message.finished:
            self._end_turn(finished.seq, finished.reason)

    def _band(self, talk: int) -> int:
        return int(BANDS * (1 - self._row[talk]))

    def _end_turn(self, seq: SeqId, reason: FinishReason) -> None:
        talk, _ = self._open.pop(seq)
        number = self._turns[talk]
        turns, generated = self._trace[talk].turns, self.generated[talk, number]
        if reason is not FinishReason.LENGTH or len(generated) != turns[number].answer_tokens:
            raise RuntimeError(f"conversation {talk}, turn {number}: {reason.value} after {len(generated)} tokens")
        self.unfinished -= 1
        self._histories[talk].extend(generated)
        self._turns[talk] = number + 1
        if number + 1 < len(turns):
            heapq.heappush(self._due, (time.monotonic() + turns[number + 1].think_s, talk))
        else:
            self._open_tokens -= len(self._histories[talk])


class Server:
    """The engine of one arm, used for all its runs."""

    def __init__(self, arm: Arm, model: Model, folder: Path, longest: int, blocks: int, host_bytes: int) -> None:
        self.arm = arm
        self._wake = Wake.open()
        self._clients: Clients | None = None
        settings = settings_of(folder, arm, longest, blocks, host_bytes)
        self._engine = assemble(settings, model, CpuDevice(1), self, MonotonicClock(), self._wake.set)
        tiers = self._engine.cache.tiers
        tiers.limits = replace(tiers.limits, has_reuse=arm.has_reuse, has_write_back=arm.has_reuse)
        self._next = 1

    def post(self, message: FromEngine) -> None:
        """Take a report of the engine."""
        if isinstance(message, Report) and self._clients is not None:
            self._clients.hear(message)

    def run(self, trace: Sequence[Conversation], seed: int) -> tuple[Result, Clients]:
        """Run all conversations. Errors: TimeoutError if they do not end."""
        engine, loop = self._engine, self._engine.loop
        before, routes = loop.gauges.read(), self._bytes()
        clients = self._clients = Clients(trace, seed)
        began_s, steps = time.monotonic(), 0
        while clients.unfinished:
            self._next = clients.ask(engine, self._next)
            engine.upkeep.tend()
            if loop.step():
                steps += 1
                if not steps % STEPS_AN_UPDATE:
                    clients.change_priorities(engine)
                continue
            select.select([self._wake], [], [], min(0.05, clients.rest_s(), max(1e-3, engine.patience_s())))
            self._wake.clear()
            if time.monotonic() > began_s + WAIT_LIMIT_S:
                raise TimeoutError(f"{self.arm.name}: {clients.unfinished} turns not ended in {WAIT_LIMIT_S:.0f} s")
        wall_s = time.monotonic() - began_s
        after, moved = loop.gauges.read(), self._bytes()
        result = Result(
            arm=self.arm.name,
            wall_s=wall_s,
            turns=len(clients.generated),
            tokens=sum(map(len, clients.generated.values())),
            ttft_p50_s=percentile(clients.waits_s, 0.5),
            ttft_p99_s=percentile(clients.waits_s, 0.99),
            tbt_p999_s=percentile(clients.gaps_s, 0.999),
            preemptions=after.preemptions - before.preemptions,
            swaps=after.preemptions_swap - before.preemptions_swap,
            down_bytes=moved[Route.SPILL] - routes[Route.SPILL],
            up_bytes=moved[Route.RESTORE] - routes[Route.RESTORE],
            recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
            peak_tokens=clients.peak_tokens,
        )
        self._empty()
        return result, clients

    def close(self) -> None:
        """Stop the threads of the engine."""
        self._engine.close()
        self._wake.close()

    def _bytes(self) -> dict[Route, int]:
        told = {one.route: one.bytes for one in self._engine.tiers.mover.gauges()}
        return {route: told.get(route, 0) for route in (Route.SPILL, Route.RESTORE)}

    def _empty(self) -> None:
        """Empty the tiers for the next run."""
        tiers = self._engine.cache.tiers
        end_s = time.monotonic() + WAIT_LIMIT_S
        while len(tiers.transfers) or not self._engine.loop.is_idle:
            self._engine.loop.step()
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self.arm.name}: copies that do not end")
        for _, pool in tiers.pools():
            for slot in tuple(pool.copies):
                pool.evict(SlotId(slot))


def settings_of(folder: Path, arm: Arm, longest: int, blocks: int, host_bytes: int) -> EngineSettings:
    """Return settings with two pools on the CPU, or one without swapping, for contexts of up to `longest` tokens."""
    return EngineSettings(
        model=str(folder),
        device="cpu",
        threads=1,
        load_format="dummy",
        max_model_len=longest,
        num_gpu_blocks_override=blocks,
        cpu_device_pool=True,
        kv_host_bytes=host_bytes if arm.has_host else 0,
        preemption_mode="swap" if arm.has_host else "recompute",
        max_num_seqs=ROWS,
        scheduling_policy="priority",
    )


def show(results: dict[str, list[Result]], changed: dict[str, int]) -> bool:
    """Print the table of medians. Return whether every check is met."""

    def mid(arm: Arm, name: str) -> float:
        return median(float(getattr(one, name)) for one in results[arm.name])

    print("\n           TTFT p50    p99   TBT p99.9  tokens/s  preempted  swapped     down       up  computed again")
    for arm in ARMS:
        print(
            f"{arm.name:10s} {mid(arm, 'ttft_p50_s'):7.2f} {mid(arm, 'ttft_p99_s'):6.2f} s "
            f"{mid(arm, 'tbt_p999_s'):7.2f} s {mid(arm, 'tokens_per_s'):9.0f} {mid(arm, 'preemptions'):10.0f} "
            f"{mid(arm, 'swaps'):8.0f} {mid(arm, 'down_bytes') / 1e6:6.0f} MB {mid(arm, 'up_bytes') / 1e6:5.0f} MB "
            f"{mid(arm, 'recomputed_tokens'):9.0f} tokens"
        )
    speed = mid(FULL, "tokens_per_s") / mid(RECOMPUTE, "tokens_per_s")
    wait = mid(FULL, "ttft_p99_s") / mid(RECOMPUTE, "ttft_p99_s")
    down = mid(FULL, "down_bytes") / max(mid(NO_REUSE, "down_bytes"), 1)
    redone = mid(FULL, "recomputed_tokens") / max(mid(RECOMPUTE, "recomputed_tokens"), 1)
    checks = (
        (f"turns with another token than the reference: {changed}", not any(changed.values())),
        (
            "full and no reuse swap, recompute does not",
            mid(FULL, "swaps") > 0 and mid(NO_REUSE, "swaps") > 0 and mid(RECOMPUTE, "up_bytes") == 0,
        ),
        (f"full computes {redone:.0%} of the tokens again that recompute does (at most 50 %)", redone <= 0.5),
        (f"full moves {down:.0%} of the bytes down that no reuse moves (less than 100 %)", down < 1),
        (f"tokens/s, full over recompute: {speed:.2f} (at least {1 - TOLERANCE})", speed >= 1 - TOLERANCE),
        (f"P99 TTFT, full over recompute: {wait:.2f} (at most {1 + TOLERANCE})", wait <= 1 + TOLERANCE),
    )
    return not missed_checks(checks)


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each arm")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="8 conversations, a third as long, each arm once")
    parser.add_argument("--control", choices=[arm.name for arm in ARMS[1:]], help="what runs under the name of full")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count, runs = (8, 1) if arguments.quick else (arguments.conversations, arguments.runs)
    trace = conversations(count, arguments.seed, SCALE / 3 if arguments.quick else SCALE)
    results: dict[str, list[Result]] = {arm.name: [] for arm in ARMS}
    changed = dict.fromkeys(results, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        attention = open_attention("auto", torch.device("cpu"), 1, None)
        model = load_model(settings_of(folder, FULL, POSITIONS, 1, 0), torch.device("cpu"), attention)
        tokens = sum(len(turn.question) + turn.answer_tokens for talk in trace for turn in talk.turns)
        longest = BLOCK + max(sum(len(turn.question) + turn.answer_tokens for turn in talk.turns) for talk in trace)
        roomy = Server(RECOMPUTE, model, folder, longest, tokens // BLOCK + 4 * count + longest // BLOCK, 0)
        reference, clients = roomy.run(trace, arguments.seed)
        roomy.close()
        blocks = max(int(BUDGET_SHARE * reference.peak_tokens / BLOCK), longest // BLOCK + 2)
        expected = clients.generated
        print(
            f"{count} conversations, {reference.turns} turns, {reference.tokens} tokens to say; peak "
            f"{reference.peak_tokens} tokens, device pool {blocks} blocks; with room for all {reference.wall_s:.1f} s, "
            f"{reference.tokens_per_s:.0f} tokens/s, P99 TTFT {reference.ttft_p99_s:.2f} s",
            flush=True,
        )
        host_bytes = 4 * tokens * TOKEN_BYTES
        builds = {arm.name: arm for arm in ARMS}
        taken = {arm: builds[arguments.control] if arguments.control and arm is FULL else arm for arm in ARMS}
        servers = {arm: Server(taken[arm], model, folder, longest, blocks, host_bytes) for arm in ARMS}
        for run in range(runs):
            for arm in itertools.islice(itertools.cycle(ARMS), run, run + len(ARMS)):
                result, clients = servers[arm].run(trace, arguments.seed)
                results[arm.name].append(result)
                changed[arm.name] += sum(clients.generated[turn] != generated for turn, generated in expected.items())
                print(
                    f"run {run + 1} {arm.name:10s} {result.wall_s:6.1f} s {result.tokens_per_s:6.0f} tokens/s, P99 "
                    f"TTFT {result.ttft_p99_s:.2f} s",
                    flush=True,
                )
        for server in servers.values():
            server.close()
    is_good = show(results, changed)
    if arguments.json:
        rows = {name: [asdict(one) for one in some] for name, some in results.items()}
        arguments.json.write_text(json.dumps({"reference": asdict(reference), **rows}, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
