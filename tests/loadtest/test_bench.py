"""Load tests against a stub server that logs its own times."""

import json
import statistics
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

from tests.loadtest.builders import Quiet, log_of, run, stub_server
from tiercel.loadtest.report.summary import summary
from tiercel.loadtest.results.record import ONLY, Goals, RunResult
from tiercel.loadtest.results.result_file import read_results, write_result
from tiercel.loadtest.settings import BenchSettings
from tiercel.values.errors import ConfigError, TiercelError

_ROUNDING_MS = 0.002  # times are kept in microseconds


def _programs(folder: Path, *programs: str) -> str:
    """Write a dataset of prompts that program the stub."""
    path = folder / "programs.jsonl"
    lines = [json.dumps({"prompt": program, "output_tokens": 100}) for program in programs]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def _settings(url: str, path: str | None = None, **changed: Any) -> BenchSettings:
    flags: dict[str, Any] = {"base_url": url, "num_warmups": 0, "num_prompts": 100}
    if path is not None:
        flags |= {"dataset_name": "custom", "dataset_path": path}
    return BenchSettings(**{**flags, **changed})


def _assert_figures(result: RunResult, metric: str, found_ms: list[float], least_ms: list[float] | None = None) -> None:
    """Check the figures of a metric against its values, and those against the least that the server saw.

    A client sends before the server receives, and receives after it sends: in order, each of its times is at least the
    server's, on a machine that is as busy as it likes.
    """
    expected = {
        "mean": statistics.fmean(found_ms),
        "median": statistics.median(found_ms),
        "p90": float(numpy.percentile(found_ms, 90)),
        "p99": float(numpy.percentile(found_ms, 99)),
    }
    for figure, value_ms in expected.items():
        assert result.figures[f"{figure}_{metric}_ms"] == pytest.approx(value_ms, rel=1e-6), f"{figure}_{metric}_ms"
    if least_ms is not None:
        pairs = zip(sorted(found_ms), sorted(least_ms), strict=True)
        assert all(found >= least - _ROUNDING_MS for found, least in pairs), metric


def test_figures_agree_with_the_records_and_those_with_the_times_of_the_server(tmp_path: Path) -> None:
    programs = [f"first={300 + 40 * number} gap=100 tokens={4 + number % 3}" for number in range(12)]
    with stub_server() as url:
        path = _programs(tmp_path, *programs)
        result = run(_settings(url, path, goodput=["ttft:501"], save_detailed=True))
        log = log_of(url)
    assert (result.completed, result.failed, result.errors) == (12, 0, {})
    spans = [(entry["came_s"], entry["sent_s"]) for entry in log]
    requests, chunks = result.requests, [record.chunks_s for record in result.requests]
    assert sorted(map(len, chunks)) == sorted(len(sent) for _, sent in spans)
    assert all(one.first_s == one.chunks_s[0] and one.end_s >= one.chunks_s[-1] for one in requests)
    ttfts = [1000 * (sent[0] - came) for came, sent in spans]
    _assert_figures(result, "ttft", [1000 * (one.chunks_s[0] - one.sent_s) for one in requests], ttfts)
    tpots = [1000 * (one.end_s - one.chunks_s[0]) / (one.output_tokens - 1) for one in requests]
    _assert_figures(result, "tpot", tpots)
    _assert_figures(result, "itl", [1000 * (b - a) for at_s in chunks for a, b in pairwise(at_s)])
    whole = [1000 * (sent[-1] - came) for came, sent in spans]
    _assert_figures(result, "e2el", [1000 * (one.end_s - one.sent_s) for one in requests], whole)
    assert result.duration * 1000 >= max(whole) - _ROUNDING_MS
    tokens = sum(len(sent) for _, sent in spans)
    assert (result.total_output_tokens, result.total_input_tokens) == (tokens, 36)
    assert result.request_throughput == pytest.approx(12 / result.duration)
    assert result.output_throughput == pytest.approx(tokens / result.duration)
    assert result.total_token_throughput == pytest.approx((tokens + 36) / result.duration)
    good = sum(one.chunks_s[0] - one.sent_s <= 0.501 for one in requests)
    assert result.request_goodput == pytest.approx(good / result.duration)
    assert good <= sum(ttft <= 501 + _ROUNDING_MS for ttft in ttfts)
    assert result.max_concurrent_requests == max(
        sum(one.sent_s <= other.sent_s < one.end_s for one in requests) for other in requests
    )
    assert sum(result.timeline.output_tokens) == pytest.approx(tokens, abs=0.01)


@pytest.mark.slow
def test_a_stall_shows_in_latency_from_the_due_time_and_hides_behind_the_send_time(tmp_path: Path) -> None:
    programs = ["first=50 gap=0 tokens=2"] * 25
    programs[4] = "first=50 gap=0 tokens=2 stall=2000"
    with stub_server() as url:
        path = _programs(tmp_path, *programs)
        result = run(_settings(url, path, request_rate=10, arrivals="constant", max_concurrency=1))
    figures = {key: value or 0.0 for key, value in result.figures.items()}
    assert result.completed == 25
    assert figures["p90_ttft_ms"] < figures["median_ttft_due_ms"]  # one request of 25 has the stall
    assert figures["median_ttft_due_ms"] > 900
    assert figures["p90_ttft_due_ms"] > 1700
    assert figures["p90_client_queue_time_ms"] > 1600


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_closed_loop_keeps_its_concurrency(tmp_path: Path, processes: str) -> None:
    with stub_server() as url:
        path = _programs(tmp_path, *["first=100 gap=50 tokens=3"] * 16)
        result = run(_settings(url, path, max_concurrency=4, client_processes=processes, save_detailed=True))
        sent = [entry["body"]["prompt"] for entry in log_of(url)]
    assert result.client.processes == int(processes)
    assert len(sent) == result.completed == 16
    assert 1 < result.max_concurrent_requests <= 4
    assert [record.index for record in result.requests] == list(range(16))
    assert result.duration >= 4 * 0.2


def test_failures_count_with_their_reason_and_not_in_latencies(tmp_path: Path) -> None:
    programs = ["first=60 gap=50 tokens=4", *[f"first=60 gap=50 tokens=4 fail={fail}" for fail in _FAILS]]
    with stub_server() as url:
        result = run(_settings(url, _programs(tmp_path, *programs), save_detailed=True))
    assert (result.completed, result.failed) == (1, 4)
    assert {reason.partition(": ")[0] for reason in result.errors} == {
        "HTTP 503", "RemoteProtocolError", "error event", "the stream ended early",
    }  # fmt: skip
    assert result.errors["HTTP 503: too busy"] == 1
    assert result.errors["error event: the engine died"] == 1
    assert result.total_output_tokens == 4
    assert [record.status for record in result.requests] == [200, 503, 200, 200, 200]


_FAILS = ("refuse", "close", "event", "silent")


def test_a_request_that_takes_too_long_has_failed(tmp_path: Path) -> None:
    with stub_server() as url:
        result = run(_settings(url, _programs(tmp_path, "first=5000 tokens=1"), request_timeout_sec=0.3))
    assert result.errors == {"the answer did not end within 0.3 s": 1}


def test_nothing_is_sent_after_the_duration(tmp_path: Path) -> None:
    with stub_server() as url:
        path = _programs(tmp_path, *["first=10 tokens=1"] * 50)
        result = run(_settings(url, path, request_rate=20, arrivals="constant", duration=0.5))
    assert 5 <= result.completed <= 10
    assert any("were not sent" in note for note in result.notes)


def test_a_turn_follows_the_earlier_turns_after_a_pause() -> None:
    with stub_server("--default", "first=50 gap=0 tokens=3") as url:
        flags = {"dataset_name": "multi_turn", "multi_turn_num_turns": 3, "multi_turn_think_sec": 0.1, "num_prompts": 2}
        result = run(_settings(url, None, backend="openai-chat", random_input_len=5, save_detailed=True, **flags))
        log = log_of(url)
    assert result.completed == 6
    assert sorted(len(entry["body"]["messages"]) for entry in log) == [1, 1, 3, 3, 5, 5]
    last = max((entry["body"]["messages"] for entry in log), key=len)
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert last[1]["content"] == " a a a"
    by_turn = {(record.conversation, record.turn): record for record in result.requests}
    for (conversation, turn), record in by_turn.items():
        if turn:
            assert record.due_s > by_turn[conversation, turn - 1].end_s


_MIX = """
tenants:
  - {name: quiet, key: sk-quiet, weight: 3, num_prompts: 4, max_concurrency: 1, goals: {ttft: 1000},
     dataset: {name: random, input_len: 10, output_len: 4}}
  - {name: flood, key: sk-flood, num_prompts: 12, max_concurrency: 4, aggressor: true,
     dataset: {name: random, input_len: 20, output_len: 4}}
"""


def test_tenants_send_with_their_keys_and_are_reported_apart_alone_and_together(tmp_path: Path) -> None:
    mix = tmp_path / "mix.yaml"
    mix.write_text(_MIX, encoding="utf-8")
    observer = Quiet()
    with stub_server("--default", "first=100 gap=50") as url:
        result = run(_settings(url, None, tenants=str(mix), isolation=True), observer)
        log = log_of(url)
    assert [entry["key"] for entry in log].count("bearer sk-quiet") == 8
    assert [entry["key"] for entry in log].count("bearer sk-flood") == 12
    assert observer.stages[-2:] == ["alone: quiet", "quiet, flood"]
    quiet, flood = result.tenants
    assert (quiet.completed, flood.completed, quiet.fair_share) == (4, 12, 0.75)
    assert quiet.request_goodput is not None
    assert quiet.goals == Goals(ttft=1000)
    assert flood.request_goodput is None
    assert quiet.share + flood.share == pytest.approx(1)
    assert quiet.service_tokens == 4 * 14
    assert result.fairness is not None
    assert 0.5 <= result.fairness.jain_index <= 1
    assert result.isolation is not None
    (ratio,) = result.isolation
    assert ratio.tenant == "quiet"
    assert ratio.ratios["median_ttft_ms"] == pytest.approx(1, abs=0.02 + result.client.lag_max_ms / 50)
    assert "sk-" not in json.dumps(result.settings)
    report = summary(result, "ttft,tpot", [99.0])
    for row in ("Jain index, in", "Largest service gap (s):", "Isolation (together / alone)", "num_preemptions_total"):
        assert row in report
    assert [line.split()[:3] for line in report.splitlines() if line.startswith(("quiet ", "flood "))][:2] == [
        ["quiet", "3", "4"],
        ["flood", "1", "12"],
    ]


def test_the_servers_counters_are_read_before_during_and_after() -> None:
    with stub_server("--default", "first=400 gap=400 tokens=3") as url:
        result = run(_settings(url, None, num_prompts=3, random_input_len=5, num_warmups=2))
    counter = result.counters['vllm:num_preemptions_total{model_name="stub"}']
    assert (counter.before, counter.after, counter.delta) == (2, 5, 3)
    assert [round(sample.at_s) for sample in result.samples[:2]] == [0, 1]
    assert result.samples[1].values['vllm:num_requests_running{model_name="stub"}'] == 3
    assert not any("_bucket" in series for series in result.samples[0].values)
    assert result.versions["server"] == "stub-1"


def test_a_server_without_metrics_is_measured_with_an_estimate_marked_as_such() -> None:
    with stub_server("--default", "first=50 gap=50 tokens=3", "--features", "") as url:
        result = run(_settings(url, None, num_prompts=3, random_input_len=40, num_warmups=0))
    assert result.completed == 3
    assert (result.counters, result.samples) == ({}, [])
    assert result.total_output_tokens == 9
    assert any("not exact: an estimate of" in note for note in result.notes)
    assert any("no usage in 3 answers" in note for note in result.notes)


def test_prompts_have_the_tokens_that_the_server_counts() -> None:
    with stub_server("--default", "first=10 tokens=2") as url:
        flags = {"random_input_len": 33, "random_output_len": 2, "num_prompts": 5}
        result = run(_settings(url, None, extra_body='{"seed": 3, "temperature": null}', ignore_eos=True, **flags))
        bodies = [entry["body"] for entry in log_of(url)]
    assert result.total_input_tokens == 5 * 33
    assert all(body["seed"] == 3 and body["ignore_eos"] and "temperature" not in body for body in bodies)


def test_whole_answers_are_measured_without_a_stream() -> None:
    with stub_server("--default", "first=100 gap=50 tokens=3") as url:
        result = run(_settings(url, None, num_prompts=2, random_input_len=5, no_stream=True))
    assert result.completed == 2
    assert result.figures["mean_ttft_ms"] == result.figures["mean_e2el_ms"]
    assert (result.figures["mean_ttft_ms"] or 0.0) >= 200 - _ROUNDING_MS


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with pytest.raises(TiercelError, match=r"127\.0\.0\.1:9"):
        run(_settings("http://127.0.0.1:9", ready_check_timeout_sec=0.1))


def test_a_server_that_refuses_every_request_is_an_error_with_its_message_at_once() -> None:
    with stub_server() as url, pytest.raises(TiercelError, match=r"HTTP 404: no /nothing here"):
        run(_settings(url, endpoint="/nothing", ready_check_timeout_sec=600))


def test_the_file_has_the_keys_of_other_load_tests_and_reads_back(tmp_path: Path) -> None:
    with stub_server("--default", "first=50 gap=50 tokens=3") as url:
        flags = {"num_prompts": 3, "random_input_len": 5, "save_detailed": True, "metadata": ["gpu=none"]}
        result = run(_settings(url, None, label="x", metric_percentiles="50,99.9", **flags))
    path = tmp_path / "folder" / "result.json"
    write_result(result, path)
    plain = json.loads(path.read_text(encoding="utf-8"))
    assert set(plain) >= set(_KNOWN.split()) | _FIGURES
    assert plain["gpu"] == "none"
    assert [len(gaps_s) for gaps_s in plain["itls"]] == [2, 2, 2]
    assert plain["median_itl_ms"] == pytest.approx(1000 * statistics.median(chain.from_iterable(plain["itls"])))
    assert plain["request_rate"] == "inf"
    write_result(result, path, append=True)
    assert read_results(path) == [result, result]
    assert result.tenants[0].name == ONLY


_KNOWN = """
date backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed failed
total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
max_output_tokens_per_s max_concurrent_requests input_lens output_lens ttfts itls latencies start_times generated_texts
errors command seed versions machine
"""
_FIGURES = {
    f"{kind}_{metric}_ms"
    for kind in ("mean", "median", "std", "p50", "p99.9")
    for metric in ("ttft", "tpot", "itl", "e2el")
}


def test_a_file_that_is_not_a_result_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("", "{}", "nonsense"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"x\.json"):
            read_results(path)


def test_the_stub_logs_correct_times() -> None:
    with stub_server() as url:
        body = {"prompt": "first=100 gap=50 tokens=3", "max_tokens": 5, "stream": True}
        httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
        (entry,) = log_of(url)
    times = [at_s - entry["came_s"] for at_s in entry["sent_s"]]
    assert times == sorted(times)
    assert times[0] >= 0.1
    assert times[2] >= 0.2
