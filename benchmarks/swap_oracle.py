"""Swap or recompute: the engine's choices compared with an oracle that has measured both modes for each victim.

    python benchmarks/swap_oracle.py [--victims 8] [--runs 3] [--seed 1] [--json FILE] [--quick]
                                     [--control swap|recompute|skew]

The real engine on the CPU, one compute thread, with a device pool separate from DDR and a random Llama: real steps,
real copies. A copy lane moves the bytes and then waits as long as the simulated link would need, because the memory of
a machine is much faster than its arithmetic: with bare copies every victim would be swapped.

    links     four, each direction at 0.35, 0.7, 1.4 and 2.8 times the rate at which swapping a token (down and up)
              takes as long as computing it without context, which is measured at the start
    victims   the same number for each link; contexts log-uniform in 128 to 2,048 tokens, the same for all links
    dirty     all blocks of every victim: write-back in idle time is off, because a clean victim is always swapped

For each victim a sequence computes its prompt, generates four tokens and is preempted by a request of a higher band.
When its spill has landed, every copy left in HBM is evicted, the rival ends, and the victim is restored. Its cost is
the time of its copies down plus the time from the end of its rival to its next token. An engine in mode `swap` and one
in mode `recompute` measure both modes, in turns, medians of --runs. An engine in mode `auto`, which has measured its
rates at its own start and has not seen those costs, chooses.

A choice is right if its cost is at most 5 % above that of the other mode (TIE). The number of such ties and the share
of right choices without them are printed. Exit status 1: fewer than 90 % of the choices are right, or one
mode is chosen for fewer than 10 % of the victims. With --control the check must fail: the choice is always one mode, or
uses link rates that are eight times too high.
"""

import argparse
import json
import logging
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from msgspec.structs import replace

from benchmarks.checks import missed_checks
from benchmarks.random_llama import random_llama
from tiercel.device.cpu import CpuDevice, Done, InlineLane
from tiercel.device.extents import Extents
from tiercel.engine.assembly import Engine, assemble
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.base import Model
from tiercel.engine.models.registry import load_model
from tiercel.engine.offline import Inbox
from tiercel.kvcache.pool import SlotPool
from tiercel.settings.settings import EngineSettings, PreemptionMode
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tier import Route
from tiercel.wire.frames import Abort, Submit

MULTIPLES = (0.35, 0.7, 1.4, 2.8)
SHORTEST, LONGEST = 128, 2048  # tokens
TIE = 0.05
QUEUED_S = 0.02
MIN_RIGHT_SHARE = 0.9
MIN_SHARE = 0.1
TOKENS_BEFORE = 4  # tokens generated before the preemption
WAIT_LIMIT_S = 60.0  # limit of each wait
SKEW = 8.0
MODEL_VOCAB = 2048
TOKEN_BYTES = 4 * 16 * 64 * 2 * 4  # of KV: layers, heads, head size, keys and values, float32

MODEL = random_llama(
    vocab_size=MODEL_VOCAB,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=64,
)


class LinkLane(InlineLane):
    """A copy lane with the speed of a link: after the copy the caller waits for the rest of the link's time."""

    def __init__(self, device: "LinkDevice") -> None:
        self._device = device
        self._free_s = 0.0

    def copy(self, extents: Extents) -> Done[None]:
        now_s = time.monotonic()
        # A link has a queue: a thread that is late to queue the next piece of a transfer does not slow it down.
        begin_s = self._free_s if now_s - self._free_s < QUEUED_S else now_s
        done = super().copy(extents)
        self._free_s = begin_s + int(extents.sizes.sum()) / self._device.bytes_per_s
        time.sleep(max(0.0, self._free_s - time.monotonic()))
        return done


class LinkDevice(CpuDevice):
    """The CPU with a link whose rate can be changed."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(1)
        self.bytes_per_s = bytes_per_s

    def open_copy_lane(self) -> LinkLane:
        return LinkLane(self)


@dataclass(frozen=True, slots=True)
class LoggedSwitch:
    """The times of one switch by the engine's log, in seconds."""

    mode: str
    predicted_s: float
    other_s: float
    realised_s: float


class SwitchLog(logging.Handler):
    """A log handler that keeps the lines `switch over` of the engine."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.logged: list[LoggedSwitch] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("switch over") and isinstance(record.args, tuple):
            _, mode, _, predicted_ms, other_ms, realised_ms, _ = record.args
            seconds = (float(str(ms)) / 1e3 for ms in (predicted_ms, other_ms, realised_ms))
            self.logged.append(LoggedSwitch(str(mode), *seconds))


@dataclass(frozen=True, slots=True)
class Cost:
    """The measured cost of one switch."""

    is_swap: bool
    down_s: float  # time of its copies down
    return_s: float  # from the end of the rival to the victim's next token
    logged: LoggedSwitch

    @property
    def total_s(self) -> float:
        """Cost that the oracle compares."""
        return self.down_s + self.return_s


@dataclass(frozen=True, slots=True)
class Victim:
    """One row of the result."""

    multiple: float  # of the rate of the link
    tokens: int
    swap_s: float  # measured
    recompute_s: float  # measured
    logged: LoggedSwitch  # times by the log of the engine that chose

    @property
    def is_swap(self) -> bool:
        """True if the engine chose to swap."""
        return self.logged.mode == "swap"

    @property
    def chosen_s(self) -> float:
        """Measured cost of the chosen mode."""
        return self.swap_s if self.is_swap else self.recompute_s

    @property
    def best_s(self) -> float:
        """Measured cost of the cheaper mode."""
        return min(self.swap_s, self.recompute_s)

    @property
    def is_tie(self) -> bool:
        """True if either choice is right."""
        return max(self.swap_s, self.recompute_s) <= (1 + TIE) * self.best_s

    @property
    def is_right(self) -> bool:
        """True if the choice is right."""
        return self.chosen_s <= (1 + TIE) * self.best_s


class Stage:
    """One engine on which one sequence at a time is preempted by another."""

    def __init__(self, model: Model, folder: Path, mode: PreemptionMode, bytes_per_s: float) -> None:
        clock = MonotonicClock()
        self.device = LinkDevice(bytes_per_s)
        settings = settings_of(folder, mode)
        self._inbox = Inbox(clock)
        self._log = SwitchLog()
        self._engine: Engine = assemble(settings, model, self.device, self._inbox, clock)
        tiers = self._engine.cache.tiers
        tiers.limits = replace(tiers.limits, has_write_back=False)
        self._next = 1

    def switch(self, tokens: int, rng: random.Random) -> Cost:
        """Preempt and restore one sequence with a context of `tokens` tokens, and measure it."""
        loop, tiers = self._engine.loop, self._engine.cache.tiers
        self._inbox.clear()
        victim = self._submit(draw(rng, tokens), band=5)
        self._step_until(lambda: self._num_generated(victim) >= TOKENS_BEFORE)
        before, down_s = loop.gauges.read(), self._down_s()
        rival = self._submit(draw(rng, 16), band=0)
        self._step_until(lambda: self._num_generated(rival) >= 1 and not len(tiers.transfers))
        after, down_s = loop.gauges.read(), self._down_s() - down_s
        if after.preemptions != before.preemptions + 1:
            raise RuntimeError(f"{after.preemptions - before.preemptions} preemptions where one was wanted")
        self._evict(tiers.device)
        generated = self._num_generated(victim)
        with self._log_switches():
            began_s = time.monotonic()
            loop.take([Abort((rival,), FinishReason.ABORT)])
            self._step_until(lambda: self._num_generated(victim) > generated)
            return_s = time.monotonic() - began_s
        loop.take([Abort((victim,), FinishReason.ABORT)])
        self._step_until(lambda: loop.is_idle and not len(tiers.transfers))
        for _, pool in tiers.pools():
            self._evict(pool)
        return Cost(after.preemptions_swap > before.preemptions_swap, down_s, return_s, self._log.logged[-1])

    def close(self) -> None:
        """Stop the threads of the engine."""
        self._engine.close()

    def _submit(self, prompt: list[int], band: int) -> SeqId:
        seq, self._next = SeqId(self._next), self._next + 1
        params = SamplingParams(temperature=0.0, max_tokens=2048, ignore_eos=True)
        request = Request(id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=time.monotonic(), band=band)
        self._engine.loop.take([Submit(request)])
        return seq

    def _num_generated(self, seq: SeqId) -> int:
        return sum(memoryview(report.seqs).cast("Q").tolist().count(seq) for _, report in self._inbox.reports)

    def _down_s(self) -> float:
        return next(one.seconds for one in self._engine.tiers.mover.gauges() if one.route is Route.SPILL)

    @staticmethod
    def _evict(pool: SlotPool) -> None:
        for slot in tuple(pool.copies):
            pool.evict(SlotId(slot))

    @contextmanager
    def _log_switches(self) -> Iterator[None]:
        logger = logging.getLogger("tiercel.scheduler.preemption_book")
        logger.addHandler(self._log)
        level = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(self._log)

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_LIMIT_S
        while not is_done():
            self._engine.upkeep.tend()
            if not self._engine.loop.step():
                time.sleep(1e-4)
            if time.monotonic() > end_s:
                raise TimeoutError(f"{WAIT_LIMIT_S:.0f} s without what was waited for")


def draw(rng: random.Random, tokens: int) -> list[int]:
    """Draw a new prompt."""
    return rng.choices(range(3, MODEL_VOCAB), k=tokens)


def settings_of(folder: Path, mode: PreemptionMode) -> EngineSettings:
    """Return settings for one sequence at a time, so that a request of a higher band takes its row."""
    return EngineSettings(
        model=str(folder / "model"),
        device="cpu",
        threads=1,
        load_format="dummy",
        num_gpu_blocks_override=(LONGEST + 512) // 16,
        cpu_device_pool=True,
        kv_host_bytes=512 << 20,
        preemption_mode=mode,
        max_num_seqs=1,
        scheduling_policy="priority",
        calibration_s=4.0,
        cache_folder=str(folder / "cache"),
    )


def open_model(folder: Path) -> Model:
    """Return a model with random weights, which all engines share."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    attention = open_attention("auto", torch.device("cpu"), 1, None)
    return load_model(settings_of(folder, "auto"), torch.device("cpu"), attention)


def even_rate(stage: Stage, rng: random.Random) -> float:
    """Return the bytes per second of a link with which swapping a token takes as long as computing it."""
    short_s, long_s = (median(stage.switch(tokens, rng).return_s for _ in range(3)) for tokens in (256, 512))
    return 2 * TOKEN_BYTES / max((long_s - short_s) / 256, 1e-9)


def lengths(count: int, seed: int) -> list[int]:
    """Return the contexts of the victims of one link, in tokens."""
    rng = random.Random(seed)
    return [round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(count)]


def measure(swap: Stage, recompute: Stage, auto: Stage, multiple: float, tokens: int, runs: int, seed: int) -> Victim:
    """Measure both modes of one victim in turns, and the engine's choice."""
    rng = random.Random(seed)
    costs: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs):
        for stage in (swap, recompute) if run % 2 == 0 else (recompute, swap):
            cost = stage.switch(tokens, rng)
            costs[cost.is_swap].append(cost.total_s)
    if len(costs[True]) != runs or len(costs[False]) != runs:
        raise RuntimeError("a forced mode was not taken")
    return Victim(multiple, tokens, median(costs[True]), median(costs[False]), auto.switch(tokens, rng).logged)


def show(victims: Sequence[Victim]) -> bool:
    """Print the result. Return whether all checks are met."""
    print("\nlink  tokens   swap ms  recompute ms  predicted ms  chosen")
    for one in victims:
        logged = one.logged
        predicted = (logged.predicted_s, logged.other_s) if one.is_swap else (logged.other_s, logged.predicted_s)
        mark = "tie" if one.is_tie else "" if one.is_right else f"WRONG: {one.chosen_s / one.best_s - 1:+.0%} cost"
        print(
            f"{one.multiple:4.2f}  {one.tokens:6d}  {1e3 * one.swap_s:8.1f}  {1e3 * one.recompute_s:12.1f}  "
            f"{1e3 * predicted[0]:5.0f} {1e3 * predicted[1]:6.0f}  {logged.mode:9s}  {mark}"
        )
    count = len(victims)
    right, ties = sum(one.is_right for one in victims), sum(one.is_tie for one in victims)
    swapped = sum(one.is_swap for one in victims)
    clear = [one for one in victims if not one.is_tie]
    sums = {
        "as chosen": sum(one.chosen_s for one in victims),
        "always swap": sum(one.swap_s for one in victims),
        "always recompute": sum(one.recompute_s for one in victims),
        "the oracle": sum(one.best_s for one in victims),
    }
    print("\nseconds of all victims: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in sums.items()))
    for name, is_swap in (("swap", True), ("recompute", False)):
        chosen = [one for one in victims if one.is_swap == is_swap]
        if chosen:
            predicted = median(one.logged.predicted_s / one.chosen_s for one in chosen)
            realised = median(one.logged.realised_s / one.chosen_s for one in chosen)
            print(
                f"{name}: relative to the measured cost: predicted {predicted:.2f}, by the log {realised:.2f} (medians)"
            )
    clearly = sum(one.is_right for one in clear)
    print(f"ties (within {TIE:.0%}): {ties} of {count}; without them {clearly} of {len(clear)} right")
    checks = (
        (f"right choices: {right} of {count} (at least {MIN_RIGHT_SHARE:.0%})", right >= MIN_RIGHT_SHARE * count),
        (f"swap chosen for {swapped} of {count} (at least {MIN_SHARE:.0%})", swapped >= MIN_SHARE * count),
        (
            f"recompute chosen for {count - swapped} of {count} (at least {MIN_SHARE:.0%})",
            count - swapped >= MIN_SHARE * count,
        ),
    )
    return not missed_checks(checks)


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=8, help="for each link")
    parser.add_argument("--runs", type=int, default=3, help="of each mode of a victim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two victims for each link, each mode measured once")
    parser.add_argument("--control", choices=("swap", "recompute", "skew"), help="a broken choice, which has to fail")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    torch.set_num_threads(1)
    count, runs = (2, 1) if arguments.quick else (arguments.victims, arguments.runs)
    victims: list[Victim] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = open_model(folder)
        swap, recompute = (Stage(model, folder, mode, float("inf")) for mode in ("swap", "recompute"))
        even = even_rate(recompute, random.Random(0))
        print(f"links even with computing without context: {even / 1e6:.0f} MB/s; {TOKEN_BYTES} bytes a token")
        for multiple in MULTIPLES:
            rate = swap.device.bytes_per_s = multiple * even
            mode: PreemptionMode = arguments.control if arguments.control in ("swap", "recompute") else "auto"
            auto = Stage(model, folder, mode, rate * (SKEW if arguments.control == "skew" else 1))
            auto.device.bytes_per_s = rate
            for number, tokens in enumerate(lengths(count, arguments.seed)):
                victims.append(measure(swap, recompute, auto, multiple, tokens, runs, 1000 * len(victims) + number))
            auto.close()
        swap.close()
        recompute.close()
    is_good = show(victims)
    print(f"{time.perf_counter() - began_s:.0f} s")
    if arguments.json:
        rows = [asdict(one) for one in victims]
        arguments.json.write_text(json.dumps({"even_bytes_per_s": even, "victims": rows}, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
