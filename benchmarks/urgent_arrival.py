"""Wait of an urgent request for its first slice on an engine that is busy with long prompts.

    python benchmarks/urgent_arrival.py [MODEL] [--tokens 4096] [--step-tokens 256] [--goal 0.2] [--arrivals 16]
                                        [--arrivals-off 4] [--pairs 3] [--most 1.2] [--least-throughput 0.95]

One engine in this process, its loop driven as the engine process drives it. Two prompts of --tokens are always in
progress and nothing decodes. A thread submits interactive requests of 32 tokens at random times. The wait of each ends
when its first slice begins to be computed; its unit is the nano-batch that was running at its arrival. Prints median
and maximum with the mechanism on and off (`--tbt-goal 0`: steps of --step-tokens, one launched ahead), then the prompt
throughput of both in interleaved pairs, from the end of one prompt to the end of another.

Exit code 1 if a request waited for more than --most nano-batches with the mechanism on, or if the median pair has less
than --least-throughput of the prompt throughput without it. --control leaves the mechanism off in both arms and must
fail. Run it on a quiet machine.
"""

import argparse
import os
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from tiercel.system.openmp import adopt_engine_environment

adopt_engine_environment()

from tiercel.embedded import MODEL_DIR  # noqa: E402 - OpenMP reads the environment when torch is loaded
from tiercel.engine.assembly import Engine, open_engine  # noqa: E402
from tiercel.engine.step.flight import Flight, StepRunner  # noqa: E402
from tiercel.engine.wake import Wake  # noqa: E402
from tiercel.settings.settings import EngineSettings  # noqa: E402
from tiercel.values.clock import MonotonicClock  # noqa: E402
from tiercel.values.ids import SeqId, TenantId  # noqa: E402
from tiercel.values.outcome import StepOutcome  # noqa: E402
from tiercel.values.plan import StepPlan  # noqa: E402
from tiercel.values.request import Request, SamplingParams, pack_tokens  # noqa: E402
from tiercel.values.tenant import Slo, Tenants, TenantShare  # noqa: E402
from tiercel.wire.frames import FromEngine, Report, SetSettings, SetTenants, Submit  # noqa: E402

BUSY = TenantShare(name=TenantId("busy"), slo=Slo(kind="batch"))
PERSON = TenantShare(name=TenantId("person"), slo=Slo(ttft_s=1.0))
OFF_S = 0.0  # no goal: whole steps
WARM_STEPS = 6
PROMPTS = 2  # in progress


@dataclass
class Ran:
    """One step that has run, in seconds of the engine's clock."""

    start_s: float
    seqs: frozenset[SeqId]
    tokens: int
    nano_batches: int
    end_s: float = float("inf")


@dataclass
class Watch:
    """The steps that have run, with their times."""

    ran: list[Ran] = field(default_factory=list)

    def around(self, runner: StepRunner, clock: MonotonicClock) -> StepRunner:
        """Return the runner, wrapped to note its steps."""
        return WatchedRunner(runner, self, clock)

    def begun_s(self, seq: SeqId) -> float:
        """Return the time at which the first slice of a sequence began."""
        return next(one.start_s for one in self.ran if seq in one.seqs)

    def running(self, at_s: float) -> Ran:
        """Return the step that was running at a time, or had just ended."""
        return next(one for one in reversed(self.ran) if one.start_s <= at_s)


class WatchedFlight:
    """A flight that notes its end, which is the start of the next step."""

    def __init__(self, flight: Flight, ran: Ran, watch: Watch, clock: MonotonicClock) -> None:
        self._flight = flight
        self._ran = ran
        self._watch = watch
        self._clock = clock

    @property
    def plan(self) -> StepPlan:
        return self._flight.plan

    def result(self) -> StepOutcome:
        outcome = self._flight.result()
        self._ran.end_s = self._clock.now_s()
        behind = self._watch.ran[-1]
        if behind is not self._ran:
            behind.start_s = self._ran.end_s
        return outcome


class WatchedRunner:
    """A runner that notes its steps."""

    def __init__(self, runner: StepRunner, watch: Watch, clock: MonotonicClock) -> None:
        self._runner = runner
        self._watch = watch
        self._clock = clock

    def launch(self, plan: StepPlan) -> Flight:
        pieces = [piece for batch in plan.nano_batches for piece in batch.slices]
        flight = self._runner.launch(plan)
        seqs, tokens = frozenset(piece.seq for piece in pieces), sum(piece.length for piece in pieces)
        self._watch.ran.append(Ran(self._clock.now_s(), seqs, tokens, len(plan.nano_batches)))
        return WatchedFlight(flight, self._watch.ran[-1], self._watch, self._clock)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self._runner.forget(seqs)


class Wait(NamedTuple):
    """The wait of one arrival."""

    seconds: float
    nano_batch_s: float  # time of the nano-batch that ran at its arrival


class Outbox:
    """Collects the requests that have ended from the reports of the engine."""

    def __init__(self) -> None:
        self.ended: set[SeqId] = set()

    def post(self, message: FromEngine) -> None:
        if isinstance(message, Report):
            self.ended.update(finished.seq for finished in message.finished)


class Busy:
    """An engine that always has prompts to compute."""

    def __init__(self, settings: EngineSettings, tokens: int, rng: random.Random) -> None:
        self.clock = MonotonicClock()
        self.watch = Watch()
        self.settings = settings
        self._outbox = Outbox()
        self._tokens = tokens
        self._rng = rng
        self._ids = count(1)
        self._under_way: set[SeqId] = set()
        self._mail: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._version = 1
        wake = Wake.open()
        self.engine: Engine = open_engine(
            settings, self._outbox, wake, self.clock, wrap=lambda runner: self.watch.around(runner, self.clock)
        )
        self.engine.loop.take([SetTenants(Tenants(1, (BUSY, PERSON)))])

    def set_goal(self, goal_s: float) -> None:
        """Set another goal from the next step on."""
        self._version += 1
        self.engine.loop.take([SetSettings(self._version, replace(self.settings, tbt_goal_s=goal_s))])

    def request(self, tenant: TenantId, tokens: int) -> Request:
        """Return a request with a new prompt and one output token."""
        vocab_size = self.engine.model.vocab_size
        prompt = pack_tokens([self._rng.randrange(vocab_size) for _ in range(tokens)])
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        return Request(
            id=SeqId(next(self._ids)), prompt=prompt, params=params, arrival_s=self.clock.now_s(), tenant=tenant,
            scope=tenant.encode(),
        )  # fmt: skip

    def turn(self) -> None:
        """Take the mail and make one step of the loop."""
        self._under_way -= self._outbox.ended
        mail: list[Submit] = []
        while len(self._under_way) < PROMPTS:
            request = self.request(BUSY.name, self._tokens)
            self._under_way.add(request.id)
            mail.append(Submit(request))
        while not self._mail.empty():
            mail.append(self._mail.get())
        self.engine.loop.take(mail)
        self.engine.loop.step()

    def run(self, until: Callable[[], bool]) -> None:
        """Make steps until a condition holds."""
        while not until():
            self.turn()

    def settle(self) -> None:
        """Make some steps with the current goal."""
        last = len(self.watch.ran) + WARM_STEPS
        self.run(lambda: len(self.watch.ran) >= last)

    def ask(self, arrivals: int) -> list[Wait]:
        """Send this many interactive requests one after another, and return their waits."""
        self.settle()
        asked: list[Request] = []
        longest_s = max(one.end_s - one.start_s for one in self.watch.ran[-WARM_STEPS:-2])

        def send() -> None:
            for _ in range(arrivals):
                time.sleep(longest_s * self._rng.uniform(3.0, 4.0))
                asked.append(self.request(PERSON.name, 32))
                self._mail.put(Submit(asked[-1]))

        sender = threading.Thread(target=send)
        sender.start()
        self.run(lambda: len(asked) == arrivals and all(one.id in self._outbox.ended for one in asked))
        sender.join()
        return [self._wait_of(one) for one in asked]

    def _wait_of(self, request: Request) -> Wait:
        running = self.watch.running(request.arrival_s)
        return Wait(
            self.watch.begun_s(request.id) - request.arrival_s, (running.end_s - running.start_s) / running.nano_batches
        )

    def end_prompts(self, number: int) -> float:
        """Run until this many prompts have ended. Return prompt tokens per second."""
        begun_s, last = self.clock.now_s(), len(self._outbox.ended) + number
        self.run(lambda: len(self._outbox.ended) >= last)
        return number * self._tokens / (self.clock.now_s() - begun_s)


def show_waits(name: str, waits: list[Wait]) -> float:
    """Print the waits of one arm. Return the longest, in nano-batches."""
    ratios = sorted(wait.seconds / wait.nano_batch_s for wait in waits)
    nano_batches_ms = [1e3 * wait.nano_batch_s for wait in waits]
    print(
        f"{name:>4}: {len(waits)} arrivals waited {statistics.median(ratios):.2f} nano-batches, "
        f"at most {ratios[-1]:.2f}; {statistics.median(1e3 * wait.seconds for wait in waits):.0f} ms, at most "
        f"{max(1e3 * wait.seconds for wait in waits):.0f} ms; nano-batches of {min(nano_batches_ms):.0f} to "
        f"{max(nano_batches_ms):.0f} ms",
        flush=True,
    )
    return ratios[-1]


def compare(busy: Busy, goal_s: float, pairs: int, prompts: int) -> float:
    """Measure prompt throughput in interleaved pairs. Return the median of on over off."""
    ratios: list[float] = []
    busy.end_prompts(1)
    for number in range(pairs):
        speed: dict[bool, float] = {}
        for is_on in (True, False) if number % 2 else (False, True):
            busy.set_goal(goal_s if is_on else OFF_S)
            speed[is_on] = busy.end_prompts(prompts)
        ratios.append(speed[True] / speed[False])
        print(f"pair {number + 1}: on {speed[True]:.1f}, off {speed[False]:.1f} tokens/s: {ratios[-1]:.3f}", flush=True)
    print(f"prompt throughput, on over off: median {statistics.median(ratios):.3f}, least {min(ratios):.3f}")
    return statistics.median(ratios)


def main() -> int:
    """Measure. Return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL_DIR))
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--step-tokens", type=int, default=0, help="--max-num-batched-tokens; 0: the default")
    parser.add_argument("--goal", type=float, default=0.2, help="--tbt-goal, seconds")
    parser.add_argument("--arrivals", type=int, default=16)
    parser.add_argument("--arrivals-off", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--pair-prompts", type=int, default=1, help="of one arm of a pair")
    parser.add_argument("--most", type=float, default=1.2, help="nano-batches")
    parser.add_argument("--least-throughput", type=float, default=0.95)
    parser.add_argument("--calibration", type=float, default=1.5, help="--calibration-seconds")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = EngineSettings(
        model=args.model,
        device="cpu",
        max_model_len=args.tokens + 64,
        max_num_batched_tokens=args.step_tokens or None,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        scheduling_policy="fair",
        tbt_goal_s=args.goal,
        calibration_s=args.calibration,
    )
    busy = Busy(settings, args.tokens, random.Random(args.seed))
    is_kept = True
    if args.arrivals:
        busy.set_goal(OFF_S if args.control else args.goal)
        is_kept = show_waits("on", busy.ask(args.arrivals)) <= args.most
    if args.arrivals_off:
        busy.set_goal(OFF_S)
        show_waits("off", busy.ask(args.arrivals_off))
    if args.pairs:
        ratio = compare(busy, OFF_S if args.control else args.goal, args.pairs, args.pair_prompts)
        is_kept = is_kept and ratio >= args.least_throughput
    print(f"load average {os.getloadavg()[0]:.1f}; {'kept' if is_kept else 'FAILED'}", flush=True)
    return 0 if is_kept else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for the running step
