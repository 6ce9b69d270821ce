"""The daemon with a real engine and three tiers has every family that the tests of this folder take for granted."""

from pathlib import Path

from tests.e2e.daemon import daemon
from tests.observability.page import catalog, samples
from tests.observability.promql import Catalog

TENANTS = """
tenants:
  - {name: anna, key: one, weight: 3, slo: {ttft_s: 30, tbt_s: 5}}
  - {name: berta, key: two}
"""
FLAGS = (
    *("--cpu-device-pool", "--kv-cache-memory-bytes", "32M", "--kv-host-size", "64M"),
    *("--kv-disk-path", "kv", "--kv-disk-size", "64M", "--kv-disk-daily-writes", "1G"),
    *("--calibration-seconds", "0", "--tenants-config", "tenants.yaml", "--files-path", "files"),
)
# What exists only once something has gone wrong, or two tenants have waited for seconds.
ON_OCCASION = {
    *("tiercel_fairness_jain", "tiercel_service_gap_seconds", "tiercel_kv_mean_run_blocks"),
    *("tiercel_tenant_throttled_by_reason_total", "tiercel_tenant_preemptions_by_reason_total"),
}


def test_a_real_engine_exports_all_metrics_that_the_boards_read(page: str, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    with daemon(tmp_path, *FLAGS) as running:
        for key in ("one", "two"):
            body = {"prompt": "one two three four five six seven " * 8, "max_tokens": 4}
            answer = running.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        text = running.http.get("/metrics?detail=tenants").text
    wanted, found = catalog(page), catalog(text)
    assert wanted.names - found.names - ON_OCCASION == set()
    assert found.names - wanted.names == set()
    assert _labels(wanted) == _labels(found) | {
        name: labels for name, labels in _labels(wanted).items() if name in ON_OCCASION
    }
    values = {name for name, labels in samples(text) if labels.get("tenant") == "anna"}
    assert "tiercel_tenant_service_seconds_total" in values


def _labels(known: Catalog) -> dict[str, set[str]]:
    """The names of the labels of each name."""
    return {name: {label for one in known.find(name) or () for label, _ in one} for name in known.names}
