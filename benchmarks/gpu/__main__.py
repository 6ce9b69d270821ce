"""Run sections one after the other, each in its own process, and write one JSON file and one table.

    python benchmarks/gpu/run.py [--sections NAMES] [--quick] [--strict] [--out FOLDER] [--peer FOLDER]

Results are printed as they are measured. Both files are rewritten after every section, so an aborted run keeps its
results. Without a GPU the exit code is 2, with one line of explanation; 1 if a section measured nothing; with --strict
3 if a target of a section that ran is not met, or a part of it failed.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.catalog import MAX_S, SECTIONS, Section, choose
from benchmarks.gpu.figure import Failure, SectionResult, read_result, write_json
from benchmarks.gpu.report import as_json, as_table
from benchmarks.gpu.targets import TARGETS, overlap_verdict, values_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
EXIT_UNMEASURED, EXIT_NO_GPU, EXIT_MISSED = 1, 2, 3
_PATIENCE = 1.25  # times the budget, because a section checks its budget only between two parts
_GRACE_S = 10.0  # in addition
_MIN_S = 8.0  # a section that would get less time is left out
_START_S = 120.0  # for the first answer of the device
_END_S = 20.0  # for the end of a killed process; one that hangs in the driver may never end


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Errors: SystemExit with code 2 and a line that names the flag."""
    about = "\n".join(f"    {section.name:<11}{section.budget_s:>5.0f} s  {section.about}" for section in SECTIONS)
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.py",
        description=__doc__,
        epilog=f"sections and their budgets:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sections", metavar="NAMES", help="comma-separated names; default: all except `peer` and the extra ones"
    )
    parser.add_argument("--quick", action="store_true", help="smaller measurements, in 40 %% of the time")
    parser.add_argument("--strict", action="store_true", help="exit with 3 if a target is not met or a part failed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the two files, default: %(default)s")
    parser.add_argument(
        "--peer", type=Path, metavar="FOLDER", help="environment or site folder with vLLM; adds section `peer`"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MAX_S,
        help="limit of the whole run in seconds, 0 for none; default: %(default)s",
    )
    given = parser.parse_args(words)
    given.out = given.out.resolve()  # sections run in the root of the repository
    given.peer = given.peer and given.peer.resolve()
    if given.seconds < 0:
        parser.error(f"--seconds must be at least 0, not {given.seconds:g}")
    if given.peer is not None and not given.peer.is_dir():
        parser.error(f"--peer {given.peer}: no such folder")
    try:
        given.chosen = choose(given.sections, has_peer=given.peer is not None)
    except ValueError as exc:
        parser.error(str(exc))
    return given


def ask_machine() -> dict[str, object] | None:
    """Return the facts of the machine; None, with a line on standard error, without a GPU."""
    words = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        ran = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=_START_S)
    except subprocess.TimeoutExpired:
        print(f"no GPU: it did not answer in {_START_S:.0f} s", file=sys.stderr)
        return None
    if ran.returncode != 0:
        return None
    return json.loads(ran.stdout.splitlines()[-1])


def run_section(
    section: Section,
    budget_s: float,
    folder: Path,
    results: list[SectionResult],
    *,
    is_quick: bool,
    peer: Path | None,
    grace_s: float = _GRACE_S,
) -> None:
    """Run a section until it ends, or its time or that of the run is over; then keep its figures, and add a failure.

    Effects: a result is appended to `results`, also if this raises.
    """
    out = folder / f"{section.name}.json"
    words = [sys.executable, "-m", "benchmarks.gpu.section", section.name]
    words += ["--budget-s", str(budget_s), "--out", str(out)]
    words += ["--quick"] * is_quick + (["--peer", str(peer)] if peer else [])
    began_s = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    patience_s = grace_s + _PATIENCE * budget_s
    reason = "the run was ended"
    try:
        code = process.wait(patience_s)
        reason = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        reason = f"ended after {patience_s:.0f} s"
    finally:
        end_session(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        result = SectionResult(section.name)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            result = read_result(out)
        if reason:
            result.failures.append(Failure(section.name, reason))
            print(f"  {section.name}: {reason}", flush=True)
        result.seconds = round(time.monotonic() - began_s, 1)
        results.append(result)


def end_session(leader: int) -> None:
    """Kill a process and its descendants, including those in other process groups."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # already gone
            if os.getsid(int(folder.name)) == leader:
                os.kill(int(folder.name), signal.SIGKILL)


def _leave(number: int, _: object) -> None:
    """Raise on SIGTERM, so that the section is ended, too, which has a session of its own."""
    raise SystemExit(128 + number)


def main(words: list[str] | None = None) -> int:
    """Run the sections."""
    given = parse(words)
    machine = ask_machine()
    if machine is None:
        return EXIT_NO_GPU
    signal.signal(signal.SIGTERM, _leave)
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **machine,
        "command": shlex.join(["run.py", *(sys.argv[1:] if words is None else words)]),
        "is_quick": given.quick,
    }
    print(f"{facts['device']}, torch {machine['versions']['torch']}, {facts['commit']}", flush=True)  # type: ignore[index]
    results: list[SectionResult] = []
    end_s = time.monotonic() + (given.seconds or float("inf"))
    RESULTS.mkdir(exist_ok=True)  # not `out`, which holds only the two files, even after an aborted run
    with tempfile.TemporaryDirectory(dir=RESULTS, prefix="under-way-") as folder:  # a disk is measured, so not in /tmp
        for section in given.chosen:
            print(f"{section.name}: {section.about}", flush=True)
            budget_s = min(section.seconds(is_quick=given.quick), end_s - time.monotonic())
            try:
                if budget_s < _MIN_S:
                    results.append(SectionResult(section.name, left_out=["all of it: --seconds are over"]))
                else:
                    run_section(section, budget_s, Path(folder), results, is_quick=given.quick, peer=given.peer)
            finally:
                write_json(out / "results.json", as_json(facts, results))
                (out / "results.md").write_text(as_table(facts, results), encoding="utf-8")
    print(as_table(facts, results))
    print(overlap_verdict(values_of(figure for result in results for figure in result.figures)))
    print(f"written: {out / 'results.json'}, {out / 'results.md'}")
    return exit_code(results, is_strict=given.strict)


def exit_code(results: Sequence[SectionResult], *, is_strict: bool) -> int:
    """Return the status of a run. Targets of sections that did not run do not count."""
    if any(not result.figures for result in results):
        return EXIT_UNMEASURED
    values = values_of(figure for result in results for figure in result.figures)
    sections = {result.section for result in results}
    owed = [target for target in TARGETS if target.figure.partition(".")[0] in sections]
    is_kept = all(target.verdict(values) == "met" for target in owed) and not any(one.failures for one in results)
    return EXIT_MISSED if is_strict and not is_kept else 0


if __name__ == "__main__":
    sys.exit(main())
