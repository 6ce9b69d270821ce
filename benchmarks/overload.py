"""Predictive refusal at three times the capacity of the server.

    python benchmarks/overload.py [MODEL] [--seconds 30] [--factor 3] [--goal 1] [SERVE FLAG ...]

Measures with closed loops how many requests per second of a chat and of a batch tenant the server answers while both
always have waiting requests. Then sends requests of both at random times at `--factor` times these rates, to a new
server for each run:

| run | the chat tenant | what must hold |
|---|---|---|
| goal | has a goal for the first token | see below |
| none | the same requests without a goal, so that none is refused | this is the control |
| cheaper | long answers; the goal, and reduced service is allowed | >= 99.5 % answered, in full or marked as reduced |

A first token is in time if the client has it within the goal after its request was due. Checks of the run with a goal:

* at least 95 % of the admitted requests are in time;
* *precision*, at least 90 %: the part of the refused requests that is late in the control;
* *recall*, at least 90 %: of the rightly refused and the late admitted requests, the part that was refused;
* the requests in time are at least 70 % of those that the closed loop answered, which refusing all would miss.

The first two seconds, in which the new server learns its speeds, do not count. Exit code 1 if a check is missed.
`--off` runs the first without the goal and the last without permission for reduced service; all checks but the last
must then fail. The run takes about three minutes. Run it on a quiet machine: a pause distorts every figure."""

import argparse
import json
import os
import random
import tempfile
import threading
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.daemon import Daemon, running_daemon
from benchmarks.streaming_client import StreamedAnswer, TimedRequest, closed_loop, open_loop

CHAT, WORDY, BATCH = (96, 24), (64, 96), (512, 64)  # tokens of a prompt and of an answer
KEPT, PRECISION, RECALL, GOODPUT, ANSWERED = 0.95, 0.9, 0.9, 0.7, 0.995
CHEAPER = "best_effort: {max_tokens: 8, band: 1}"
CLIENTS = {"chat": 32, "batch": 12}  # at once, while the capacity is measured


def tenants_file(goal_s: float | None, best_effort: str = "") -> str:
    """Return a tenants file; None: no goal."""
    goal = "" if goal_s is None else f", slo: {{class: interactive, ttft_s: {goal_s:g}}}"
    cheaper = f", {best_effort}" if best_effort else ""
    return f"""\
tenants:
  - {{name: chat, key: chat-key{goal}{cheaper}}}
  - {{name: batch, key: batch-key, slo: {{class: batch}}}}
"""


def draw(name: str, lengths: tuple[int, int], key: str, times_s: list[float]) -> list[TimedRequest]:
    """Draw requests of random tokens; lengths vary uniformly by up to a half, up and down."""
    rng = random.Random(name)
    requests: list[TimedRequest] = []
    for at_s in times_s:
        prompt, outputs = (max(1, round(mean * rng.uniform(0.5, 1.5))) for mean in lengths)
        requests.append(
            TimedRequest(at_s=at_s, prompt=[rng.randrange(300, 1700) for _ in range(prompt)], outputs=outputs, key=key)
        )
    return requests


def poisson(name: str, rate: float, seconds: float) -> list[float]:
    """Draw the times of a Poisson process."""
    rng, times_s, at_s = random.Random(f"{name} times"), list[float](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        times_s.append(at_s)
    return times_s


def daemon_with(folder: Path, name: str, tenants: str, flags: list[str]) -> AbstractContextManager[Daemon]:
    """Return a daemon with this tenants file, as a context manager."""
    (folder / f"{name}.yaml").write_text(tenants)
    return running_daemon([*flags, "--tenants-config", str(folder / f"{name}.yaml")], folder / f"{name}.log")


def capacity(url: str, shape: tuple[int, int], seconds: float = 8.0) -> tuple[float, float]:
    """Return the requests per second of the chat and of the batch tenant while both always have waiting requests."""
    answers: dict[str, list[StreamedAnswer]] = {}

    def load(name: str, lengths: tuple[int, int]) -> None:
        requests = draw(f"closed {name}", lengths, f"{name}-key", [0.0] * 3000)
        answers[name] = closed_loop(url, requests, CLIENTS[name], seconds)

    threads = [threading.Thread(target=load, args=pair) for pair in (("chat", shape), ("batch", BATCH))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rates = {
        name: sum((one.end_s or seconds + 1) <= seconds for one in found) / seconds for name, found in answers.items()
    }
    if not min(rates.values()):
        raise SystemExit(f"the server answered nothing of one tenant in {seconds:g} s: {rates}; is the machine busy?")
    return rates["chat"], rates["batch"]


class Run:
    """The chat tenant's requests in one run. Requests sent before `from_s` do not count."""

    def __init__(self, answers: list[StreamedAnswer], goal_s: float, from_s: float) -> None:
        self.chat = [one for one in answers if one.request.key == "chat-key" and one.due_s >= from_s]
        self.admitted = [one for one in self.chat if one.status in (0, 200)]  # 0: no response within the patience
        self.is_late = [one.ttft_s > goal_s for one in self.chat]
        self.kept = sum(one.ttft_s <= goal_s for one in self.admitted)
        self.answered = sum(
            one.is_complete and (one.tokens >= one.request.outputs or one.service in ("shortened", "deferred"))
            for one in self.chat
        )
        self.services = Counter(one.service or str(one.status) for one in self.chat)
        self.batch_tokens = sum(one.tokens for one in answers if one.request.key == "batch-key")
        waits = sorted(one.ttft_s for one in self.admitted)
        self.p95_s = waits[int(0.95 * len(waits))] if waits else float("nan")

    @property
    def kept_share(self) -> float:
        """Part of the admitted requests that kept the goal."""
        return self.kept / max(len(self.admitted), 1)

    def rightly_refused(self, control: "Run") -> int:
        """Return the number of refused requests whose first token is late in the control."""
        pairs = zip(self.chat, control.is_late, strict=True)
        return sum(is_late for one, is_late in pairs if one.status not in (0, 200))


def show(name: str, run: Run) -> None:
    """Print a line of the table."""
    print(
        f"{name:>8} {len(run.chat):>6} {len(run.admitted):>9} {run.kept_share:>8.1%} {run.kept:>8} {run.p95_s:>8.2f} s"
        f" {run.answered:>9} {run.batch_tokens:>13}  {dict(run.services)}",
        flush=True,
    )


def judge(runs: dict[str, Run], possible: float) -> list[str]:
    """Print each check. Return the names of those that are missed."""
    checks: list[tuple[str, float, float]] = []
    if "goal" in runs and "none" in runs:
        goal, none = runs["goal"], runs["none"]
        right, refused = goal.rightly_refused(none), len(goal.chat) - len(goal.admitted)
        missed = len(goal.admitted) - goal.kept
        checks.append(("share of the admitted that keep the goal", goal.kept_share, KEPT))
        checks.append((f"precision of {refused} refusals", right / max(refused, 1), PRECISION))
        checks.append(("recall of refusals", right / max(right + missed, 1), RECALL))
        checks.append((f"requests in time, of the {possible:.0f} that can be served", goal.kept / possible, GOODPUT))
    if "cheaper" in runs:
        cheaper = runs["cheaper"]
        checks.append(("answered where less is allowed", cheaper.answered / max(len(cheaper.chat), 1), ANSWERED))
    wrong: list[str] = []
    for name, value, least in checks:
        print(f"{'ok' if value >= least else 'WRONG':>6}  {name}: {value:.3f}, at least {least:g}")
        if value < least:
            wrong.append(name)
    return wrong


def main() -> None:
    """Print a line for each run, then the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--learning", type=float, default=2.0)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--goal", type=float, default=1.0)
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--runs", nargs="+", default=["goal", "none", "cheaper"])
    args, flags = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="overload-"))
    with daemon_with(folder, "closed", tenants_file(None), flags) as daemon:
        rates = {shape: capacity(daemon.url, shape) for shape in (CHAT, WORDY)}
    print(
        f"capacity: {rates[CHAT][0]:.2f} chat and {rates[CHAT][1]:.2f} batch requests/s; with long answers"
        f" {rates[WORDY][0]:.2f} and {rates[WORDY][1]:.2f}; {args.factor:g} times that for {args.seconds:g} s"
    )
    print(
        f"{'run':>8} {'sent':>6} {'admitted':>9} {'in goal':>8} {'requests':>8} {'P95 TTFT':>10} {'answered':>9}",
        end="",
    )
    print(f" {'batch tokens':>13}")
    runs: dict[str, Run] = {}
    for name in args.runs:
        goal_s = None if name == "none" or (name == "goal" and args.off) else args.goal
        cheaper = CHEAPER if name == "cheaper" and not args.off else ""
        shape = WORDY if name == "cheaper" else CHAT
        patience_s = 90.0 if name == "cheaper" else 2 * args.goal + 2
        requests = [
            request
            for kind, lengths, rate in (("chat", shape, rates[shape][0]), ("batch", BATCH, rates[shape][1]))
            for request in draw(kind, lengths, f"{kind}-key", poisson(kind, args.factor * rate, args.seconds))
        ]
        with daemon_with(folder, name, tenants_file(goal_s, cheaper), flags) as daemon:
            answers = open_loop(daemon.url, requests, patience_s=patience_s)
        runs[name] = Run(answers, args.goal, 0.0 if name == "cheaper" else args.learning)
        show(name, runs[name])
        figures = [[one.request.key, one.due_s, one.status, one.service, one.first_s, one.end_s] for one in answers]
        (folder / f"{name}.json").write_text(json.dumps(figures))
    wrong = judge(runs, rates[CHAT][0] * (args.seconds - args.learning))
    print(f"load average {os.getloadavg()[0]:.1f}; logs in {folder}")
    if wrong:
        raise SystemExit(f"FAILED: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
