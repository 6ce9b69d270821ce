"""The cost of HTTP in throughput: 16 streams of `tiercel serve` beside `tiercel bench throughput`, in turns.

    python benchmarks/http_share.py [--model FOLDER] [--streams 16] [--input 128] [--output 96] [--rounds 3]

Both get as many requests at once, with prompts of random tokens. Prints the medians of output tokens per second. Exit
code 1 if HTTP is more than `--most-percent` (10) slower.

`tiercel bench throughput` has no prefix cache and no goal for the time between tokens; `tiercel serve` has both. The
row `same` is a second daemon without them: its distance from `offline` is the cost of HTTP alone, and of the client,
which shares the cores with the server.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.daemon import TIERCEL, running_daemon
from benchmarks.streaming_cost import Client

SAME = ["--tbt-goal", "0", "--no-enable-prefix-caching"]  # the settings of `tiercel bench throughput`


def served(url: str, arguments: argparse.Namespace, seed: int) -> float:
    """Return the output tokens per second over HTTP; the longest stream decides."""
    rng = random.Random(seed)
    bodies = [
        {
            "prompt": [rng.randrange(5, 400) for _ in range(arguments.input)],
            "max_tokens": arguments.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(arguments.streams)
    ]
    began_s = time.perf_counter()
    Client(url).run("/v1/completions", bodies)
    return arguments.streams * arguments.output / (time.perf_counter() - began_s)


def offline(arguments: argparse.Namespace, folder: Path, seed: int) -> float:
    """Return the output tokens per second of the engine without HTTP."""
    result = folder / "offline.json"
    lengths = ["--random-input-len", str(arguments.input), "--random-output-len", str(arguments.output)]
    command = [TIERCEL, "bench", "throughput", *([arguments.model] if arguments.model else []), *lengths]
    command += ["--num-prompts", str(arguments.streams), "--seed", str(seed), "--output-json", str(result)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return float(json.loads(result.read_text())["output_tokens_per_second"])


def main() -> int:
    """Print the medians. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder; default: the embedded model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-percent", type=float, default=10.0)
    arguments = parser.parse_args()
    speeds: dict[str, list[float]] = {"offline": [], "same": [], "http": []}
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        model = [arguments.model] if arguments.model else []
        urls = {
            name: closing.enter_context(running_daemon([*model, *flags], Path(folder, name))).url
            for name, flags in (("same", SAME), ("http", []))
        }
        for url in urls.values():
            served(url, arguments, 0)  # a warm-up
        for seed in range(1, arguments.rounds + 1):
            speeds["offline"].append(offline(arguments, Path(folder), seed))
            for name, url in urls.items():
                speeds[name].append(served(url, arguments, seed))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name:>8}: {medians[name]:8.1f} tokens/s ({min(values):.1f} to {max(values):.1f})")
    alone, slower = (100 * (1 - medians[name] / medians["offline"]) for name in ("same", "http"))
    limit = f"at most {arguments.most_percent:.0f} %"
    print(f"HTTP is {slower:.1f} % slower, with the same settings {alone:.1f} %; {limit}")
    return int(slower > arguments.most_percent)


if __name__ == "__main__":
    sys.exit(main())
