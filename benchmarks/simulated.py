"""What `tiercel simulate` foretells beside what `tiercel serve` does: throughput and P99 TTFT of three mixes.

python benchmarks/simulated.py [MODEL] [--seconds 60] [--load 0.6] [--out DIR] [SERVE FLAG ...]

Serves MODEL (the embedded one by default) with a calibration of its step times, and replays a trace of each mix with
`tiercel bench serve`. Then the same traces are simulated with the step times that the engine has kept, as corrected by
what it measured. The rates are `--load` of what the step times say that the machine can do. Run it on a quiet machine:
client and server share its cores, and the simulation knows of neither HTTP nor the client.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from start_time import TIERCEL, is_ready

MIXES = {"chat": (128, 64), "prompts": (768, 16), "mixed": (384, 48)}  # mean tokens of a prompt and of an answer
STEP_TOKENS, ROWS, MODEL_LEN = 256, 64, 4000


def write_trace(path: Path, lengths: tuple[int, int], rate: float, seconds: float, rng: random.Random) -> int:
    """Requests that come at random, lengths spread log-normally, no prompt twice. Returns how many."""
    lines: list[str] = []
    at_s, block = rng.expovariate(rate), 0
    while at_s < seconds:
        prompt, answer = (max(4, min(1500, round(mean * rng.lognormvariate(-0.125, 0.5)))) for mean in lengths)
        blocks = list(range(block, block - (-prompt // 512)))
        block += len(blocks)
        fields = {"timestamp": 1e3 * at_s, "input_length": prompt, "output_length": answer, "hash_ids": blocks}
        lines.append(json.dumps(fields) + "\n")
        at_s += rng.expovariate(rate)
    path.write_text("".join(lines))
    return len(lines)


def replay(url: str, trace: Path, count: int, result: Path, log: Path) -> tuple[float, float]:
    """Tokens a second, and P99 of the time to the first token in ms, of the real server."""
    command = [
        TIERCEL,
        "bench",
        "serve",
        "--base-url",
        url,
        "--dataset-name",
        "timed_trace",
        "--dataset-path",
        str(trace),
    ]
    command += ["--num-prompts", str(count), "--ignore-eos", "--save-result", "--result-filename", str(result)]
    with log.open("a") as out:
        subprocess.run(command, check=True, stdout=out, stderr=out)
    found = json.loads(result.read_text())
    if found["completed"] != count:
        raise SystemExit(f"{count - found['completed']} of {count} requests failed: see {log}")
    return found["total_token_throughput"], found["p99_ttft_ms"]


def foretell(trace: Path, times: Path, result: Path, log: Path) -> tuple[float, float]:
    """The same, simulated."""
    command = [TIERCEL, "simulate", "--trace", str(trace), "--tenants", "1", "--step-times", str(times)]
    command += ["--blocks", "8192", "--max-num-seqs", str(ROWS), "--max-num-batched-tokens", str(STEP_TOKENS)]
    command += ["--max-model-len", str(MODEL_LEN), "--tbt-goal-ms", "200", "--duration", "86400", "--json", str(result)]
    with log.open("a") as out:
        subprocess.run(command, check=True, stdout=out, stderr=out)
    found = json.loads(result.read_text())
    return found["tokens_per_s"], 1e3 * found["ttft_s"]["p99"]


def capacity(times: Path, lengths: tuple[int, int]) -> float:
    """Requests a second that the machine can do, by the step times: prompts in full steps, answers beside 8 others."""
    stored = {tuple(row[:3]): row[3] for row in json.loads(times.read_text())["times"]}
    prompt_ms = stored[(STEP_TOKENS, 0, 0)] / STEP_TOKENS
    near = min((point for point in stored if not point[0] and not point[2]), key=lambda point: abs(point[1] - 8))
    answer_ms = stored[near] / near[1]
    return 1e3 / (lengths[0] * prompt_ms + lengths[1] * answer_ms)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--port", type=int, default=8951)
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="simulated-"))
    folder.mkdir(parents=True, exist_ok=True)
    log, url = folder / "log.txt", f"http://127.0.0.1:{args.port}"
    command = [TIERCEL, "serve", *flags, "--port", str(args.port), "--max-num-seqs", str(ROWS)]
    command += ["--max-num-batched-tokens", str(STEP_TOKENS), "--max-model-len", str(MODEL_LEN)]
    command += ["--calibration-seconds", "60", "--no-enable-prefix-caching"]
    real: dict[str, tuple[float, float]] = {}
    with log.open("w") as out:
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        with subprocess.Popen(command, stdout=out, stderr=out, env=environment) as server:
            try:
                while not is_ready(args.port):
                    if server.poll() is not None:
                        raise SystemExit(log.read_text())
                    time.sleep(0.1)
                (times,) = (folder / "cache" / "tiercel").glob("step-times-*.json")
                for name, lengths in MIXES.items():
                    rate = args.load * capacity(times, lengths)
                    trace = folder / f"{name}.jsonl"
                    count = write_trace(trace, lengths, rate, args.seconds, random.Random(name))
                    real[name] = replay(url, trace, count, folder / f"{name}-real.json", log)
            finally:
                server.terminate()
                server.wait(60)
    print(f"{'mix':>8} {'tokens/s':>9} {'simulated':>10} {'ratio':>6} {'P99 TTFT':>9} {'simulated':>10} {'ratio':>6}")
    for name, (speed, ttft_ms) in real.items():
        simulated = foretell(folder / f"{name}.jsonl", times, folder / f"{name}-simulated.json", log)
        print(
            f"{name:>8} {speed:>9.0f} {simulated[0]:>10.0f} {simulated[0] / speed:>6.2f} "
            f"{ttft_ms:>6.0f} ms {simulated[1]:>7.0f} ms {simulated[1] / ttft_ms:>6.2f}"
        )
    print(f"load average {os.getloadavg()[0]:.1f}; results in {folder}")


if __name__ == "__main__":
    main()
