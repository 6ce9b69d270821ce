"""The page docs/faults.md names a test for every row, and the tests exist."""

import ast
import re
from pathlib import Path

from tests.faults.score import Score
from tests.faults.scorecard import ROWS, read_rows

ROOT = Path(__file__).resolve().parent.parent


def test_every_row_names_tests_that_exist() -> None:
    rows = read_rows()
    assert [row.number for row in rows] == list(ROWS)
    for row in rows:
        assert row.tests, f"row {row.number} names no test"
        for test in row.tests:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert not name or name.partition("[")[0] in functions, f"row {row.number}: there is no {test}"


def test_every_test_that_is_named_after_a_row_is_on_the_page() -> None:
    rows = {row.number: row for row in read_rows()}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def (test_row_\d+\w*)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            number = int(name.split("_")[2])
            assert rows[number].has(f"{path.relative_to(ROOT)}::{name}"), f"docs/faults.md, row {number}: no {name}"


def test_a_row_passes_if_its_tests_ran_and_passed() -> None:
    class Report:
        def __init__(self, nodeid: str, outcome: str, when: str = "call") -> None:
            self.nodeid, self.outcome, self.when = nodeid, outcome, when
            self.passed = outcome == "passed"

    first, second, third = read_rows()[:3]
    score = Score([first, second, third])
    reports = [Report(f"{first.tests[0]}[a case]", "passed"), Report(second.tests[0], "skipped", "setup")]
    for report in (*reports, Report(second.tests[-1], "passed"), Report(third.tests[0], "passed", "setup")):
        score.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert score.lines(is_quick=True)[-1] == "1 passed, 1 failed"
    assert score.lines(is_quick=False)[-1] == "1 passed, 2 failed"
    assert score.has_failed(is_quick=True)
