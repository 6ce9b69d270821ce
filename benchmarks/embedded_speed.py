"""The embedded model on two checkouts in turns: tokens per second offline, and the time from start to first token.

    python benchmarks/embedded_speed.py --baseline CHECKOUT [--rounds 3]

16 requests of 128 + 96 tokens go through `tiercel bench throughput`, and one request to a fresh `tiercel serve`. Prints
the medians. Exit code 1 if this checkout makes fewer tokens per second or needs longer for the first token. Run it on a
quiet machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.daemon import TIERCEL

_ROOT = Path(__file__).resolve().parents[1]
_LENGTHS = ("--random-input-len", "128", "--random-output-len", "96", "--num-prompts", "16")
_PATIENCE_S = 60.0


def tokens_per_second(checkout: Path, folder: Path) -> float:
    """Return the output tokens per second of `tiercel bench throughput`."""
    result = folder / "offline.json"
    command = [TIERCEL, "bench", "throughput", *_LENGTHS, "--output-json", str(result)]
    subprocess.run(command, cwd=checkout, env=_environment(checkout), check=True, capture_output=True)
    return float(json.loads(result.read_text())["output_tokens_per_second"])


def first_token_s(checkout: Path, port: int) -> float:
    """Return the seconds from starting `tiercel serve` to its first token. Errors: TimeoutError after a minute."""
    command = [TIERCEL, "serve", "--host", "127.0.0.1", "--port", str(port)]
    began_s = time.perf_counter()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=checkout, env=_environment(checkout), stdout=quiet, stderr=quiet) as process:
        try:
            while not _has_answered(port):
                if time.perf_counter() - began_s > _PATIENCE_S:
                    raise TimeoutError(f"{checkout}: no token within {_PATIENCE_S:.0f} s on port {port}")
                time.sleep(0.02)
            return time.perf_counter() - began_s
        finally:
            process.terminate()


def _has_answered(port: int) -> bool:
    body = {"prompt": "Hello", "max_tokens": 1}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20).status_code == 200
    except httpx.HTTPError:
        return False


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def main() -> int:
    """Print the medians. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, required=True, help="another checkout of tiercel")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8171)
    arguments = parser.parse_args()
    checkouts: dict[str, Path] = {"before": arguments.baseline.resolve(), "now": _ROOT}
    speeds: dict[str, list[float]] = {name: [] for name in checkouts}
    starts: dict[str, list[float]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for name, checkout in checkouts.items():
                speeds[name].append(tokens_per_second(checkout, Path(folder)))
                starts[name].append(first_token_s(checkout, arguments.port))
    speed = {name: statistics.median(values) for name, values in speeds.items()}
    start = {name: statistics.median(values) for name, values in starts.items()}
    for name in checkouts:
        speed_range = f"{min(speeds[name]):.0f} to {max(speeds[name]):.0f}"
        start_range = f"{min(starts[name]):.2f} to {max(starts[name]):.2f}"
        print(f"{name:>6}: {speed[name]:.0f} tokens/s ({speed_range}), first token {start[name]:.2f} s ({start_range})")
    return int(speed["now"] < speed["before"] or start["now"] > start["before"])


if __name__ == "__main__":
    sys.exit(main())
