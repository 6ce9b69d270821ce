"""How long the engine's threads spin at a barrier before they yield: speed alone, and beside another engine.

python benchmarks/spin.py [MODEL] [--spins 1000 10000 300000] [--tokens 128] [SERVE FLAG ...]

For each value of GOMP_SPINCOUNT: tokens per second of one stream and of sixteen on one server, and of one stream on
each of two servers that share the cores. Run it on a quiet machine.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from start_time import TIERCEL, is_ready


@contextlib.contextmanager
def serving(port: int, spins: int, flags: list[str]) -> Iterator[str]:
    """The URL of a fresh server whose threads spin so often."""
    environment = {**os.environ, "GOMP_SPINCOUNT": str(spins)}
    with tempfile.TemporaryFile() as log:
        command = [TIERCEL, "serve", *flags, "--port", str(port)]
        with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
            try:
                while not is_ready(port):
                    if server.poll() is not None:
                        log.seek(0)
                        raise SystemExit(log.read().decode())
                    time.sleep(0.05)
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()


def answer(url: str, tokens: int) -> None:
    """One stream of so many tokens, read to its end."""
    body = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        for _ in stream.iter_lines():
            pass


def speed(urls: list[str], tokens: int) -> float:
    """Tokens per second of one stream at each of these URLs, all at once."""
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
    parser.add_argument("--port", type=int, default=8471)
    arguments, flags = parser.parse_known_args()
    print(f"{'GOMP_SPINCOUNT':>14} {'one stream':>12} {'sixteen':>12} {'two servers':>12}   tokens/s", flush=True)
    for spins in arguments.spins:
        with serving(arguments.port, spins, flags) as url:
            one, sixteen = (speed([url] * streams, arguments.tokens) for streams in (1, 16))
            with serving(arguments.port + 1, spins, flags) as other:
                two = speed([url, other], arguments.tokens)
        print(f"{spins:>14} {one:>12.1f} {sixteen:>12.1f} {two:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
