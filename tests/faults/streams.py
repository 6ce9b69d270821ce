"""Clients that stream completions while the engine dies, and what they must have received."""

import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.daemon import Daemon, daemon
from tests.faults.crash_plan import CrashPlan

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 300.0  # of one read: a restart on a busy machine, never an outcome


@dataclass(frozen=True, slots=True)
class Ask:
    """One streamed completion: greedy, or sampled with a seed."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass
class Heard:
    """What one client has received."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    errors: list[str] = field(default_factory=list[str])
    is_complete: bool = False  # [DONE] has arrived

    @property
    def outcome(self) -> tuple[int, str, str | None, int, tuple[str, ...], bool]:
        """Everything that must not depend on crashes."""
        return (
            self.status, self.text, self.finish_reason, self.completion_tokens, tuple(self.errors), self.is_complete
        )  # fmt: skip


class StreamReader(threading.Thread):
    """A client that reads one stream in the background."""

    def __init__(self, url: str, ask: Ask) -> None:
        super().__init__(daemon=True)
        self.ask = ask
        self.heard = Heard()
        self.has_begun = threading.Event()
        self._url = url

    def run(self) -> None:
        heard = self.heard
        try:
            url = f"{self._url}/v1/completions"
            with httpx.stream("POST", url, json=self.ask.body, timeout=_PATIENCE_S) as answer:
                heard.status = answer.status_code
                if answer.status_code != 200:
                    heard.errors.append(answer.read().decode())
                    return
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.HTTPError as exc:
            heard.errors.append(repr(exc))

    def _take(self, line: str) -> None:
        heard, data = self.heard, line.removeprefix("data: ")
        if data == line:
            return
        if data == "[DONE]":
            heard.is_complete = True
            return
        event = json.loads(data)
        if "error" in event:
            heard.errors.append(data)
        for choice in event.get("choices", ()):
            heard.text += choice["text"]
            heard.finish_reason = choice["finish_reason"] or heard.finish_reason
            self.has_begun.set()
        if event.get("usage"):
            heard.completion_tokens = event["usage"]["completion_tokens"]

    @staticmethod
    def reading(url: str, ask: Ask) -> "StreamReader":
        """Return a reader that has received its first token."""
        reader = StreamReader(url, ask)
        reader.start()
        assert reader.has_begun.wait(60), reader.heard
        return reader

    def finished(self) -> Heard:
        """Wait for the end of the stream."""
        self.join(_PATIENCE_S)
        assert not self.is_alive(), f"the stream does not end: {self.heard}"
        return self.heard


def make_asks(rng: random.Random, prompts: Sequence[str], count: int, max_tokens: tuple[int, int]) -> list[Ask]:
    """Return different requests: every other one is greedy, the others are sampled with a seed of their own."""
    asks: list[Ask] = []
    for number in range(count):
        tokens = rng.randint(*max_tokens)
        prompt = f"{rng.choice(prompts)} Question {rng.randrange(1000)}:"
        asks.append(Ask(prompt, tokens, *((0.8, rng.randrange(1, 1 << 31)) if number % 2 else (0.0, 0))))
    return asks


def stream_all(url: str, asks: Sequence[Ask], clients: int) -> list[Heard]:
    """Stream all requests with a number of clients at once; return what was heard, in the order of the requests."""
    waiting = iter(list(enumerate(asks)))
    heard: dict[int, Heard] = {}
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                turn = next(waiting, None)
            if turn is None:
                return
            reader = StreamReader(url, turn[1])
            reader.run()
            heard[turn[0]] = reader.heard

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [heard[number] for number in range(len(asks))]


@contextmanager
def crashing_daemon(folder: Path, plan: CrashPlan, *flags: str) -> Iterator[Daemon]:
    """Serve the embedded model with engines that crash as planned."""
    variables = {"FAULT_FOLDER": str(plan.folder), "PYTHONPATH": str(ROOT)}
    program = (sys.executable, "-m", "tests.faults.faulty_daemon")
    with daemon(folder, *flags, program=program, variables=variables) as running:
        yield running


def wait_until_idle(running: Daemon, plan: CrashPlan, patience_s: float = 60.0) -> None:
    """Wait until the engine holds nothing and has found its books consistent once more."""
    running.assert_nothing_held()
    before, end_s = plan.checks(), time.monotonic() + patience_s
    running.complete("The end", max_tokens=1).raise_for_status()
    while plan.checks() == before:
        assert running.process.poll() is None, running.log.read_text()
        assert time.monotonic() < end_s, "the books of the idle engine were not checked"
        time.sleep(0.05)
