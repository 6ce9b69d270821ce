"""A long prompt beside eight streams: gaps between the tokens of the streams, and the prompt's time to first token.

python benchmarks/long_prompt.py MODEL [--tokens 4096] [--streams 8] [--goals 0.12 0.2] [--rounds 3] [SERVE FLAG ...]

Serves MODEL once for each goal between tokens (`--tbt-goal`; 0: no goal, whole steps). In each round the long prompt is
sent when all streams decode; gaps count from then to its first token. Run it on a quiet machine."""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx

from benchmarks.daemon import running_daemon

_ANSWER = 4000  # tokens, enough to outlast the prompt; the streams are closed after its first token


class Stream:
    """One stream of tokens with their times of arrival."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        self.times_s: list[float] = []
        self.sent_s = time.perf_counter()
        self._is_left = False
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        self._thread = threading.Thread(target=self._read, args=(f"{url}/v1/completions", body))
        self._thread.start()

    def _read(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", url, json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self.times_s.append(time.perf_counter())
                if self._is_left:
                    return

    def wait_first(self) -> float:
        """Wait for the first token and return its time."""
        while not self.times_s:
            if not self._thread.is_alive():
                raise SystemExit("a stream ended without a token")
            time.sleep(0.005)
        return self.times_s[0]

    def leave(self) -> None:
        """Close the stream."""
        self._is_left = True
        self._thread.join()

    def gaps_s(self, since_s: float, until_s: float) -> list[float]:
        """Return the gaps between tokens of which the later one arrived in a period."""
        return [after - before for before, after in pairwise(self.times_s) if since_s < after <= until_s]


def measure(url: str, tokens: int, streams: int, number: int) -> tuple[float, list[float]]:
    """Return the seconds to the first token of the prompt, and the gaps of the streams during that time."""
    running = [Stream(url, [10 + number * 100 + at] * 24, _ANSWER) for at in range(streams)]
    for stream in running:
        stream.wait_first()
    time.sleep(1.0)
    # rounds share no block
    prompt = Stream(url, [3 + (at * 31 + number * 977) % 900 for at in range(tokens)], 1)
    first_s = prompt.wait_first()
    gaps_s = [gap for stream in running for gap in stream.gaps_s(prompt.sent_s, first_s)]
    for stream in (*running, prompt):
        stream.leave()
    return first_s - prompt.sent_s, gaps_s


def main() -> None:
    """Print a line for each goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--goals", type=float, nargs="+", default=[0.12, 0.2])
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = parser.parse_known_args()
    print(f"{'goal':>7} {'P50 gap':>9} {'P99 gap':>9} {'longest':>9} {'TTFT of the prompt':>20}")
    for goal_s in args.goals:
        goal_flags = [args.model, "--tbt-goal", f"{goal_s:g}", *flags, "--calibration-seconds", "60"]
        with (
            tempfile.TemporaryDirectory() as folder,
            running_daemon(goal_flags, Path(folder, "log")) as daemon,
        ):
            rounds = range(args.rounds + 1)
            found = [measure(daemon.url, args.tokens, args.streams, number) for number in rounds][1:]  # first: warm-up
        gaps_ms = sorted(1e3 * gap for _, gaps in found for gap in gaps)
        p50, p99 = (gaps_ms[int(part * (len(gaps_ms) - 1))] for part in (0.5, 0.99))
        ttft_s = statistics.median(ttft for ttft, _ in found)
        print(
            f"{1e3 * goal_s:>4.0f} ms {p50:>6.0f} ms {p99:>6.0f} ms {gaps_ms[-1]:>6.0f} ms {ttft_s:>18.2f} s",
            flush=True,
        )
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
