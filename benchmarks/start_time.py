"""Start time of `tiercel serve`: from the command to `/ready`.

python benchmarks/start_time.py [--runs 5] [--most-seconds 3] [MODEL] [FLAG ...]

Exit code 1 if the median time to the first HTTP answer is above 1 s, or that to `/ready` above `--most-seconds`.
"""

import argparse
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

from benchmarks.daemon import TIERCEL, is_ready


def measure(port: int, flags: list[str]) -> tuple[float, float]:
    """Return the seconds to the first HTTP answer of any kind, and to readiness."""
    started_s = time.perf_counter()
    command = [TIERCEL, "serve", *flags, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        answered_s = None
        while process.poll() is None:
            if answered_s is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5).read()
                    answered_s = time.perf_counter() - started_s
            elif is_ready(f"http://127.0.0.1:{port}"):
                ready_s = time.perf_counter() - started_s
                process.send_signal(signal.SIGTERM)
                return answered_s, ready_s
            time.sleep(0.005)
    raise SystemExit(f"tiercel ended with exit code {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--port", type=int, default=8917)
    parser.add_argument("--most-seconds", type=float, default=3.0, help="median time to /ready that is accepted")
    args, flags = parser.parse_known_args()
    version = re.sub(r"\s+", " ", subprocess.run([TIERCEL, "--version"], capture_output=True, text=True).stdout)
    runs = [measure(args.port, flags) for _ in range(args.runs + 1)][1:]  # the first one warms the page cache
    is_late = False
    limits = ("first answer", 1.0), ("/ready", args.most_seconds)
    for (name, most_s), values in zip(limits, zip(*runs, strict=True), strict=True):
        is_late |= statistics.median(values) > most_s
        print(f"{name:>12}: median {statistics.median(values):.2f} s  (min {min(values):.2f}, max {max(values):.2f})")
    print(f"{version.strip()}, {args.runs} runs, {' '.join(flags) or 'embedded model'}")
    if is_late:
        print(f"FAILED: the first answer took more than 1 s, or /ready more than {args.most_seconds:g} s")
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main())
