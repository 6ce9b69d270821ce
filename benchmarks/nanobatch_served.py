"""Gain from the nano-batch splits that `tiercel calibrate` finds: a mixed load over HTTP, split against whole steps.

    python benchmarks/nanobatch_served.py MODEL [--pairs 20] [--context 2048] [--turns 4] [--answer 24] [--streams 4]
                                          [--least-gain 0.05] [--keep FOLDER] [SERVE FLAG ...]

Runs `tiercel calibrate` (five minutes; with --keep FOLDER its cache is reused), then serves MODEL twice: once with
the table that was found, once with the same step times and no table. In every pair each server gets the same load, and
the order turns: --streams conversations at once, each behind a cached context of --context tokens, each turn of 32 to
400 new tokens and an answer. Only one server is busy at a time.

Exit code 1 unless the server with the table ran more nano-batches than steps and the median pair has at least
--least-gain less time. Run it on a quiet machine.
"""

import argparse
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.daemon import TIERCEL, running_daemon


class Load(NamedTuple):
    """The load of one arm."""

    context: int  # tokens that are cached
    turns: int
    answer: int  # tokens
    streams: int


def cache_of(folder: Path) -> dict[str, str]:
    """Return the variable that moves the cache of tiercel to a folder."""
    return {"XDG_CACHE_HOME": str(folder)}


def counted(url: str) -> tuple[float, float]:
    """Return the numbers of steps and nano-batches so far."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = [re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in _COUNTERS]
    steps, nano_batches = (0.0 if one is None else float(one[1]) for one in found)
    return steps, nano_batches


_COUNTERS = ("tiercel_steps_total", "tiercel_nano_batches_total")


def converse(url: str, load: Load, number: int, stream: int) -> None:
    """Hold one conversation: its context is cached, its turns are new in every pair."""
    rng = random.Random(1000 * number + stream)
    prompt = context_of(load, stream)
    for _ in range(load.turns):
        prompt = [*prompt, *(rng.randrange(10, 1500) for _ in range(rng.randrange(32, 400)))]
        body = {"prompt": prompt, "max_tokens": load.answer, "ignore_eos": True, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()


def context_of(load: Load, stream: int) -> list[int]:
    """Return the context of a stream, the same in every pair."""
    rng = random.Random(stream)
    return [rng.randrange(10, 1500) for _ in range(load.context)]


def run(url: str, load: Load, number: int) -> float:
    """Return the seconds of the whole load."""
    started_s = time.perf_counter()
    with ThreadPoolExecutor(load.streams) as pool:
        for one in [pool.submit(converse, url, load, number, stream) for stream in range(load.streams)]:
            one.result()
    return time.perf_counter() - started_s


def main() -> int:
    """Measure. Return 1 without the required gain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--least-gain", type=float, default=0.05)
    parser.add_argument("--keep", type=Path, help="where the table is kept, or has been")
    args, flags = parser.parse_known_args()
    load = Load(args.context, args.turns, args.answer, args.streams)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        cut, whole = args.keep or Path(temporary, "cut"), Path(temporary, "whole")
        if not list(cut.glob("tiercel/splits-*.json")):
            cut.mkdir(parents=True, exist_ok=True)
            subprocess.run([TIERCEL, "calibrate", args.model, *flags], env={**os.environ, **cache_of(cut)}, check=True)
        flags += ["--calibration-seconds", "20"]
        flags = [args.model, *flags]
        daemons = [servers.enter_context(running_daemon(flags, Path(temporary, "cut.log"), environment=cache_of(cut)))]
        shutil.copytree(cut, whole, ignore=shutil.ignore_patterns("splits-*"))
        whole_cache = cache_of(whole)
        daemons.append(
            servers.enter_context(running_daemon(flags, Path(temporary, "whole.log"), environment=whole_cache))
        )
        urls = [daemon.url for daemon in daemons]
        for url in urls:
            for stream in range(load.streams):  # caches the contexts and warms up the servers
                body = {"prompt": context_of(load, stream), "max_tokens": 1}
                httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
        before = counted(urls[0])
        ratios: list[float] = []
        for number in range(args.pairs):
            taken_s = [0.0, 0.0]
            for arm in (0, 1) if number % 2 else (1, 0):
                taken_s[arm] = run(urls[arm], load, number)
            ratios.append(taken_s[0] / taken_s[1])
            print(f"pair {number + 1}: cut {taken_s[0]:.2f} s, whole {taken_s[1]:.2f} s: {ratios[-1]:.3f}", flush=True)
        steps, nano_batches = (after - first for after, first in zip(counted(urls[0]), before, strict=True))
    gain = 1 - statistics.median(ratios)
    is_gain = nano_batches > steps and gain >= args.least_gain
    print(
        f"with the table: {nano_batches:.0f} nano-batches in {steps:.0f} steps; {gain:+.1%} less time in the median "
        f"(pairs from {1 - max(ratios):+.1%} to {1 - min(ratios):+.1%}); load average {os.getloadavg()[0]:.1f}; "
        f"{'a gain' if is_gain else 'NO GAIN'} of {args.least_gain:.0%}"
    )
    return 0 if is_gain else 1


if __name__ == "__main__":
    sys.exit(main())
