"""Prometheus text as servers write it."""

from loadtest.scrape import parse_metrics

TEXT = """\
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="a b",reason="x}y"} 3.0
# TYPE tiercel_swapped_tokens counter
tiercel_swapped_tokens_total 12 1700000000
tiercel_swapped_tokens_created 1.7e9
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0.5
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1
vllm:e2e_request_latency_seconds_sum 4.5
process_cpu_seconds_total 3
python_gc_objects_collected_total{generation="0"} 3
nothing_here NaN
nonsense
"""


def test_series_are_read_with_their_labels_and_counters_are_known() -> None:
    reading = parse_metrics(TEXT)
    assert reading.values == {
        'vllm:num_preemptions_total{model_name="a b",reason="x}y"}': 3.0,
        "tiercel_swapped_tokens_total": 12.0,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:e2e_request_latency_seconds_sum": 4.5,
        "process_cpu_seconds_total": 3.0,
    }
    assert reading.counters == {
        'vllm:num_preemptions_total{model_name="a b",reason="x}y"}',
        "tiercel_swapped_tokens_total",
    }
