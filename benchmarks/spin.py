"""Spinning of the engine's threads at barriers: speed of one engine alone and beside another.

python benchmarks/spin.py [MODEL] [--spins 1000 10000 300000] [--tokens 128] [SERVE FLAG ...]

For each value of GOMP_SPINCOUNT: tokens per second of one stream and of sixteen on one server, and of one stream on
each of two servers that share the cores. Run it on a quiet machine.
"""

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.daemon import running_daemon


def answer(url: str, tokens: int) -> None:
    """Read one stream of `tokens` tokens to its end."""
    body = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        for _ in stream.iter_lines():
            pass


def speed(urls: list[str], tokens: int) -> float:
    """Return the tokens per second of one stream at each URL, all at the same time."""
    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(lambda url: answer(url, 4), urls))
        began_s = time.perf_counter()
        list(pool.map(lambda url: answer(url, tokens), urls))
        return len(urls) * tokens / (time.perf_counter() - began_s)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", type=int, nargs="+", default=[1_000, 10_000, 300_000])
    parser.add_argument("--tokens", type=int, default=128)
    arguments, flags = parser.parse_known_args()
    print(f"{'GOMP_SPINCOUNT':>14} {'one stream':>12} {'sixteen':>12} {'two servers':>12}   tokens/s", flush=True)
    for spins in arguments.spins:
        environment = {"GOMP_SPINCOUNT": str(spins)}
        with tempfile.TemporaryDirectory() as folder, ExitStack() as daemons:
            logs = Path(folder, "first"), Path(folder, "second")
            first = daemons.enter_context(running_daemon(flags, logs[0], environment=environment)).url
            one, sixteen = (speed([first] * streams, arguments.tokens) for streams in (1, 16))
            second = daemons.enter_context(running_daemon(flags, logs[1], environment=environment)).url
            two = speed([first, second], arguments.tokens)
        print(f"{spins:>14} {one:>12.1f} {sixteen:>12.1f} {two:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
