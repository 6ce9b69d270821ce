"""Prometheus text as servers write it."""

import asyncio

import httpx
import pytest

from tiercel.loadtest.metrics.exposition import parse_exposition, parse_series, select, total, totals
from tiercel.loadtest.metrics.scrape import Scraper
from tiercel.values.clock import MonotonicClock

TEXT = """\
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="a b",reason="x}y"} 3.0
# TYPE tiercel_swapped_tokens counter
tiercel_swapped_tokens_total 12 1700000000
tiercel_swapped_tokens_created 1.7e9
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0.5
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1 # {trace_id="{a}"} 0.2 1700000000
vllm:e2e_request_latency_seconds_sum 4.5
python_gc_objects_collected_total{generation="0"} 3
not_a_number NaN
nonsense
"""
PREEMPTIONS = 'vllm:num_preemptions_total{model_name="a b",reason="x}y"}'


def test_series_are_read_with_their_labels_and_counters_are_known() -> None:
    page = parse_exposition(TEXT)
    assert page.values == {
        PREEMPTIONS: 3,
        "tiercel_swapped_tokens_total": 12,
        "tiercel_swapped_tokens_created": 1.7e9,
        "vllm:kv_cache_usage_perc": 0.5,
        'vllm:e2e_request_latency_seconds_bucket{le="0.3"}': 1,
        "vllm:e2e_request_latency_seconds_sum": 4.5,
        'python_gc_objects_collected_total{generation="0"}': 3,
    }
    assert page.counters == {PREEMPTIONS, "tiercel_swapped_tokens_total"}
    assert parse_series(PREEMPTIONS).labels == {"model_name": "a b", "reason": "x}y"}
    assert parse_series('a{b="c,\\"}d",e="f"}').labels == {"b": 'c,"}d', "e": "f"}


def test_a_page_of_something_else_is_empty() -> None:
    assert parse_exposition("<html>\n<p>hello 3</p>\n</html>").values == {}


def test_series_are_picked_by_name_and_labels() -> None:
    values = {'a{t="x",m="1"}': 1.0, 'a{t="y",m="1"}': 2.0, 'a_b{t="x"}': 4.0, "a": 8.0}
    assert total(values, "a") == 11
    assert total(values, "b") is None
    assert totals(values, "a", "t") == {"x": 1, "y": 2}
    assert select(values, "a", t="x", m="1") == {'a{t="x",m="1"}': 1.0}


@pytest.mark.parametrize("status", [200, 404])
def test_a_run_keeps_counters_before_and_after_and_omits_metrics_that_no_chart_uses(status: int) -> None:
    pages = iter((TEXT, TEXT.replace("3.0", "5.0")))
    transport = httpx.MockTransport(lambda _request: httpx.Response(status, text=next(pages, "")))

    async def run() -> Scraper:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            scraper = Scraper(client, "/metrics", MonotonicClock())
            async with scraper.open():
                pass
            return scraper

    counters = asyncio.run(run()).counters()
    if status == 404:
        assert counters == {}
        return
    assert set(counters) == {PREEMPTIONS, "tiercel_swapped_tokens_total"}
    assert counters[PREEMPTIONS].delta == 2
