"""The scorecard of faults: the numbered rows of docs/faults.md, and the tests that they name.

A test is named by its node id in backticks. `::test_name` alone is in the file named before it in the same row.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
ROWS = range(1, 43)
_ROW = re.compile(r"\| (\d+) \|")
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Row:
    """One fault and the node ids of its tests: files, functions, or single cases of them."""

    number: int
    fault: str
    tests: tuple[str, ...]

    def has(self, node: str) -> bool:
        """Return whether a collected test belongs to the row."""
        return any(node == test or node.startswith((f"{test}::", f"{test}[")) for test in self.tests)


def read_rows(page: Path = PAGE) -> tuple[Row, ...]:
    """Return the numbered rows of the page in their order."""
    rows: list[Row] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        found = _ROW.match(line)
        if found is None:
            continue
        _, _, fault, _, tests, _ = (cell.strip() for cell in line.split("|"))
        rows.append(Row(int(found[1]), fault, tuple(_node_ids(_CODE.findall(tests)))))
    return tuple(rows)


def _node_ids(names: Iterable[str]) -> Iterable[str]:
    path = ""
    for name in names:
        if name.startswith("tests/"):
            path = name.partition("::")[0]
            yield name
        elif name.startswith("::"):
            yield path + name
