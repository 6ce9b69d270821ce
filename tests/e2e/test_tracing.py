"""Log lines and traces of requests with a real engine, which contain no text of them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.daemon import daemon
from tests.server.collector import collector

CANARY = "xylocarp"
STORY = "Tell me a story."
FLAGS = ("--log-level", "debug", "--enable-request-id-headers")
SMALL = ("--max-model-len", "256", "--num-gpu-blocks-override", "24")


def _lines(log: Path) -> list[dict[str, object]]:
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [entry for entry in entries if entry["event"] == "request_done"]


def _attributes(span: Span) -> dict[str, int]:
    return {entry.key: entry.value.int_value for entry in span.attributes}


@pytest.mark.slow
def test_requests_are_logged_and_traced_without_their_texts(tmp_path: Path) -> None:
    with collector() as (url, spans):
        with daemon(tmp_path, *FLAGS, *SMALL, "--otlp-traces-endpoint", url) as running:
            reported = running.chat(STORY).json()["choices"][0]["message"]["content"]
            assert len(reported) > 20
            for fields in ({"stream": True}, {"tools": [CANARY]}, {"stop": [CANARY]}, {"max_tokens": 0}):
                running.chat(f"{CANARY} {CANARY}", **fields)
            running.complete(CANARY * 2000)
            with ThreadPoolExecutor(4) as pool:  # together they exceed the pool
                prompts = [f"{CANARY} {number}" for number in range(4)]
                list(pool.map(lambda prompt: running.complete(prompt, max_tokens=200, ignore_eos=True), prompts))
            preemptions = running.metric("vllm:num_preemptions_total")
            assert running.stop() == 0
        lines, log = _lines(running.log), running.log.read_text()
    # sorted, as the line of a stream may be written after its reader has finished
    assert sorted(int(str(line["status"])) for line in lines[:6]) == [200, 200, 200, 400, 400, 400]
    assert [line["status"] for line in lines[6:]] == [200] * 4
    assert preemptions > 0
    assert sum(int(str(line["preemptions"])) for line in lines) == preemptions
    assert sum(int(str(line["recomputed_tokens"])) for line in lines) > 0
    assert all(float(str(line["swap_ms"])) > 0 for line in lines if line["preemptions"])

    servers = {span.span_id: span for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    assert {span.trace_id.hex() for span in servers.values()} == {line["trace_id"] for line in lines}
    assert sum(_attributes(span).get("tiercel.preemptions", 0) for span in servers.values()) == preemptions
    assert sum(span.name == "swap" for span in spans) == preemptions
    stages = [span for span in spans if span.span_id not in servers]
    assert {"parse", "tokenise", "queue", "prefill", "decode", "swap", "detokenise"} == {span.name for span in stages}
    for span in stages:
        parent = servers[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano + 5_000_000
    for text in (CANARY, reported[:20], reported[-20:]):
        assert text not in log
        assert text not in str(spans)


@pytest.mark.slow
def test_an_unreachable_collector_is_logged_once_and_an_invalid_one_refused(tmp_path: Path) -> None:
    with daemon(tmp_path, *SMALL, "--otlp-traces-endpoint", "http://127.0.0.1:9") as running:
        assert running.chat("Hello").status_code == 200
        assert running.stop() == 0
    with daemon(tmp_path, *SMALL, "--otlp-traces-endpoint", "127.0.0.1:4317", wait=False) as refused:
        assert refused.process.wait(60) == 2
        assert "--otlp-traces-endpoint 127.0.0.1:4317: expected an http or https URL" in refused.log.read_text()
