"""`tiercel simulate` compared with `tiercel serve`: throughput and P99 TTFT at 60, 75 and 90 % of capacity, two loads.

python benchmarks/simulated.py [MODEL] [--seconds 60] [--loads 0.6 0.75 0.9] [--most-error 0.15] [--replicas 1]
                               [SERVE FLAG ...]

Serves MODEL (the embedded one by default). Three closed loops with requests of their own (1, 8 and 64 at once) give the
corrections of the simulation: a factor and an addend of the step times that the engine measured at its start, and the
times of the HTTP process and this client. The loop of 64 also gives the capacity. Then other requests are sent at
random times (open loop) at each share of the capacity, and as closed loops with the lowest concurrency that reaches
that share in the simulation. The same requests are simulated. Nothing is fitted to the runs that are compared.

Exit code 1 if a simulated P99 TTFT differs from the measured one by more than `--most-error`, or if a request fails.
The column *bare* is the ratio without the corrections and without HTTP; `--uncalibrated` checks that ratio and must
fail.

With `--replicas 2` a front and two engines, each with half of the threads, are compared with two simulated engines
behind the same router; then tokens per second and P50 TTFT are checked.

Takes about nine minutes with 60 s per point. Run it on a quiet machine: other work slows only the measured side.
The last column shows how many cores other work used; points with more than a tenth of a core are marked disturbed.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.daemon import cpu_s, running_daemon
from benchmarks.replicas import front
from benchmarks.streaming_client import StreamedAnswer, TimedRequest, closed_loop, open_loop
from tests.e2e.fleet import engine_host, make_secret
from tiercel.cli.simulate_input import read_step_times
from tiercel.simulation.fitting import ClosedLoop, Corrections, fit_steps, play
from tiercel.simulation.fleet import FleetSimSettings
from tiercel.simulation.http import HttpTimes
from tiercel.simulation.replay import FleetReplay, Replayed
from tiercel.simulation.simulator import SimSettings
from tiercel.simulation.workload import PromptPart, SimRequest, Workload, ordered_workload
from tiercel.values.ids import TenantId
from tiercel.values.tenant import TenantShare

PROMPT, OUTPUTS = 256, 16  # mean tokens
STEP_TOKENS, ROWS, MODEL_LEN = 256, 64, 4000
CALIBRATION = {1: 10.0, 8: 10.0, ROWS: 15.0}  # seconds by requests at once
REPLICA_S = 10.0  # of one request for each of several engines
MAX_OTHER_LOAD = 0.1  # cores
TENANT = TenantShare(name=TenantId("default"))


class OtherLoad:
    """Measures the cores that other work used: all busy time without that of the servers and this client."""

    def __init__(self, servers: Sequence[int]) -> None:
        children = (Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in servers)
        self._pids = [*servers, *(int(pid) for pids in children for pid in pids)]
        self._start_s = time.perf_counter()
        self._busy_s = self._elsewhere_s()

    def cores(self) -> float:
        """Return the average number of cores."""
        return max(0.0, self._elsewhere_s() - self._busy_s) / (time.perf_counter() - self._start_s)

    def _elsewhere_s(self) -> float:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return all_s - sum(map(cpu_s, self._pids)) - time.process_time()


class Point(NamedTuple):
    """One comparison of a measured and a simulated load."""

    name: str
    other_load: float  # cores busy with other work
    share: float  # of the capacity, measured
    requests: int
    failed: int
    rate: tuple[float, float]  # requests per second, measured and simulated
    tokens: tuple[float, float]  # tokens of prompts and answers per second
    p50_ms: tuple[float, float]
    p99_ms: tuple[float, float]
    bare_ratio: float  # simulated P99 without corrections / measured


def draw(seed: str, count: int, rate: float = 1.0) -> list[TimedRequest]:
    """Draw requests of random tokens at random times with log-normal lengths."""
    rng = random.Random(seed)
    requests: list[TimedRequest] = []
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate)
        prompt, outputs = (
            max(2, min(1500, round(mean * rng.lognormvariate(-0.125, 0.5)))) for mean in (PROMPT, OUTPUTS)
        )
        requests.append(
            TimedRequest(at_s=at_s, prompt=[rng.randrange(300, 1700) for _ in range(prompt)], outputs=outputs)
        )
    return requests


def as_workload(requests: list[TimedRequest], *, is_closed: bool = False) -> Workload:
    """Return the same requests for the simulation. No two prompts share a prefix."""
    return ordered_workload(
        (TENANT,),
        [
            SimRequest(
                0.0 if is_closed else request.at_s,
                TENANT.name,
                (PromptPart(number + 1, len(request.prompt)),),
                request.outputs,
            )
            for number, request in enumerate(requests)
        ],
    )


def lasted_s(answers: list[StreamedAnswer]) -> float:
    """Return the time at which the last answer ended."""
    return max(answer.end_s or 0.0 for answer in answers)


def request_times(answers: list[StreamedAnswer]) -> tuple[float, float]:
    """Return the milliseconds per request and per prompt token outside the engine: a line fitted to single requests.

    The engine's part, queue and prefill, is that of the `server-timing` header.
    """
    points: list[tuple[float, float]] = []
    for answer in answers:
        stages = dict(stage.split(";dur=") for stage in answer.timing.split(", "))
        outside_ms = 1e3 * answer.ttft_s - float(stages["queue"]) - float(stages["prefill"])
        points.append((float(len(answer.request.prompt)), max(0.0, outside_ms)))
    points = sorted(points, key=lambda point: point[1])[
        : -(-len(points) * 95 // 100)
    ]  # without outliers by pauses of the machine
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope


class Server(NamedTuple):
    """What serves the measured side."""

    url: str
    http_pid: int
    pids: tuple[int, ...]  # of the processes whose children compute, too


@contextlib.contextmanager
def serving(folder: Path, replicas: int, threads: int, flags: Sequence[str]) -> Iterator[Server]:
    """Serve by a daemon, or by a front and engines that have an equal part of the threads each."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    if replicas == 1:
        with running_daemon([*flags, "--threads", str(threads)], folder / "log.txt", environment=environment) as daemon:
            yield Server(daemon.url, daemon.process.pid, (daemon.process.pid,))
        return
    own = [*flags, "--threads", str(max(1, threads // replicas))]
    secret = make_secret(folder)
    with contextlib.ExitStack() as running:
        hosts, addresses = [], []
        for _ in range(replicas):  # one after the other: the first measures the times of steps alone
            hosts.append(running.enter_context(engine_host(folder, secret, *own, environment=environment)))
            addresses.append(hosts[-1].wait_ready())
        daemon = running.enter_context(front(folder, secret, addresses))
        pid = daemon.process.pid
        yield Server(daemon.url, pid, (pid, *(host.pid for host in hosts)))


def calibrate(
    url: str, pid: int, settings: SimSettings, contention: float, replicas: int
) -> tuple[Corrections, float, dict[int, list[StreamedAnswer]]]:
    """Return the corrections of the simulation, the capacity in requests per second, and the answers."""
    loops: list[ClosedLoop] = []
    answers_by_concurrency: dict[int, list[StreamedAnswer]] = {}
    request_ms = prompt_token_ms = token_ms = capacity = 0.0
    for concurrency, seconds in sorted((CALIBRATION | ({replicas: REPLICA_S} if replicas > 1 else {})).items()):
        requests = draw(f"calibration {concurrency}", 6000)
        busy_s = cpu_s(pid) + time.process_time()
        answers = checked(closed_loop(url, requests, concurrency, seconds))
        busy_s = cpu_s(pid) + time.process_time() - busy_s
        answers_by_concurrency[concurrency] = answers
        if concurrency == 1:
            request_ms, prompt_token_ms = request_times(answers)
        prompts = sum(len(answer.request.prompt) for answer in answers)
        own_ms = 1e3 * busy_s - request_ms * len(answers) - prompt_token_ms * prompts
        token_ms = max(0.0, own_ms / sum(answer.request.outputs for answer in answers))  # the last loop's counts
        capacity = len(answers) / lasted_s(answers)
        if concurrency < replicas:
            continue  # an engine whose neighbours on the machine are idle is faster than in every load that follows
        loops.append(
            ClosedLoop(
                workload=as_workload(requests, is_closed=True), concurrency=concurrency, begun_s=seconds,
                lasted_s=lasted_s(answers), requests=len(answers),
            )
        )  # fmt: skip
    http = HttpTimes(request_ms=request_ms, prompt_token_ms=prompt_token_ms, token_ms=token_ms, contention=contention)
    return fit_steps(settings, http, loops, replicas=replicas), capacity, answers_by_concurrency


def checked(answers: list[StreamedAnswer]) -> list[StreamedAnswer]:
    """Return the answers. Errors: SystemExit if one is incomplete."""
    failed = [answer for answer in answers if not answer.is_complete]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return answers


def simulate(
    settings: SimSettings, requests: list[TimedRequest], replicas: int, closes_s: float = float("inf")
) -> Replayed:
    """Simulate the same requests."""
    workload = as_workload(requests, is_closed=settings.concurrency is not None)
    if replicas == 1:
        return play(settings, workload, closes_s)
    replay = FleetReplay(FleetSimSettings(replicas=replicas, engine=settings), workload, closes_s=closes_s)
    replay.run()
    return replay


def finished(replay: Replayed) -> int:
    """Return the number of requests that a simulation answered."""
    return sum(engine.tally.finished for engine in replay.engines)


def ttft_ms(replay: Replayed) -> list[float]:
    """Return the simulated times to the first token."""
    return [1e3 * ttft_s for engine in replay.engines for ttft_s in engine.tally.by_tenant[TENANT.name].ttft_s]


def least_concurrency(settings: SimSettings, share: float, replicas: int) -> int:
    """Return the lowest concurrency at which the simulation reaches this share of its rate with all rows in use."""

    @functools.cache
    def rate(concurrency: int) -> float:
        replay = simulate(replace(settings, concurrency=concurrency), draw("concurrency", 2000), replicas, 8.0)
        return finished(replay) / replay.now_s

    wanted, low, high = share * rate(ROWS), 1, ROWS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rate(middle) >= wanted else (middle + 1, high)
    return low


def compare(
    name: str, other_load: float, capacity: float, answers: list[StreamedAnswer], replay: Replayed, plain: Replayed
) -> Point:
    """Compare the measured and the simulated side of one load."""
    done = [answer for answer in answers if answer.is_complete]
    measured = sorted(1e3 * answer.ttft_s for answer in done)
    simulated = ttft_ms(replay)
    tallies = [engine.tally.by_tenant[TENANT.name] for engine in replay.engines]
    measured_tokens = sum(len(answer.request.prompt) + answer.request.outputs for answer in done)
    simulated_tokens = sum(tally.prompt_tokens + tally.output_tokens for tally in tallies)
    rate = len(done) / lasted_s(done)
    p50, p99 = ((np.percentile(measured, part), np.percentile(simulated, part)) for part in (50, 99))
    rates = rate, finished(replay) / replay.now_s
    tokens = measured_tokens / lasted_s(done), simulated_tokens / replay.now_s
    bare_ratio = np.percentile(ttft_ms(plain), 99) / p99[0]
    failed = len(answers) - len(done)
    return Point(name, other_load, rate / capacity, len(done), failed, rates, tokens, p50, p99, bare_ratio)


def show(points: list[Point], most_error: float, replicas: int) -> int:
    """Print the table. Return the number of points that fail.

    Of one engine the P99 TTFT is compared, of several the tokens per second and the P50 TTFT.
    """
    print(
        f"{'load':>14} {'share':>6} {'requests':>9} {'a second':>9} {'simul.':>7}"
        f" {'tokens/s':>9} {'simul.':>7} {'P50 TTFT':>9} {'simul.':>7}",
        end="",
    )
    print(f" {'P99 TTFT':>9} {'simul.':>7} {'ratio':>6} {'bare':>5} {'other':>9}")
    wrong = 0
    for point in points:
        ratio = point.p99_ms[1] / point.p99_ms[0]
        compared = (point.p99_ms,) if replicas == 1 else (point.tokens, point.p50_ms)
        is_wrong = any(abs(pair[1] / pair[0] - 1) > most_error for pair in compared) or point.failed > 0
        wrong += is_wrong
        print(
            f"{point.name:>14} {point.share:>6.0%} {point.requests:>9} {point.rate[0]:>9.2f} {point.rate[1]:>7.2f}"
            f" {point.tokens[0]:>9.0f} {point.tokens[1]:>7.0f}"
            f" {point.p50_ms[0]:>6.0f} ms {point.p50_ms[1]:>4.0f} ms"
            f" {point.p99_ms[0]:>6.0f} ms {point.p99_ms[1]:>4.0f} ms"
            f" {ratio:>6.2f} {point.bare_ratio:>5.2f} {point.other_load:>9.2f}{' *' if is_wrong else ''}"
            f"{' disturbed' if point.other_load > MAX_OTHER_LOAD else ''}"
            f"{f' {point.failed} failed' if point.failed else ''}"
        )
    return wrong


def main() -> None:
    """Measure, simulate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.75, 0.9])
    parser.add_argument("--most-error", type=float, default=0.15)
    parser.add_argument("--uncalibrated", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="simulated-"))
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*flags, "--max-num-seqs", str(ROWS), "--max-num-batched-tokens", str(STEP_TOKENS)]
    flags += ["--max-model-len", str(MODEL_LEN), "--no-enable-prefix-caching"]
    flags += ["--calibration-seconds", "20"]
    points: list[Point] = []
    replicas = args.replicas
    with serving(folder, replicas, args.threads, flags) as server:
        url = server.url
        (times,) = (folder / "cache" / "tiercel").glob("step-times-*.json")
        bare = SimSettings(
            times=read_step_times(times), blocks=8192, max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS,
            max_model_len=MODEL_LEN, tbt_goal_ms=200.0, has_prefix_caching=False,
        )  # fmt: skip
        checked(closed_loop(url, draw("warm", 6000), 8, 3.0))
        contention = 1.0 if args.threads >= len(os.sched_getaffinity(0)) else 0.0
        calibration, capacity, _ = calibrate(url, server.http_pid, bare, contention, replicas)
        (folder / "calibration.json").write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
        settings = calibration.applied(bare)
        print(f"capacity {capacity:.2f} requests/s; {json.dumps(msgspec.to_builtins(calibration))}", flush=True)
        measured: list[tuple[str, float, list[StreamedAnswer], SimSettings, list[TimedRequest], float]] = []
        for load in args.loads:
            requests = draw(f"open {load}", round(load * capacity * args.seconds), load * capacity)
            other_load = OtherLoad(server.pids)
            answers = open_loop(url, requests)
            cores = other_load.cores()
            measured.append((f"open {load:.0%}", cores, answers, settings, requests, float("inf")))
        for load in args.loads:
            concurrency = least_concurrency(settings, load, replicas)
            requests = draw(f"closed {load}", round(1.5 * capacity * args.seconds))
            other_load = OtherLoad(server.pids)
            answers = closed_loop(url, requests, concurrency, args.seconds)
            cores = other_load.cores()
            closed = replace(settings, concurrency=concurrency)
            measured.append((f"closed, {concurrency}", cores, answers, closed, requests, args.seconds))
    for name, cores, answers, used, requests, closes_s in measured:
        plain = simulate(replace(bare, concurrency=used.concurrency), requests, replicas, closes_s)
        replay = plain if args.uncalibrated else simulate(used, requests, replicas, closes_s)
        points.append(compare(name, cores, capacity, answers, replay, plain))
    wrong = show(points, args.most_error, replicas)
    print(f"load average {os.getloadavg()[0]:.1f}, {args.threads} threads; results in {folder}")
    if wrong:
        raise SystemExit(f"FAILED: {wrong} of {len(points)} (marked *) off by more than {args.most_error:.0%}")


if __name__ == "__main__":
    main()
