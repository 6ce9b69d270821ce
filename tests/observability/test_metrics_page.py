"""docs/metrics.md against what /metrics shows: every family, its type, its labels and what it says of itself."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DOC = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)

Family = tuple[str, str, str]
"""Type, labels, meaning."""


def shown(page: str) -> dict[str, Family]:
    """The families of a page by the name that queries use."""
    found: dict[str, Family] = {}
    for family in text_string_to_metric_families(page):
        if not family.samples:
            continue
        labels = {label for sample in family.samples for label in sample.labels if label not in ("le", "quantile")}
        name = family.samples[0].name if family.type == "counter" else family.name
        found[name] = (family.type, ", ".join(f"`{label}`" for label in sorted(labels)), family.documentation)
    return found


def told() -> dict[str, Family]:
    """The families of docs/metrics.md."""
    rows = _ROW.findall(DOC.read_text(encoding="utf-8"))
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, labels.strip(), meaning.strip()) for name, kind, labels, meaning in rows}


def test_the_page_of_metrics_is_right(page: str) -> None:
    assert told() == shown(page)


def test_nothing_is_exported_twice_and_every_family_says_what_it_is(page: str) -> None:
    types = re.findall(r"^# TYPE (\S+)", page, flags=re.MULTILINE)
    assert len(set(types)) == len(types)
    assert all(meaning for _, _, meaning in shown(page).values())
    assert "_created" not in page
