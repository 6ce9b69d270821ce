"""The files of docker/observability: read by promtool where there is one, and by our own parser in any case."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.observability.test_expressions import BOARDS, FOLDER, RULES, Tree, board_expressions, panels, rules
from tests.programs import find_program

ROOT = FOLDER.parent.parent
RUNBOOK = ROOT / "docs" / "runbook.md"
DATASOURCE = {"type": "prometheus", "uid": "tiercel-prometheus"}
_PANELS = {"stat", "timeseries", "bargauge", "heatmap", "table"}
_DURATION = re.compile(r"\d+[smhd]")


def _promtool(*arguments: str | Path) -> str:
    done = subprocess.run([find_program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in _promtool("check", "rules", *RULES)


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "key").write_text("k")
    text = text.replace("/etc/prometheus/rules", str(FOLDER / "rules")).replace(
        "/run/secrets/metrics_key", str(tmp_path / "key")
    )
    (tmp_path / "prometheus.yml").write_text(text)
    _promtool("check", "config", tmp_path / "prometheus.yml")


@pytest.mark.slow
def test_promtool_finds_the_alerts_firing_when_they_should() -> None:
    _promtool("test", "rules", Path(__file__).parent / "rules_test.yml")


def test_promtool_accepts_every_expression_of_the_boards(tmp_path: Path) -> None:
    reported = [{"record": f"board:{number}", "expr": text} for number, (_, text) in enumerate(board_expressions())]
    (tmp_path / "boards.yml").write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": reported}]}))
    _promtool("check", "rules", "--lint=none", tmp_path / "boards.yml")


def test_promtool_accepts_the_page(page: str) -> None:
    """Names that are vLLM's are not what promtool's linter likes; what it cannot parse is an error all the same."""
    command = [find_program("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=False)
    assert "error while linting" not in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("tiercel_") and "counter" in line]


def test_the_configuration_finds_rules_key_and_daemon_where_compose_puts_them() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yml"]
    assert job["job_name"] == "tiercel"
    assert job["static_configs"] == [{"targets": ["tiercel:8000"]}]
    assert job["params"] == {"detail": ["tenants"]}
    compose = yaml.safe_load((FOLDER.parent / "compose.observability.yaml").read_text(encoding="utf-8"))
    prometheus = compose["services"]["prometheus"]
    assert "./observability/rules:/etc/prometheus/rules:ro" in prometheus["volumes"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{prometheus['secrets'][0]}"


def test_grafana_is_given_the_datasource_that_the_boards_name_and_the_folder_of_the_boards() -> None:
    provisioning = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert {key: source[key] for key in DATASOURCE} == DATASOURCE
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tiercel.yml").read_text())["providers"]
    compose = yaml.safe_load((FOLDER.parent / "compose.observability.yaml").read_text(encoding="utf-8"))
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./observability/grafana/dashboards:{provider['options']['path']}:ro" in mounts


def test_there_are_three_boards_of_their_own() -> None:
    boards = [json.loads(file.read_text(encoding="utf-8")) for file in BOARDS]
    assert [file.stem for file in BOARDS] == ["overview", "tenants", "tiers"]
    assert [board["uid"] for board in boards] == [f"tiercel-{file.stem}" for file in BOARDS]
    assert all(board["id"] is None and board["schemaVersion"] >= 39 for board in boards)
    assert "tenant" in {variable["name"] for variable in boards[1]["templating"]["list"]}


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_a_board_is_one_that_grafana_can_draw(file: Path) -> None:
    board = json.loads(file.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {variable["datasource"]["uid"] for variable in board["templating"]["list"]} == {DATASOURCE["uid"]}
    for panel in panels(file):
        assert panel["type"] in _PANELS
        assert panel["title"]
        assert panel["datasource"] == DATASOURCE
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            named = set(re.findall(r"\$(?!__)(\w+)", target["expr"]))
            assert named <= variables, target["expr"]


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_panels_do_not_overlap(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_rules_are_whole() -> None:
    names = [rule.get("alert") or rule["record"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        if "record" in rule:
            assert re.fullmatch(r"[a-z]+:[a-z0-9_]+:[a-z0-9_]+", rule["record"])
            continue
        assert re.fullmatch(r"Tiercel[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert _DURATION.fullmatch(rule.get("for", "0s"))


def _alerts() -> list[Tree]:
    return [rule for rule in rules() if "alert" in rule]


@pytest.mark.parametrize("rule", _alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_has_its_section_in_the_runbook(rule: Tree) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == "docs/runbook.md"
    assert anchor == rule["alert"].lower()
    sections = re.split(r"^## ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    (section,) = [text for text in sections if text.split("\n", 1)[0].strip().lower() == anchor]
    for word in ("**Means.**", "**See.**", "**Do.**"):
        assert word in section
    assert rule["labels"]["severity"] in section


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    sections = re.findall(r"^## (Tiercel\w+)", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections == [rule["alert"] for rule in _alerts()]
