"""Metrics of the server and the engine."""

import asyncio
import sys
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server
from tiercel.server.client.collector import Mailbox
from tiercel.server.client.sequences import SequenceFacts, SequenceStart
from tiercel.server.metrics import engine as engine_metrics
from tiercel.server.metrics.engine import EngineMetrics
from tiercel.server.metrics.exposition import Kind, family
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.values.ids import SeqId
from tiercel.values.outcome import BAD_LOGITS, Finished, FinishReason, Gauges
from tiercel.values.request import SamplingParams
from tiercel.wire.frames import Ready

TEXT = "/v1/completions"
REQUIRED = [
    *["num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"],
    *["prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total"],
    *["generation_tokens_total", "cache_config_info", "request_success_total", "prompt_tokens_by_source_total"],
    *["prompt_tokens_cached_total", "corrupted_requests_total"],
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
    for reported in text_string_to_metric_families(text):
        for sample in reported.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_ten_requests_of_ten_tokens_count_exactly(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        prompt = 0
        for _ in range(10):
            answer = await server.http.post(TEXT, json=text_body(max_tokens=10))
            prompt = answer.json()["usage"]["prompt_tokens"]
        await until(lambda: server.context.client.sequences.num_unfinished == 0)
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
        assert 'vllm:time_to_first_token_seconds_bucket{le="0.001",engine="0",model_name="tiny"}' in text
        assert 'vllm:request_prompt_tokens_bucket{le="200.0",engine="0",model_name="tiny"}' in text
        assert 'vllm:request_prompt_tokens_bucket{le="500.0",engine="0",model_name="tiny"}' not in text

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
            await until(lambda: server.context.client.sequences.num_tokenless == 1)
            refused = await server.http.post(TEXT, json=text_body([8]))
        assert refused.status_code == 503
        await server.http.post(TEXT, json=text_body([7]))
        text = (await server.http.get("/metrics")).text
        assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 1.0' in text
        assert 'tiercel_stream_errors_total{reason="engine_error"} 1.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1\n' in text

    with_server(server_settings(model_folder), test, Script(fail_prompt_with=7, step_s=0.2), max_num_queued_reqs=1)


def test_waiting_sequences_have_a_reason(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(server.http.post(TEXT, json=text_body(max_tokens=4)))
            await until(lambda: server.context.client.gauges.num_waiting == 2)
            text = (await server.http.get("/metrics")).text
        line = 'vllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny",reason="{}"}} {}'
        assert line.format("capacity", 2) in text
        assert line.format("deferred", 0) in text

    with_server(server_settings(model_folder), test, Script(step_s=0.1, max_running=1))


def test_metrics_exist_while_the_model_loads(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=5), wait=False) as server:
            answer = await server.http.get("/metrics")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    asyncio.run(test())


READY = Ready(
    max_model_len=64, vocab_size=100, block_size=16, blocks_total=8, dtype="float32", kv_dtype="float32", device="cpu",
    model_impl="native", weights_bytes=1, kv_bytes=1, load_s=0.1,
)  # fmt: skip


def _ended(**fields: object) -> str:
    """The page after one sequence that ended so."""
    metrics = ServerMetrics("tiny")
    metrics.on_ready(READY)
    start = SequenceStart(prompt=b"", num_prompt=10, params=SamplingParams(max_tokens=8), n=1)
    facts = SequenceFacts(start, 0, Mailbox(), 0.0)
    facts.first_token_s = 1.0
    reported = {"seq": SeqId(1), "reason": FinishReason.STOP, "num_prompt": 10, "num_outputs": 2, "num_cached": 0}
    metrics.on_finished(facts, Finished(**{**reported, **fields}), 2.0)
    return metrics.exposition().decode()


def test_prompt_tokens_are_reported_by_source_tier() -> None:
    page = _ended(num_cached=8, num_cached_ddr=3, num_cached_ssd=1)
    line = 'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="{}"}} {}'
    for source, tokens in {"local_compute": 2, "local_cache_hit": 4, "external_kv_transfer": 4}.items():
        assert line.format(source, tokens) in page
    assert 'vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 8\n' in page, "all tiers together"


def _after_a_step() -> EngineMetrics:
    metrics = EngineMetrics("tiny", READY)
    metrics.on_step(Gauges(steps=1, step_tokens=1, prefix_queries=100, prefix_hits=50, preemptions=3))
    return metrics


def _kept(page: str) -> list[int]:
    """Tokens looked up and found, and preemptions: what outlives an engine."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines())
    return [int(lines[f'vllm:{name}_total{{engine="0",model_name="tiny"}}']) for name in names]


def test_sequences_that_ended_for_bad_logits_are_corrupted_and_others_are_not() -> None:
    line = 'vllm:corrupted_requests_total{engine="0",model_name="tiny"} '
    assert f"{line}1\n" in _ended(reason=FinishReason.ERROR, error=BAD_LOGITS)
    assert f"{line}0\n" in _ended(reason=FinishReason.ERROR, error="something else")


def test_a_second_engine_continues_the_counters_of_the_first() -> None:
    metrics = _after_a_step()
    for _ in range(2):
        metrics.on_restart(READY)
        metrics.on_step(Gauges(prefix_queries=10, prefix_hits=5, preemptions=1))
    assert _kept(metrics.exposition()) == [120, 60, 5]


def test_another_engine_shows_its_own_cache() -> None:
    metrics = ServerMetrics("tiny")
    metrics.on_ready(READY)
    metrics.on_ready(msgspec.structs.replace(READY, blocks_total=5, kv_dtype="bfloat16"))
    page = metrics.exposition().decode()
    assert 'num_gpu_blocks="5"' in page
    assert 'cache_dtype="bfloat16"' in page
    assert 'cache_dtype="float32"' not in page


def test_a_scrape_at_any_moment_of_a_restart_sees_no_counter_go_back() -> None:
    metrics, seen = _after_a_step(), list[list[int]]()

    def scrape(frame: FrameType, event: str, arg: object) -> object:
        if frame.f_code is EngineMetrics.on_restart.__code__:
            seen.append(_kept(metrics.exposition()))
            return scrape
        return None

    before = sys.gettrace()
    sys.settrace(scrape)
    try:
        metrics.on_restart(READY)
    finally:
        sys.settrace(before)
    assert len(seen) > 2, "at its lines"
    assert [numbers for numbers in seen if numbers != [100, 50, 3]] == []


@pytest.mark.parametrize("after", range(12))
def test_a_restart_at_any_moment_of_a_scrape_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    metrics = _after_a_step()

    def interrupted(name: str, kind: Kind, text: str, samples: Iterable[tuple[str, float]]) -> str:
        if next(numbers) == after:
            metrics.on_restart(READY)
        return family(name, kind, text, samples)

    numbers = count()
    # Patched: the restart must happen between two families, and a scrape has no argument for that.
    monkeypatch.setattr(engine_metrics, "family", interrupted)
    assert _kept(metrics.exposition()) == [100, 50, 3]
    assert next(numbers) > after, "within the scrape"


def test_a_step_that_is_reported_twice_is_observed_once() -> None:
    metrics = EngineMetrics("tiny", READY)
    for steps in (1, 1, 2, 2):
        metrics.on_step(Gauges(steps=steps, step_tokens=8))
    page = metrics.exposition()
    assert 'vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 16.0\n' in page
    assert 'vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 2\n' in page


def test_times_of_birth_are_left_out_and_processes_are_shown() -> None:
    page = ServerMetrics("tiny").exposition().decode()
    assert "_created" not in page
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds"):
        assert f"\n{name} " in page


def test_the_page_shows_the_state_of_the_engine(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=5), wait=False) as server:
            page = (await server.http.get("/metrics")).text
            assert 'tiercel_engine_state{state="loading"} 1.0' in page
            assert 'tiercel_engine_state{state="ready"} 0.0' in page
            assert "tiercel_engine_silence_seconds 0.0" in page
            assert "tiercel_queue_limit 4096.0" in page

    asyncio.run(test())


def test_the_page_counts_the_tasks_of_open_requests(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        before = (await _samples(server))["tiercel_http_tasks"]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(server.http.post(TEXT, json=text_body())) for _ in range(3)]
            await until(lambda: server.context.client.sequences.num_open == 3)
            assert (await _samples(server))["tiercel_http_tasks"] >= before + 3
            for task in asked:
                task.cancel()

    with_server(server_settings(model_folder), test, Script(hang_at_step=0))


def test_the_silence_of_a_hung_engine_grows(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(server.http.post(TEXT, json=text_body()))
            await until(lambda: server.context.client.status.silence_s() > 0.05)
            assert (await _samples(server))["tiercel_engine_silence_seconds"] > 0.05
            server.engine.die()
            await asked

    with_server(server_settings(model_folder), test, Script(hang_at_step=0))


def test_a_detail_that_does_not_exist_is_named(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get("/metrics?detail=sequences")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "detail")
        assert "tiercel_tenant_running" not in (await server.http.get("/metrics?other=1")).text
        assert (await server.http.get("/metrics?detail=tenants")).status_code == 200

    with_server(server_settings(model_folder), test)
