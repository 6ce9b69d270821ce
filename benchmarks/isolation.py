"""Time to first token of a chat tenant beside a tenant that floods the server, by policy.

python benchmarks/isolation.py MODEL [--policies fair fcfs] [--seconds 60] [--out DIR] [SERVE FLAG ...]

Starts `tiercel serve MODEL` once for each policy with two tenants of equal weight, and lets `tiercel bench serve` load
it: the chat alone, then both together. Prints the P95 of the time to first token alone, together, and their ratio.
Run it on a quiet machine: client and server share its cores.

Exit code 1 if `fair` is measured and its ratio is above `--most-ratio` (3).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.daemon import TIERCEL, running_daemon

TENANTS = """\
tenants:
  - {name: chat, key: chat-key, weight: 1, slo: {class: interactive%(goal)s, tbt_s: 0.2}}
  - {name: flood, key: flood-key, weight: 1}
"""

MIX = """\
duration_s: %(seconds)d
tenants:
  - name: chat
    key: chat-key
    weight: 1
    num_prompts: %(seconds)d
    arrivals: {process: poisson, rate: 1}
    dataset: {name: random, input_len: 128, output_len: 32}
    goals: {ttft: 1000, tpot: 200}
  - name: flood
    key: flood-key
    weight: 1
    aggressor: true
    num_prompts: 400
    max_concurrency: 8
    dataset: {name: random, input_len: 1024, output_len: 32}
"""


def measure(
    model: str, policy: str, folder: Path, seconds: int, flags: list[str]
) -> dict[str, list[dict[str, dict[str, float]]]]:
    """Run one load test against a new daemon and return its result."""
    # Without fairness, gate two would refuse all requests that cannot keep the goal.
    (folder / "tenants.yaml").write_text(TENANTS % {"goal": ", ttft_s: 3.0" if policy == "fair" else ""})
    (folder / "mix.yaml").write_text(MIX % {"seconds": seconds})
    flags = [model, "--scheduling-policy", policy, "--tenants-config", str(folder / "tenants.yaml"), *flags]
    result = folder / f"{policy}.json"
    with running_daemon(flags, folder / f"{policy}.log") as daemon:
        command = [
            *(TIERCEL, "bench", "serve", "--base-url", daemon.url, "--tenants", str(folder / "mix.yaml")),
            *("--isolation", "--metric-percentiles", "50,95,99", "--save-result", "--result-filename", str(result)),
        ]
        with (folder / f"{policy}.bench.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log)
    return json.loads(result.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--policies", nargs="+", default=["fair", "fcfs"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--most-ratio", type=float, default=3.0, help="P95 together over alone, of the policy fair")
    args, flags = parser.parse_known_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="isolation-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{'policy':>10} {'alone ms':>10} {'together ms':>12} {'ratio':>7}   (P95 of TTFT)")
    is_broken = False
    for policy in args.policies:
        result = measure(args.model, policy, folder, args.seconds, flags)
        chat = next(one for one in result["isolation"] if one["tenant"] == "chat")
        alone, together = chat["alone"]["p95_ttft_ms"], chat["together"]["p95_ttft_ms"]
        print(f"{policy:>10} {alone:>10.0f} {together:>12.0f} {together / alone:>7.2f}")
        is_broken |= policy == "fair" and together > args.most_ratio * alone
    print(f"results in {folder}")
    if is_broken:
        print(f"FAILED: under fair the P95 is more than {args.most_ratio:g} times its value alone")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
