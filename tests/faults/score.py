"""The score of the fault scorecard: `make faults` runs the tests of every row, `make faults-quick` the quick ones.

A row passes if at least one of its tests ran and all that ran passed; a skipped test is a failure. With `--quick` the
tests marked `slow` or `long` are left out, and so are rows that have no other test. The last line is the score.

Usage: `python -m tests.faults.score [--quick] [--workers N] [--row N ...] [-- ARGUMENTS OF PYTEST]`.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.faults.scorecard import ROWS, Row, read_rows
from tests.programs import install_missing

_TIMEOUT_S = 3600  # of one test; the random kills take tens of minutes


@dataclass
class RowTally:
    """What became of the tests of one row."""

    row: Row
    passed: set[str] = field(default_factory=set[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])  # outcome by node id

    @property
    def is_run(self) -> bool:
        return bool(self.passed or self.failed)

    @property
    def is_passed(self) -> bool:
        return bool(self.passed) and not self.failed


class Score:
    """A plugin of pytest that assigns the outcome of every test to the rows that name it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.tallies = [RowTally(row) for row in rows]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        for tally in self.tallies:
            if not tally.row.has(report.nodeid):
                continue
            if report.passed:
                tally.passed.add(report.nodeid)
            else:
                tally.failed[report.nodeid] = report.outcome

    def lines(self, *, is_quick: bool) -> list[str]:
        """Return one line for each row, and the score as the last line."""
        lines: list[str] = []
        counts: Counter[str] = Counter()
        for tally in self.tallies:
            word = "passed" if tally.is_passed else "failed"
            if is_quick and not tally.is_run:
                word = "left out: it has no quick test"
            counts[word] += 1
            lines.append(f"row {tally.row.number:2d}  {word}  {tally.row.fault}")
            lines += [f"        {outcome}: {node}" for node, outcome in tally.failed.items()]
            if not tally.is_run and not is_quick:
                lines.append("        no test ran")
        return [*lines, f"{counts['passed']} passed, {counts['failed']} failed"]

    def has_failed(self, *, is_quick: bool) -> bool:
        """Return whether any row failed."""
        return any(not tally.is_passed and (tally.is_run or not is_quick) for tally in self.tallies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of the rows. Return 0 if no row failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.score", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the tests marked slow or long")
    parser.add_argument("--workers", default="2", help="processes of pytest-xdist (default 2)")
    parser.add_argument("--row", type=int, action="append", help="run only this row; may be repeated")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    given = parser.parse_args(arguments)
    known = {row.number: row for row in read_rows()}
    rows = [known.get(number, Row(number, "not on the page", ())) for number in given.row or ROWS]
    os.environ["TOOLS"] = "required"
    for reason in install_missing():
        print(f"a program is missing: {reason}", file=sys.stderr)
    nodes = list(dict.fromkeys(test for row in rows for test in row.tests))
    marked = "not slow and not long" if given.quick else "slow or long or not slow"  # names both: none is deselected
    flags = ["-q", "-p", "no:cacheprovider", "-m", marked, "--timeout", str(_TIMEOUT_S)]
    if given.workers != "0":
        flags += ["-n", given.workers, "--dist", "loadfile"]
    score = Score(rows)
    code = pytest.main([*flags, *given.pytest, *nodes], plugins=[score])
    print("\n".join(score.lines(is_quick=given.quick)))
    is_broken = code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return int(is_broken or score.has_failed(is_quick=given.quick))


if __name__ == "__main__":
    sys.exit(main())
