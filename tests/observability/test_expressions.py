"""Every expression of every panel, variable and rule finds its series, with their labels, in a real /metrics page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.page import catalog
from tests.observability.promql import Catalog, PromqlError, parse
from tiercel.loadtest.metrics import metric

FOLDER = Path(__file__).resolve().parent.parent.parent / "docker" / "observability"
BOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((FOLDER / "rules").glob("*.yml"), reverse=True)  # recording.yml before alerts.yml
_LABEL_VALUES = re.compile(r"label_values\((.+), *([a-z_]+)\)")

# Any: what a file holds is known only once it is read
Tree = dict[str, Any]


def plain(expression: str) -> str:
    """The expression as Grafana sends it."""
    expression = re.sub(r"\$__(rate_interval|interval|range)\b", "5m", expression)
    return re.sub(r"\$(instance|tenant)\b", ".*", expression)


def rules() -> Iterator[Tree]:
    """Return every rule in the order of evaluation."""
    for file in RULES:
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def panels(file: Path) -> list[Tree]:
    """Return every panel of a board except rows."""
    return [panel for panel in json.loads(file.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]


def board_expressions() -> Iterator[tuple[str, str]]:
    """Return (place, expression) pairs."""
    for file in BOARDS:
        board = json.loads(file.read_text(encoding="utf-8"))
        for panel in panels(file):
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}: {target['refId']}", plain(target["expr"])
        for note in board["annotations"]["list"]:
            if "target" in note:
                yield f"{file.stem}: {note['name']}", plain(note["target"]["expr"])


@pytest.fixture(scope="module")
def known(page: str) -> Catalog:
    """The page's series and those that the recording rules make of them."""
    found = catalog(page)
    for rule in rules():
        if "record" in rule:
            series = found.find(rule["expr"])
            assert series, rule["record"]
            found.add(rule["record"], series)
    return found


@pytest.mark.parametrize("rule", list(rules()), ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_finds_its_series(rule: Tree, known: Catalog) -> None:
    found = known.find(rule["expr"])
    assert found
    used = set(re.findall(r"\$labels\.(\w+)", str(rule.get("annotations"))))
    for series in found:
        assert used <= dict(series).keys()


@pytest.mark.parametrize(("where", "expression"), list(board_expressions()), ids=lambda word: word[:60])
def test_every_panel_finds_its_series(where: str, expression: str, known: Catalog) -> None:
    assert known.find(expression), where


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_every_legend_names_labels_that_are_left(file: Path, known: Catalog) -> None:
    for panel in panels(file):
        for target in panel["targets"]:
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for series in known.find(plain(target["expr"])) or ():
                left = dict(series).keys() | ({"le"} if panel["type"] == "heatmap" else set[str]())
                assert used <= left, (panel["title"], target["expr"])


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_every_variable_finds_its_label(file: Path, known: Catalog) -> None:
    for variable in json.loads(file.read_text(encoding="utf-8"))["templating"]["list"]:
        match = _LABEL_VALUES.fullmatch(variable["definition"])
        assert match is not None
        for series in known.find(plain(match[1])) or ():
            assert match[2] in dict(series)


def test_every_metric_that_the_load_test_reads_exists(known: Catalog) -> None:
    names = {name for key, name in vars(metric).items() if key.isupper() and isinstance(name, str) and key != "PAGE"}
    names |= set(metric.OFFLOAD_BYTES.values())
    assert names <= known.names


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("rate(tiercel_kv_transfer_byte_total[5m])", "no series tiercel_kv_transfer_byte_total"),
        ("sum by (teir) (tiercel_kv_used_bytes)", "no such label"),
        ('tiercel_kv_used_bytes{teir="hbm"}', "no label teir"),
        ('tiercel_kv_used_bytes{tier="dram"}', 'tier="dram"'),
        ('http_requests_total{status=~"5..x"}', "status=~"),
        ("histogram_quantile(0.9, sum by (tenant) (rate(tiercel_tenant_ttft_seconds_bucket[5m])))", "le is gone"),
        ("tiercel_tenant_weight / sum(tiercel_tenant_weight)", "no labels in common"),
        ("tiercel_tenant_weight * on (job) tiercel_kv_used_bytes", "several series"),
        ("sum by (tenant) (tiercel_kv_used_bytes) > 0", "no such label"),
        ("rate(vllm:num_preemptions_total)", "wants range"),
        ("sum(rate(vllm:num_preemptions_total[5m])", "ends too early"),
        ("absurd(vllm:num_preemptions_total)", "unknown function"),
    ],
)
def test_a_wrong_expression_is_found_out(wrong: str, says: str, known: Catalog) -> None:
    with pytest.raises(PromqlError, match=re.escape(says)):
        known.find(wrong)


def test_one_letter_anywhere_in_a_name_of_a_rule_is_found_out(known: Catalog) -> None:
    for rule in rules():
        for name in set(re.findall(r"\b(?:vllm:|tiercel_|process_|http_)[a-z0-9_:]+", rule["expr"])):
            with pytest.raises(PromqlError):
                known.find(rule["expr"].replace(name, f"{name[:-1]}_"))


def test_operators_bind_as_in_prometheus() -> None:
    assert parse("1 + 2 * 3 ^ 2 ^ 1 > bool 4 and 5 or 6") == parse("(((1 + (2 * (3 ^ (2 ^ 1)))) > bool 4) and 5) or 6")
    assert parse("a - b - c") == parse("(a - b) - c")
    assert parse("a - b - c") != parse("a - (b - c)")
