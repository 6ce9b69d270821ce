"""The page shows what the daemon does: its numbers are those of /metrics, and its memory is bounded."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.site import Site, full_gauges, samples_of, shown, site, visit, wait_redraws
from tests.e2e.daemon import daemon
from tests.server.fake_engine import Script
from tiercel.server.ui.past import PERIOD_S
from tiercel.wire.frames import Report

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


def test_the_page_shows_the_numbers_of_metrics(page: "Page", open_site: Site) -> None:
    visit(page, open_site)
    open_site.complete(max_tokens=7)
    open_site.send(Report(gauges=full_gauges()))
    wait_redraws(page, 3)
    metric = open_site.metrics()
    labels = '{engine="0",model_name="tiny"}'
    for name, family in (
        ("output", "generation_tokens_total"),
        ("prompt", "prompt_tokens_total"),
        ("running", "num_requests_running"),
        ("waiting", "num_requests_waiting"),
    ):
        assert shown(page, name) == metric[f"vllm:{family}{labels}"], name
    for tier in ("hbm", "ddr", "ssd"):
        reported = page.evaluate(f"({{...document.querySelector('.tier[data-tier={tier}]').dataset}})")
        for name in ("capacity", "used", "cached"):
            assert float(reported[name]) == metric[f'tiercel_kv_{name}_bytes{{tier="{tier}"}}'], (tier, name)
    for way, route in (("down", "hbm_ddr"), ("up", "ddr_hbm")):
        moved = page.evaluate(f"document.querySelector('[data-lane=hbm-ddr] .{way}').dataset.bytes")
        assert float(moved) == metric[f'tiercel_kv_transfer_bytes_total{{route="{route}"}}']
    tokens = page.evaluate("document.querySelector('#tenants tr[data-tenant=default]').dataset.tokens")
    assert float(tokens) == metric['tiercel_tenant_generation_tokens_total{tenant="default"}']


def test_the_memory_of_the_page_is_bounded(page: "Page", open_site: Site) -> None:
    visit(page, open_site)
    sizes = page.evaluate(
        """async () => {
          const { History } = await import('./ui/history.js');
          const told = await (await fetch('ui/data')).json();
          const history = new History();
          for (let tick = 0; tick < 20000; tick += 1) {
            const work = { ...told.work, generation_tokens: 1e6 + tick };
            history.add({ ...told, at_s: told.at_s + tick * 0.02, work });
          }
          const series = Object.values(history.series).map(one => one.length);
          return [history.recent.length, history.times.length, ...series];
        }"""
    )
    assert max(sizes) <= 1000
    assert len(set(sizes[1:])) == 1, "all series are as long as their times"


def test_quantiles_follow_from_the_buckets(page: "Page", open_site: Site) -> None:
    visit(page, open_site)
    found = page.evaluate(
        """async () => {
          const { History } = await import('./ui/history.js');
          const told = await (await fetch('ui/data')).json();
          const history = new History();
          const at = (second, counts, tokens) => history.add({ ...told, at_s: second,
            work: { ...told.work, generation_tokens: tokens, first_token: { bounds: [0.1, 0.2, 0.4], counts } } });
          at(0, [10, 10, 10, 10], 0);
          at(1, [10, 20, 30, 30], 100);
          return [history.now('ttft50'), history.now('ttft95'), history.now('output')];
        }"""
    )
    assert found == pytest.approx([0.2, 0.38, 100])


def test_the_figures_of_a_dead_server_are_dimmed_and_dated(page: "Page", folder: Path, pictures: Path) -> None:
    with site(folder, Script()) as going:
        going.complete(max_tokens=5)
        going.send(Report(gauges=full_gauges()))
        visit(page, going)
        wait_redraws(page, 3)
        assert page.locator("#standstill").is_hidden()
    page.get_by_text("No answer from the server").wait_for()
    said = page.locator("#standstill").inner_text()
    assert re.search(r"All figures are of \d\d:\d\d:\d\d, \d+ s ago", said)
    seen = re.findall(r"\d\d:\d\d:\d\d", said)
    for place in page.locator(".plot").all():
        assert place.get_attribute("data-end") == seen[0], "the axis ends at the last moment, not now"
    strength = """selector => {
      let [node, strength] = [document.querySelector(selector), 1];
      for (; node; node = node.parentElement) strength *= Number(getComputedStyle(node).opacity);
      return strength;
    }"""
    for part in (".vitals b", ".plot", ".tier .amount", "#tier-keys", "#tenants .name", "#requests-note"):
        assert 0.3 < page.evaluate(strength, part) < 0.6, part
    assert page.evaluate(strength, "#standstill") == page.evaluate(strength, "#prompt") == 1
    page.screenshot(path=str(pictures / "ui-dead.png"), full_page=True)


def test_the_charts_begin_before_the_page_was_opened(page: "Page", folder: Path) -> None:
    with site(folder, Script(step_s=0.01)) as going:
        for _ in range(3):
            going.complete(max_tokens=30)
            time.sleep(PERIOD_S)
        visit(page, going)
        assert int(page.locator(".plot").first.get_attribute("data-points") or 0) >= 4
        outputs = page.evaluate(
            """async () => {
              const { History } = await import('./ui/history.js');
              const history = new History();
              history.begin(await (await fetch('ui/past')).json());
              return history.series.output;
            }"""
        )
        assert max(filter(None, outputs)) > 1, "the work of that time is in the charts"
        assert shown(page, "output") == 90


def test_tokens_of_one_read_share_the_time_before_it(page: "Page", open_site: Site) -> None:
    """The network brings tokens together: the median gap is that of the tokens, not of the reads."""
    visit(page, open_site)
    found = page.evaluate(
        """async () => {
          const { Timeline } = await import('./ui/timeline.js');
          const line = new Timeline();
          line.start(0);
          line.add(1, 500);
          for (let token = 0; token < 5; token += 1) line.add(1, 600);
          line.add(5, 700);
          line.add(1, 760);
          const places = [...document.querySelectorAll('#timeline line')].map(mark => Number(mark.getAttribute('x1')));
          return [...['first', 'tokens', 'gap', 'longest', 'rate'].map(name =>
            document.getElementById(`t-${name}`).textContent), places];
        }"""
    )
    assert found[:5] == ["500 ms", "12", "20 ms", "60 ms", "42"]
    assert found[5] == [500, *range(520, 720, 20), 760]


def test_a_snapshot_that_cannot_be_drawn_is_reported_and_dropped(
    page: "Page", open_site: Site, noise: list[str]
) -> None:
    visit(page, open_site)

    def spoil(route: "Route") -> None:
        reported = route.fetch().json()
        route.fulfill(json={**reported, "tiers": None})

    page.route("**/ui/data", spoil)
    page.get_by_text("This page cannot draw what the server tells.").wait_for()
    assert "tiers" in " ".join(noise) or "null" in " ".join(noise), "the console says why"
    page.unroute("**/ui/data")
    wait_redraws(page)
    assert page.locator("#status").inner_text() == "serving"


# ---- the real daemon


def test_the_real_daemon_moves_real_blocks(page: "Page", tmp_path: Path, noise: list[str], pictures: Path) -> None:
    flags = ["--cpu-device-pool", "--kv-cache-memory-bytes", "4M", "--kv-host-size", "16M", "--threads", "1"]
    flags += ["--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-size", "64M"]
    with daemon(tmp_path, *flags) as real:
        visit(page, real)
        for turn in range(6):
            text = f"Report {turn % 3} of the harbour. " * 40
            assert real.complete(f"{text} What of {turn}?", max_tokens=24, ignore_eos=True).status_code == 200
        page.get_by_label("Your message").fill("Where does the blue boat lie?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".said.assistant:not(.is-coming):not(:empty)")
        assert page.locator("#timeline line").count() == int(page.locator("#t-tokens").inner_text())
        page.wait_for_selector(".tier[data-tier=ssd]:not(.is-missing)")
        wait_redraws(page, 3)
        before = samples_of(real.http.get("/metrics").text)
        wait_redraws(page, 3)
        output, moved = shown(page, "output"), page.evaluate("document.querySelector('.flow.down').dataset.bytes")
        after = samples_of(real.http.get("/metrics").text)
        name = f'vllm:generation_tokens_total{{engine="0",model_name="{real.model}"}}'
        assert before[name] <= output <= after[name]
        route = 'tiercel_kv_transfer_bytes_total{route="hbm_ddr"}'
        assert 0 < before[route] <= float(moved) <= after[route]
        page.screenshot(path=str(pictures / "ui-real.png"), full_page=True)
        assert page.locator("#tenants .name").all_inner_texts() == ["default"]
        assert noise == []
