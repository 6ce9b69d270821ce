"""One and a half times what the server can do: who meets the goal for the first token, and whether batch work moves.

python benchmarks/overload.py [MODEL] [--seconds 60] [--factor 1.5] [--goal 1.0] [--policies fair fcfs] [SERVE FLAG ...]

A closed loop of a chat tenant and a batch tenant finds what the machine can do; then both come open loop, `--factor`
times as fast. Prints the share of the chat's requests that were answered within the goal, of those that were admitted
and of all that were sent, and the batch tenant's tokens per second. Run it on a quiet machine: client and server share
its cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from start_time import TIERCEL, is_ready

CHAT, BATCH = (96, 24), (512, 64)  # tokens of a prompt and of an answer
TENANTS = """\
tenants:
  - {name: chat, key: chat-key, weight: 1, slo: {class: interactive, ttft_s: %(goal)g}}
  - {name: batch, key: batch-key, weight: 1, slo: {class: batch}}
"""


def mix(goal_s: float, chat: str, batch: str, chat_key: str = "chat-key") -> str:
    """Both kinds of work with these arrivals."""
    return f"""\
tenants:
  - name: chat
    key: {chat_key}
    {chat}
    dataset: {{name: random, input_len: {CHAT[0]}, output_len: {CHAT[1]}}}
    goals: {{ttft: {1e3 * goal_s:.0f}}}
  - name: batch
    key: batch-key
    {batch}
    dataset: {{name: random, input_len: {BATCH[0]}, output_len: {BATCH[1]}}}
"""


def open_loop(rate: float, seconds: float) -> str:
    """So many requests a second, at random times."""
    return f"num_prompts: {max(1, round(rate * seconds))}\n    arrivals: {{process: poisson, rate: {rate:.3f}}}"


def load(url: str, folder: Path, name: str, text: str) -> tuple[float, dict[str, dict[str, Any]]]:
    """Seconds, and figures by tenant."""
    (folder / f"{name}.yaml").write_text(text)
    result = folder / f"{name}.json"
    command = [TIERCEL, "bench", "serve", "--base-url", url, "--tenants", str(folder / f"{name}.yaml"), "--save-result"]
    command += ["--metric-percentiles", "50,95,99"]
    with (folder / "log.txt").open("a") as out:
        subprocess.run([*command, "--result-filename", str(result)], check=True, stdout=out, stderr=out)
    found = json.loads(result.read_text())
    return found["duration"], {one["name"]: one for one in found["tenants"]}


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--goal", type=float, default=1.0)
    parser.add_argument("--policies", nargs="+", default=["fair", "fcfs"])
    parser.add_argument("--port", type=int, default=8971)
    args, flags = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="overload-"))
    (folder / "tenants.yaml").write_text(TENANTS % {"goal": args.goal})
    url = f"http://127.0.0.1:{args.port}"
    rates: tuple[float, float] | None = None
    print(
        f"{'policy':>8} {'sent':>6} {'admitted':>9} {'in goal':>8} {'of all':>7} {'P95 TTFT':>9} {'batch tokens/s':>15}"
    )
    for policy in args.policies:
        command = [TIERCEL, "serve", *flags, "--port", str(args.port), "--scheduling-policy", policy]
        command += ["--tenants-config", str(folder / "tenants.yaml")]
        with (folder / f"{policy}.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
            try:
                while not is_ready(args.port):
                    if server.poll() is not None:
                        raise SystemExit(f"tiercel left with exit code {server.returncode}: see {log.name}")
                    time.sleep(0.1)
                if rates is None:
                    closed = "num_prompts: %d\n    max_concurrency: %d"
                    # as one tenant without a goal: nothing is refused
                    work = mix(1e3, closed % (40, 2), closed % (80, 12), "batch-key")
                    seconds, alone = load(url, folder, "closed", work)
                    rates = alone["chat"]["completed"] / seconds, alone["batch"]["completed"] / seconds
                loops = (open_loop(args.factor * rate, args.seconds) for rate in rates)
                seconds, found = load(url, folder, policy, mix(args.goal, *loops))
            finally:
                server.terminate()
                server.wait(60)
        chat, batch = found["chat"], found["batch"]
        sent = chat["completed"] + chat["failed"]
        p95_ms = chat["figures"]["p95_ttft_ms"]
        kept = round((chat["request_goodput"] or 0.0) * seconds)
        print(
            f"{policy:>8} {sent:>6} {chat['completed']:>9} {kept / max(chat['completed'], 1):>8.1%} "
            f"{kept / max(sent, 1):>7.1%} {p95_ms:>6.0f} ms {batch['output_tokens'] / seconds:>15.0f}",
            flush=True,
        )
    print(f"load average {os.getloadavg()[0]:.1f}; results in {folder}")


if __name__ == "__main__":
    main()
