"""The counts of what is hard to read."""

from collections import Counter

import pytest

from tools.house import LIMITS, findings


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("x = [*(1, 2)]", "starred tuples"),
        ("x = 1  # fmt: skip", "fmt: skip"),
        ("f(1, 2, 3, 4, 5)", "calls with more than four positional arguments"),
        ("class A:\n    def note_end(self): ...", "methods named take, tell, hear or note_*"),
        ("class CrashBook: ...", "classes named *Book"),
        ("size = 3  # of a block", "comments that are fragments"),
    ],
)
def test_each_kind_is_found_once(source: str, kind: str) -> None:
    assert Counter(found for found, _ in findings(source)) == {kind: 1}
    assert kind in LIMITS


@pytest.mark.parametrize(
    "source",
    [
        "x = [*values]",
        "f(1, 2, 3, 4, last=5)",
        "def take(): ...",
        "class Booking: ...",
        "size = 3  # Blocks are counted.",
        "# of a block\nsize = 3",
        "import a  # noqa: F401",
    ],
)
def test_plain_code_does_not_count(source: str) -> None:
    assert list(findings(source)) == []
