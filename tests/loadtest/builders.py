"""Builders for the load test: records, texts without a tokenizer, and a stub server in a process of its own."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tiercel.loadtest.bench import run_bench
from tiercel.loadtest.client.assignment import Progress
from tiercel.loadtest.load.tokens import TextMaker
from tiercel.loadtest.results.record import ClientRecord, RunResult
from tiercel.loadtest.settings import BenchSettings
from tiercel.values.clock import MonotonicClock

STUB = Path(__file__).with_name("stub_server.py")


class WordCounter:
    """Counts one token per word."""

    is_exact = True
    source = "words"

    def count(self, text: str) -> int:
        return len(text.split())


class Quiet:
    """An observer that remembers the stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str, requests: int) -> None:
        self.stages.append(text)

    def progress(self, progress: Progress) -> None:
        """Ignore the progress."""


def texts() -> TextMaker:
    return TextMaker(WordCounter())


def record(
    sent_s: float = 0.0,
    chunks_s: Sequence[float] = (),
    *,
    tenant: str = "default",
    due_s: float | None = None,
    output_tokens: int | None = None,
    input_tokens: int = 10,
    cached_tokens: int | None = None,
    error: str | None = None,
    end_s: float | None = None,
) -> ClientRecord:
    """Return a record; by default it ends with its last chunk and has one token per chunk."""
    return ClientRecord(
        index=0,
        tenant=tenant,
        due_s=sent_s if due_s is None else due_s,
        sent_s=sent_s,
        first_s=chunks_s[0] if chunks_s else None,
        end_s=end_s if end_s is not None else (chunks_s[-1] if chunks_s else sent_s),
        chunks_s=tuple(chunks_s),
        input_tokens=input_tokens,
        output_tokens=len(chunks_s) if output_tokens is None else output_tokens,
        cached_tokens=cached_tokens,
        error=error,
    )


@contextmanager
def stub_server(*arguments: str) -> Iterator[str]:
    """Run a new stub and yield its URL."""
    with subprocess.Popen([sys.executable, str(STUB), *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def log_of(url: str) -> list[dict[str, Any]]:
    """Return the stub's log of requests with its own times."""
    return httpx.get(f"{url}/log", trust_env=False).json()


def run(settings: BenchSettings, observer: Quiet | None = None) -> RunResult:
    """Run a load test as the command does."""
    work = run_bench(settings, ["bench"], None, MonotonicClock(), "20260101-000000", observer or Quiet())
    return asyncio.run(work)
