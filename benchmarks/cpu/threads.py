"""Decoding speed of an engine on a CPU while others use the cores: a busy process, or a second engine.

    python benchmarks/cpu/threads.py [MODEL] [--streams 1] [--seconds 3] [--rounds 3] [--least-beside 0.6]
                                     [--least-each 0.45] [--control]

Two engines are opened in processes of their own, with the environment and the number of threads of `tiercel serve`.
Each round measures the tokens per second of decode steps of the first engine alone, beside a process with one busy
thread in its own session (to which the kernel gives a whole core of two, as it does to a container) and in the session
of the engine, and of both engines together. Prints medians, and their ratio to the speed of the same engine alone.

Exit code 1 if an engine beside the busy process has less than --least-beside of its speed alone, or if one of two
engines has less than --least-each. The limits are for two cores. --control fixes the number of threads and leaves
libgomp's default for GOMP_SPINCOUNT; it must fail. Run it on a quiet machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from benchmarks.checks import missed_checks
from tiercel.embedded import MODEL_DIR
from tiercel.system.openmp import engine_environment

PROMPT_TOKENS = 16
ANSWER_TOKENS = 24
BUSY = "while True: pass"
DEFAULT_SPINS = "300000"  # of libgomp


def serve(model: str, streams: int, is_fixed: bool) -> None:
    """Answer each line of standard input, a number of seconds, with the tokens per second of decoding for that time."""
    # lazy: the parent process does not need torch
    from tiercel.device.cpu import CpuDevice
    from tiercel.engine.offline import OfflineEngine, OfflineRequest
    from tiercel.settings.settings import EngineSettings
    from tiercel.values.clock import MonotonicClock
    from tiercel.values.request import SamplingParams, pack_tokens

    clock, rng = MonotonicClock(), random.Random(1)
    settings = EngineSettings(
        model=model, num_gpu_blocks_override=16 * streams, max_model_len=128, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    requests = [OfflineRequest(pack_tokens(rng.choices(range(1000), k=PROMPT_TOKENS)), params) for _ in range(streams)]
    with OfflineEngine.open(settings, clock, CpuDevice(adapts=not is_fixed)) as engine:
        engine.run(requests)
        print("ready", flush=True)
        for line in sys.stdin:
            end_s, tokens, decoding_s = clock.now_s() + float(line), 0, 0.0
            while clock.now_s() < end_s:
                answers = engine.run(requests).answers
                tokens += streams * (ANSWER_TOKENS - 1)
                decoding_s += max(one.last_s for one in answers) - max(one.first_s for one in answers)
            print(json.dumps(tokens / decoding_s), flush=True)


class Child:
    """An engine in a process of its own. Use with `with`."""

    def __init__(self, model: str, streams: int, is_fixed: bool) -> None:
        environment = engine_environment()
        if is_fixed:
            environment["GOMP_SPINCOUNT"] = DEFAULT_SPINS
        self._process = subprocess.Popen(
            [sys.executable, __file__, model, "--serve", "--streams", str(streams), *["--control"] * is_fixed],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def answer(self) -> str:
        """Wait for a line of the process."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit("the engine has ended; run this file with MODEL --serve to see why")
        return line

    def speed(self, seconds: float) -> float:
        """Return the tokens per second of decoding for this time."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self.answer())


def beside_busy(child: Child, seconds: float, *, own_session: bool) -> float:
    """Return the speed beside a busy process."""
    busy = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=own_session)
    try:
        return child.speed(seconds)
    finally:
        busy.kill()
        busy.wait()


def measure(first: Child, second: Child, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the speeds of each case, one for each round."""
    speeds: dict[str, list[float]] = {
        name: [] for name in ("first alone", "second alone", "own session", "same session", "first", "second")
    }
    with ThreadPoolExecutor(2) as pool:
        for _ in range(rounds):
            speeds["first alone"].append(first.speed(seconds))
            speeds["own session"].append(beside_busy(first, seconds, own_session=True))
            speeds["same session"].append(beside_busy(first, seconds, own_session=False))
            both = list(pool.map(lambda child: child.speed(seconds), (first, second)))
            speeds["first"].append(both[0])
            speeds["second"].append(both[1])
            speeds["second alone"].append(second.speed(seconds))
    return speeds


def main() -> int:
    """Print the table and the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL_DIR))
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least-beside", type=float, default=0.6)
    parser.add_argument("--least-each", type=float, default=0.45)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.model, given.streams, given.control)
        return 0
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this benchmark needs at least two cores")
    with ExitStack() as children:
        first, second = (children.enter_context(Child(given.model, given.streams, given.control)) for _ in range(2))
        first.answer()
        second.answer()
        print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, {given.model}")
        speeds = measure(first, second, given.seconds, given.rounds)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    shares: dict[str, float] = {}
    for name, values in speeds.items():
        shares[name] = medians[name] / medians["second alone" if name.startswith("second") else "first alone"]
        rounds = " ".join(f"{value:.1f}" for value in values)
        print(f"  {name:<14} {medians[name]:7.1f} tokens/s  {shares[name]:5.0%}   {rounds}")
    checks = [
        (f"beside a busy process, {name}: at least {given.least_beside:.0%}", shares[name] >= given.least_beside)
        for name in ("own session", "same session")
    ]
    checks += [
        (f"{name} of two engines: at least {given.least_each:.0%}", shares[name] >= given.least_each)
        for name in ("first", "second")
    ]
    return 1 if missed_checks(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
