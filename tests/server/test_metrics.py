import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server

TEXT = "/v1/completions"
REQUIRED = [
    *["num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"],
    *["prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total"],
    *["generation_tokens_total", "cache_config_info", "request_success_total", "prompt_tokens_by_source_total"],
    *["prompt_tokens_cached_total"],
]
HISTOGRAMS = [
    *["iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens", "request_params_n"],
    *["request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds"],
    *["e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"],
    *["request_prefill_time_seconds", "request_decode_time_seconds", "request_num_preemptions"],
    *["request_time_per_output_token_seconds", "request_max_num_generation_tokens"],
    *["request_prefill_kv_computed_tokens"],
]


async def _samples(server: Running) -> dict[str, float]:
    """Sum of every series by name."""
    text = (await server.http.get("/metrics")).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_ten_requests_of_ten_tokens_count_exactly(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        prompt = 0
        for _ in range(10):
            answer = await server.http.post(TEXT, json=text_body(max_tokens=10))
            prompt = answer.json()["usage"]["prompt_tokens"]
        await until(lambda: server.service.client.num_unfinished == 0)
        seen = await _samples(server)
        assert seen["vllm:inter_token_latency_seconds_count"] == 10 * 9
        assert seen["vllm:iteration_tokens_total_sum"] == 10 * (prompt + 10)
        assert seen["vllm:iteration_tokens_total_count"] == 10 * 10
        assert seen["vllm:time_to_first_token_seconds_count"] == 10
        assert seen["vllm:prompt_tokens_total"] == 10 * prompt
        assert seen["vllm:generation_tokens_total"] == 100
        assert seen["vllm:request_success_total"] == 10
        assert seen["vllm:e2e_request_latency_seconds_count"] == 10
        assert seen["vllm:request_params_n_sum"] == 10
        assert seen["vllm:request_params_max_tokens_sum"] == 100
        assert seen["vllm:request_prompt_tokens_sum"] == 10 * prompt
        assert seen["vllm:prompt_tokens_cached_total"] == 10
        assert seen["vllm:prompt_tokens_by_source_total"] == 10 * prompt
        assert seen["vllm:num_requests_running"] == 0

    with_server(server_settings(model_folder), test, Script(cached=1))


def test_every_name_that_dashboards_read_exists(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(n=3, max_tokens=2))
        seen = await _samples(server)
        names = [*REQUIRED, *(f"{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count", "bucket"))]
        assert [name for name in names if f"vllm:{name}" not in seen] == []
        assert (seen["vllm:request_params_n_sum"], seen["vllm:request_params_n_count"]) == (3, 1)
        text = (await server.http.get("/metrics")).text
        assert 'kv_cache_size_tokens="1024"' in text
        assert 'kv_cache_max_concurrency="4.00"' in text
        assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"}' in text
        assert 'vllm:request_prompt_tokens_bucket{engine="0",le="200.0",model_name="tiny"}' in text
        assert 'vllm:request_prompt_tokens_bucket{engine="0",le="500.0",model_name="tiny"}' not in text

    with_server(server_settings(model_folder), test)


def test_refusals_count_under_their_status_and_probes_do_not_count(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post("/v1/chat/completions", json=chat_body(tools=[]))
        await server.http.post("/v1/chat/completions", json=chat_body(max_tokens=1))
        for path in ("/health", "/ping", "/version", "/load", "/metrics"):
            await server.http.get(path)
        text = (await server.http.get("/metrics")).text
        line = 'http_requests_total{{handler="/v1/chat/completions",method="POST",status="{}"}} 1.0'
        assert line.format("4xx") in text
        assert line.format("2xx") in text
        assert 'handler="/health"' not in text
        assert 'http_request_duration_seconds_count{handler="/v1/chat/completions",method="POST"} 2.0' in text

    with_server(server_settings(model_folder), test)


def test_names_that_clients_invent_do_not_become_labels(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for method, path in (("PROPFIND", "/x"), ("GET", "/secret-1"), ("GET", "/v1/models/secret-2")):
            await server.http.request(method, path)
        text = (await server.http.get("/metrics")).text
        assert 'http_requests_total{handler="none",method="other",status="4xx"} 1.0' in text
        assert "secret" not in text
        assert "PROPFIND" not in text

    with_server(server_settings(model_folder), test)


def test_refused_admissions_and_broken_streams_are_counted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.http.post(TEXT, json=text_body([8], max_tokens=1)))
            await until(lambda: server.service.client.num_tokenless == 1)
            refused = await server.http.post(TEXT, json=text_body([8]))
        assert refused.status_code == 503
        await server.http.post(TEXT, json=text_body([7]))
        text = (await server.http.get("/metrics")).text
        assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 1.0' in text
        assert 'tiercel_stream_errors_total{reason="engine_error"} 1.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0' in text

    with_server(server_settings(model_folder), test, Script(fail_prompt_with=7, step_s=0.2), max_num_queued_reqs=1)


def test_waiting_sequences_have_a_reason(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(server.http.post(TEXT, json=text_body(max_tokens=4)))
            await until(lambda: server.service.client.gauges.num_waiting == 2)
            text = (await server.http.get("/metrics")).text
        line = 'vllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny",reason="{}"}} {}'
        assert line.format("capacity", 2.0) in text
        assert line.format("deferred", 0.0) in text

    with_server(server_settings(model_folder), test, Script(step_s=0.1, max_running=1))


def test_metrics_exist_while_the_model_loads(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=5), wait=False) as server:
            answer = await server.http.get("/metrics")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    asyncio.run(test())
