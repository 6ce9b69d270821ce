"""A soak: tenants, sessions, faults and a small cache for minutes, then a verdict.

    python -m benchmarks.soak [--seconds 75] [--minutes 30] [--no-kills] [--no-full-disk] [--seed N] [FLAG ...]

Starts `tiercel serve` with the embedded model in float32 and three tiers, of which device memory holds half of what
twenty sessions of four tenants use, so that blocks move through all tiers. One request in fifty is cut off by its
client, one in a hundred is wrong, the engine is killed once a minute, and the file system of the SSD tier is full for a
time. Every twentieth request is replayed on a second daemon without cache and faults, after the first one has ended.

Prints a line for each minute and then the checks (`verdict.py` has the limits). Exit code 1 if a check is missed.
`--break NAME` makes the soak fail, to try its checks: with a daemon that leaks memory, descriptors or threads, or that
does not restart its engine (`broken_daemon.py`), or with a changed answer. Further flags go to the daemon.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.checks import missed_checks, percentile
from benchmarks.daemon import TIERCEL, Daemon, running_daemon
from benchmarks.soak.broken_daemon import DEFECTS
from benchmarks.soak.harm import MIB, Harm, fill_between, has_namespaces, kill_at, namespace_command
from benchmarks.soak.reference import chosen, replay
from benchmarks.soak.sessions import Traffic, run_sessions, tenants_file
from benchmarks.soak.verdict import SoakRun, checks_of, count_lines, cpu_per_token_s, ttfts
from benchmarks.soak.watch import Sample, settled_sample, watch

BLOCKS, BLOCK_TOKENS = 200, 16
DDR, SSD = "8M", "24M"
DISK_BYTES = 40 * MIB
WARM_S = 4.0
REST_S = 20.0
KILL_EVERY_S = 60.0
TEXT_DEFECT = "text"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75.0, help="of load")
    parser.add_argument("--minutes", type=float, help="of load, in place of seconds")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--no-full-disk", action="store_true")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--break", dest="defect", choices=(*DEFECTS, TEXT_DEFECT))
    parser.add_argument("--keep", type=Path, help="folder for the logs and all samples; default: a temporary one")
    args, flags = parser.parse_known_args()
    if args.minutes is not None:
        args.seconds = 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="tiercel-soak-") as name:
        folder = args.keep or Path(name)
        folder.mkdir(exist_ok=True)
        return _soak(folder, args, flags)


def _soak(folder: Path, args: argparse.Namespace, flags: list[str]) -> int:
    mount = folder / "disk"
    mount.mkdir(exist_ok=True)
    (folder / "tenants.yaml").write_text(tenants_file())
    shared = ["--dtype", "float32", "--max-model-len", "1024", "--tenants-config", str(folder / "tenants.yaml"), *flags]
    tiers = [
        *("--cpu-device-pool", "--num-gpu-blocks-override", str(BLOCKS), "--kv-host-size", DDR),
        *("--kv-disk-path", str(mount / "kv"), "--kv-disk-size", SSD, "--kv-disk-daily-writes", "0"),
    ]
    program = (TIERCEL, "serve")
    if args.defect in DEFECTS:
        program = (sys.executable, "-m", "benchmarks.soak.broken_daemon", args.defect)
    command: Sequence[str] = program
    if has_namespaces(mount):
        command = namespace_command(mount, DISK_BYTES, program)
    elif not args.no_full_disk:
        print("A full disk is NOT tested: it is a tmpfs in a mount namespace, for which this user has no right.")
        args.no_full_disk = True
    with running_daemon([*shared, *tiers], folder / "serve.log", command=command) as daemon:
        run = asyncio.run(_drive(daemon, mount, args))
    # After the end of the daemon, so that the lines of all requests are in the log.
    run = replace(run, logged=count_lines((folder / "serve.log").read_text()))
    _print_minutes(run)
    replayed = chosen(run.traffic.finished())
    if args.defect == TEXT_DEFECT:
        replayed[0].text = replayed[0].text.swapcase()
    differences = replay(replayed, shared, folder / "reference.log")
    for one in differences:
        print(f"request {one.request_id}:\n  served   {one.served}\n  expected {one.expected}")
    run = replace(run, replays=len(replayed), wrong=len(differences))
    _print_failures(run)
    if args.keep is not None:
        (folder / "samples.json").write_text(json.dumps([one._asdict() for one in run.samples]))
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(bool(missed_checks(checks_of(run))))


async def _drive(daemon: Daemon, mount: Path, args: argparse.Namespace) -> SoakRun:
    """Warm the daemon up, run the load with its faults, and wait until the daemon is at rest."""
    pid, url = daemon.process.pid, daemon.url
    await run_sessions(url, args.seed + 1, WARM_S, Traffic("warm"), lambda: False)
    before = await settled_sample(url, pid, REST_S)
    traffic, samples, harm = Traffic(), list[Sample](), Harm()
    began_s = time.monotonic()
    moments_s = [] if args.no_kills else kill_moments(began_s, args.seconds)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch(url, pid, samples, lambda: traffic.is_over))
        faults = [group.create_task(kill_at(pid, moments_s, harm))]
        if not args.no_full_disk:
            disk = Path(f"/proc/{pid}/root{mount}")
            begin_s, end_s = began_s + 0.2 * args.seconds, began_s + min(0.4 * args.seconds, 0.2 * args.seconds + 60)
            faults.append(group.create_task(fill_between(disk, begin_s, end_s, harm)))
        await run_sessions(url, args.seed, args.seconds, traffic, lambda: daemon.process.poll() is not None)
        traffic.is_over = True
        await asyncio.gather(watching, *faults)
    after = await settled_sample(url, pid, REST_S)
    return SoakRun(
        began_s=began_s, seconds=args.seconds, traffic=traffic, samples=samples, before=before, after=after, harm=harm,
        planned_kills=len(moments_s), has_full_disk=not args.no_full_disk, replays=0, wrong=0,
        logged=count_lines(""), pool_tokens=BLOCKS * BLOCK_TOKENS,
    )  # fmt: skip


def kill_moments(began_s: float, seconds: float) -> list[float]:
    """Return the times of the kills: one a minute, none of them in the first or last third of a short run."""
    if seconds < 2 * KILL_EVERY_S:
        return [began_s + 0.45 * seconds]
    count = int((seconds - 20) / KILL_EVERY_S)
    return [began_s + (number + 0.75) * KILL_EVERY_S for number in range(count)]


def _print_minutes(run: SoakRun) -> None:
    """Print what each minute had: requests, times to first token, memory."""
    print(f"{'minute':>6} {'requests':>8} {'median':>8} {'P99 TTFT':>9} {'HTTP':>8} {'engine':>10} {'CPU/token':>10}")
    for minute in range(int((run.seconds + 59) // 60)):
        from_s = run.began_s + 60 * minute
        waits = ttfts(run.traffic.answers, from_s, from_s + 60)
        at = [one for one in run.samples if from_s <= one.at_s < from_s + 60]
        http = max((one.http.private_bytes for one in at if one.http), default=0) / MIB
        engine = max((one.engine.private_bytes for one in at if one.engine), default=0) / MIB
        sent = sum(from_s <= one.sent_s < from_s + 60 for one in run.traffic.answers)
        print(
            f"{minute:>6} {sent:>8} {percentile(waits, 0.5):>6.3f} s {percentile(waits, 0.99):>7.3f} s {http:>4.0f} MiB"
            f" {engine:>6.0f} MiB {1e3 * cpu_per_token_s(at):>7.3f} ms"
        )


def _print_failures(run: SoakRun) -> None:
    """Print the first requests that had an error."""
    for one in [one for one in run.traffic.answers if one.error][:20]:
        since = f"{one.end_s - run.began_s:.1f} s"
        print(f"{since}: {one.request_id} {one.outcome.value} status {one.status}: {one.error}")
    for one in run.traffic.wrong:
        if one.status < 400:
            print(f"not refused: {one.request_id} status {one.status}: {str(one.body)[:120]}")


if __name__ == "__main__":
    sys.exit(main())
