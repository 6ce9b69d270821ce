"""docs/metrics.md compared with /metrics: every family, its type, labels and help text."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.observability.page import samples
from tests.server.fleet_parts import Access
from tests.server.harness import Running, server_settings, with_server
from tiercel.server.app import create_app
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.links.link import EngineLink
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.values.clock import ManualClock

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
    """Return the families of docs/metrics.md."""
    rows = _ROW.findall(DOC.read_text(encoding="utf-8"))
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, labels.strip(), meaning.strip()) for name, kind, labels, meaning in rows}


def fleet_page() -> dict[str, Family]:
    """The families that only a front with several engines has."""
    metrics, clock = ServerMetrics("tiny"), ManualClock()
    client = FleetClient(clock, metrics, random.Random(1))
    metrics.open_fleet(lambda: client.links)
    client.add(EngineLink("127.0.0.1", 8100, "", Access(), client, clock))
    found = shown(metrics.exposition().decode())
    return {name: family for name, family in found.items() if name.startswith("tiercel_fleet_")}


def test_the_page_of_metrics_is_right(page: str) -> None:
    assert told() == shown(page) | fleet_page()


def test_no_metric_is_exported_twice_and_every_family_has_a_help_text(page: str) -> None:
    types = re.findall(r"^# TYPE (\S+)", page, flags=re.MULTILINE)
    assert len(set(types)) == len(types)
    assert all(meaning for _, _, meaning in shown(page).values())
    assert "_created" not in page


def test_errors_are_exported_before_the_first_occurs(page: str, model_folder: Path) -> None:
    """`increase` misses the first event of a new series, so every possible series starts with 0."""

    async def test(server: Running) -> None:
        fresh = set(_events((await server.http.get("/metrics")).text))
        paths: dict[str, object] = create_app(server.context).openapi()["paths"]
        posts = {path for path, methods in paths.items() if "post" in str(methods)}
        posts = {path for path in posts if not path.startswith(("/admin", "/ping"))}  # those take no work
        assert "/v1/completions" in posts
        assert {("http_requests_total", "5xx", "POST", path) for path in posts} <= fresh
        assert {("tiercel_stream_errors_total", reason) for reason in ("engine_error", "engine_dead")} <= fresh
        occurred = {
            event for event in _events(page) if event[0] != "http_requests_total" or event[1:3] == ("5xx", "POST")
        }
        assert {event[1] for event in occurred} >= {"queue_full", "tenant_requests", "engine_error", "5xx"}
        assert occurred <= fresh

    with_server(server_settings(model_folder), test)


def _events(page: str) -> Iterator[tuple[str, ...]]:
    """Return the series that alerts use with `increase` and `rate`, by reason or status."""
    labels_by_name = {
        "http_requests_total": ("status", "method", "handler"),
        "tiercel_stream_errors_total": ("reason",),
        "vllm:admission_rejections_total": ("reason",),
    }
    for name, labels in samples(page):
        if name in labels_by_name:
            yield name, *(labels[label] for label in labels_by_name[name])
