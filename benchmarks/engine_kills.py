"""Kills of the engine under load: 50 times SIGKILL while 32 streams are open, which see nothing but a pause.

    python benchmarks/engine_kills.py [--model FOLDER | --half-b] [--kills 50] [--streams 32] [FLAG ...]

A list of requests, greedy and with a seed by turns, is answered once by a daemon that is left alone. Then a second
daemon gets the same list, again and again, each time under another `cache_salt`, with this many streams open, and its
engine is killed at random times until all kills are done. Without a folder the embedded model is served; `--half-b`
makes a folder with a Qwen2 of the 0.5 B class and random weights. All in float32. Further flags go to both daemons.

Exit code 1 unless

* no request fails, and each has the text, finish reason and usage of the daemon that was left alone; a greedy answer
  may differ where the margin of the two likeliest tokens is under 1e-4, which is counted and printed;
* after each kill some stream has its next token within the time to start an engine and 2 s (embedded: within 4 s), of
  which the time to load the model is printed;
* at least 90 % of the tokens of the resumed sequences were found in the cache.

`--control` switches the prefix cache off, so that nothing is found: it must fail."""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.checks import missed_checks, percentile
from benchmarks.daemon import Daemon, running_daemon
from benchmarks.engine_pid import engine_pid, kill_engine
from benchmarks.restart import make_model
from benchmarks.soak.watch import read_page
from benchmarks.ties import is_tie
from benchmarks.whole_answer import TEXT, Outcome, WholeAnswer, ask, fetch

LEAST_FOUND = 0.9
EMBEDDED_S, MARGIN_S = 4.0, 2.0  # to the next token: in all, and beyond the median start of an engine
DISTINCT = 64  # requests in the list
PATIENCE_S = 300.0  # until the next token of any stream
STREAM_PATIENCE_S = 3600.0  # for a whole answer: with kills every few seconds a large model takes minutes for one
_SHORTEST_LIFE_S = 0.2  # from the first token of an engine to its kill
_RECENT = 256  # requests among which those with open streams are
_UNREAD_S = 0.1  # what the dead engine has sent may reach the client after the next one has been started


class Kill(NamedTuple):
    """A kill. Tokens that come after `replaced_s` are those of the next engine: the dead one's are read before."""

    at_s: float
    replaced_s: float  # when the next process had been started


@dataclass(slots=True)
class Kills:
    """The killed run. Times are those of `time.monotonic`."""

    answers: list[WholeAnswer] = field(default_factory=list[WholeAnswer])  # in the order of the list, again and again
    kills: list[Kill] = field(default_factory=list[Kill])
    open_streams: list[int] = field(default_factory=list[int])  # at each kill
    is_over: bool = False

    def has_token_since(self, since_s: float) -> bool:
        """True if a stream has had a token after that time."""
        return any(one.piece_times_s and one.piece_times_s[-1] > since_s for one in self.answers[-_RECENT:])

    def next_tokens_s(self) -> list[float]:
        """Return the seconds from each kill to the next token of any stream."""
        times_s = sorted(at_s for answer in self.answers for at_s in answer.piece_times_s)
        return [
            next((at_s - kill.at_s for at_s in times_s if at_s > kill.replaced_s), float("inf")) for kill in self.kills
        ]

    def pauses_s(self) -> list[float]:
        """Return the longest pause of each stream that lasted over a kill."""
        longest: list[float] = []
        for answer in self.answers:
            pairs = list(itertools.pairwise(answer.piece_times_s))
            if pauses := [b - a for a, b in pairs if any(a < kill.replaced_s < b for kill in self.kills)]:
                longest.append(max(pauses))
        return longest


def draw_bodies(seed: int, prompt: int, outputs: int) -> list[dict[str, object]]:
    """Return the bodies of the list: prompts of random tokens, greedy and with a seed by turns."""
    draw = random.Random(seed)
    bodies: list[dict[str, object]] = []
    for number in range(DISTINCT):
        sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.9, "seed": draw.randrange(1 << 31)}
        tokens = [draw.randrange(100, 1500) for _ in range(draw.randint(prompt // 2, prompt))]
        # With token ids each token has its event; a letter of a random model may take several tokens.
        stream = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        length = {"max_tokens": draw.randint(outputs // 2, outputs), "ignore_eos": True}
        bodies.append({"prompt": tokens, **length, **sampling, **stream})
    return bodies


def requests(bodies: Sequence[dict[str, object]]) -> Iterator[WholeAnswer]:
    """Yield the list again and again, with nothing to find of the time before."""
    for turn in itertools.count():
        for number, body in enumerate(bodies):
            yield WholeAnswer(TEXT, {**body, "cache_salt": f"turn-{turn}"}, request_id=f"kill-{turn}-{number}")


async def undisturbed(url: str, bodies: Sequence[dict[str, object]], streams: int) -> list[WholeAnswer]:
    """Return the answers to the list of a daemon that is left alone. Errors: SystemExit if one fails."""
    answers = list(itertools.islice(requests(bodies), len(bodies)))
    await _work(url, iter(answers), streams)
    if wrong := [answer for answer in answers if answer.outcome is not Outcome.ANSWERED]:
        raise SystemExit(f"the undisturbed run failed: {wrong[0].outcome.value} {wrong[0].error}")
    return answers


async def killed(
    daemon: Daemon, bodies: Sequence[dict[str, object]], streams: int, kills: int, most_s: float, seed: int
) -> Kills:
    """Keep the streams open until all kills are done, then let them end."""
    run = Kills()

    def feed() -> Iterator[WholeAnswer]:
        for answer in requests(bodies):
            if run.is_over:
                return
            run.answers.append(answer)
            yield answer

    async with asyncio.TaskGroup() as group:
        group.create_task(_work(daemon.url, feed(), streams))
        try:
            await _kill(daemon, run, kills, most_s, random.Random(seed))
        finally:
            run.is_over = True
    return run


async def _work(url: str, left: Iterator[WholeAnswer], streams: int) -> None:
    async def one() -> None:
        for answer in left:
            await ask(url, answer, patience_s=STREAM_PATIENCE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one())


async def _kill(daemon: Daemon, run: Kills, kills: int, most_s: float, draw: random.Random) -> None:
    """Kill the engine at random times, each a moment, at most `most_s`, after tokens have come from it."""
    for _ in range(kills):  # fewer kills than asked for are a missed check
        since_s = run.kills[-1].replaced_s if run.kills else 0.0
        if not await _wait(lambda since_s=since_s: run.has_token_since(since_s), daemon):
            return
        await asyncio.sleep(draw.uniform(_SHORTEST_LIFE_S, most_s))
        run.open_streams.append(sum(answer.outcome is Outcome.OPEN for answer in run.answers))
        pid = await asyncio.to_thread(kill_engine, daemon.process.pid)
        at_s = time.monotonic()
        await _wait(lambda pid=pid: engine_pid(daemon.process.pid) not in (None, pid), daemon)
        run.kills.append(Kill(at_s, time.monotonic() + _UNREAD_S))


async def _wait(condition: Callable[[], bool], daemon: Daemon) -> bool:
    """Wait for a condition. Return False if the daemon ends, or the patience does."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s or daemon.process.poll() is not None:
            return False
        await asyncio.sleep(0.01)
    return True


async def differences(url: str, run: Kills, expected: Sequence[WholeAnswer]) -> tuple[list[str], list[str]]:
    """Return the ids of the wrong answers, and of those that are excused at a tie."""
    wrong: list[str] = []
    ties: list[str] = []
    for place, answer in enumerate(run.answers):
        if answer.outcome is not Outcome.ANSWERED or answer.said == expected[place % len(expected)].said:
            continue
        (ties if await is_tie(url, answer) else wrong).append(answer.request_id)
    return wrong, ties


def load_times_s(log: str) -> list[float]:
    """Return the seconds that each engine of a log took to load the model."""
    lines = [line for line in log.splitlines() if '"load_s"' in line]
    return [float(json.loads(line)["load_s"]) for line in lines]


def start_times_s(log: str) -> list[float]:
    """Return the seconds from the start of each engine process of a log until it took requests."""
    times_s: list[float] = []
    started_s: float | None = None
    for line in log.splitlines():
        if '"engine_started"' in line:
            started_s = _time_of(line)
        elif '"tenants set' in line and started_s is not None:
            times_s.append(_time_of(line) - started_s)
            started_s = None
    return times_s


def _time_of(line: str) -> float:
    return datetime.fromisoformat(json.loads(line)["ts"]).timestamp()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--half-b", action="store_true")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=300, help="longest prompt, in tokens")
    parser.add_argument("--outputs", type=int, default=200, help="longest answer, in tokens")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--life", type=float, default=2.0, help="longest time from a token to the kill, seconds")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--log", type=Path, help="keep the log of the killed daemon here")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="engine-kills-") as name:
        folder = Path(name)
        model = [str(args.model)] if args.model else make_model(folder / "model") if args.half_b else []
        common = [*model, "--dtype", "float32", *flags]
        bodies = draw_bodies(args.seed, args.prompt, args.outputs)
        log = args.log or folder / "killed.log"
        with running_daemon(common, folder / "alone.log") as alone:
            expected = asyncio.run(undisturbed(alone.url, bodies, args.streams))
        with running_daemon([*common, *(["--no-enable-prefix-caching"] if args.control else [])], log) as daemon:
            run = asyncio.run(killed(daemon, bodies, args.streams, args.kills, args.life, args.seed))
            has_engine = engine_pid(daemon.process.pid) is not None
            page = read_page(asyncio.run(fetch(daemon.url, "/metrics"))[1].decode()) if has_engine else {}
            wrong, ties = asyncio.run(differences(daemon.url, run, expected)) if has_engine else ([], [])
        loads_s, starts_s = load_times_s(log.read_text()), start_times_s(log.read_text())
    start_s = percentile(starts_s, 0.5)
    print(f"start of an engine: median {start_s:.2f} s, longest {max(starts_s, default=0):.2f} s")
    limit_s = start_s + MARGIN_S if model else EMBEDDED_S
    return int(bool(missed_checks(judge(run, args.kills, limit_s, loads_s, page, wrong, ties))))


def judge(
    run: Kills,
    kills: int,
    limit_s: float,
    loads_s: Sequence[float],
    page: dict[str, float],
    wrong: Sequence[str],
    ties: Sequence[str],
) -> list[tuple[str, bool]]:
    """Print the failures and return the checks."""
    failed = [answer for answer in run.answers if answer.outcome is not Outcome.ANSWERED]
    for answer in failed[:10]:
        print(f"{answer.request_id}: {answer.outcome.value} status {answer.status} {answer.error}")
    for request_id in wrong[:10]:
        print(f"{request_id}: differs from the undisturbed run")
    resumed = page.get("tiercel_resumed_tokens_total", 0.0)
    found = page.get("tiercel_resumed_cached_tokens_total", 0.0)
    share = found / max(resumed, 1)
    next_s, pauses_s = run.next_tokens_s(), run.pauses_s()
    streams = f"{min(run.open_streams, default=0)} to {max(run.open_streams, default=0)} open streams"
    print(
        f"load of the model: {min(loads_s, default=0):.2f} to {max(loads_s, default=0):.2f} s; kill to next token: "
        f"median {percentile(next_s, 0.5):.2f} s, longest {max(next_s, default=0):.2f} s; longest pause of a stream "
        f"{max(pauses_s, default=0):.2f} s, median {percentile(pauses_s, 0.5):.2f} s"
    )
    return [
        (f"{len(run.kills)} kills with {streams}: {kills}", len(run.kills) == kills),
        (f"{len(failed)} of {len(run.answers)} requests failed: 0", not failed and bool(run.answers)),
        (f"{len(wrong)} answers differ, {len(ties)} more at ties (under 1e-4): 0", not wrong),
        (
            f"kill to next token {max(next_s, default=0):.2f} s, at most {limit_s:.2f} s",
            max(next_s, default=float("inf")) <= limit_s,
        ),
        (
            f"{found:.0f} of {resumed:.0f} resumed tokens found in the cache ({share:.1%}), at least {LEAST_FOUND:.0%}",
            share >= LEAST_FOUND,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
