"""Traces: a server span with spans of its stages, their export, and unreachable collectors."""

import asyncio
import dataclasses
import logging
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from starlette.datastructures import Headers

from tests.server.collector import collector
from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until
from tiercel.server.api.context import ServerContext
from tiercel.server.client.client import EngineClient, Submission
from tiercel.server.client.collector import Mailbox
from tiercel.server.client.generation import Generation
from tiercel.server.client.sequences import SequenceFacts, SequenceStart
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.tracing.context import TraceContext, begin_context, read_context
from tiercel.server.tracing.export import TraceExport
from tiercel.server.tracing.record import RequestRecord
from tiercel.server.tracing.sink import TraceSink, make_traces
from tiercel.server.tracing.trace import MAX_SEQUENCES, Stage, Trace, trace_of
from tiercel.settings.config import resolve
from tiercel.values.clock import ManualClock
from tiercel.values.errors import ConfigError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Absence
from tiercel.values.request import SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# ---- from a request to a trace


class _Kept:
    """A sink that keeps traces instead of exporting them."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def open(self) -> None: ...

    def take(self, trace: Trace) -> None:
        self.traces.append(trace)

    def close(self, patience_s: float) -> None: ...


def _serve(
    model_folder: Path, test: Callable[[Running], Awaitable[None]], sink: TraceSink, script: Script | None = None
) -> None:
    def traced(context: ServerContext) -> ServerContext:
        return dataclasses.replace(context, traces=sink)

    async def run() -> None:
        async with running(server_settings(model_folder), script, changed=traced) as server:
            await test(server)

    asyncio.run(run())


def _trace(
    model_folder: Path, body: dict[str, object], *, path: str = CHAT, script: Script | None = None, parent: str = ""
) -> Trace:
    """Return the trace of one request."""
    sink = _Kept()

    async def test(server: Running) -> None:
        await server.http.post(path, json=body, headers={"traceparent": parent} if parent else {})

    _serve(model_folder, test, sink, script)
    (trace,) = sink.traces
    return trace


def test_stages_are_in_order_within_the_request(model_folder: Path) -> None:
    trace = _trace(model_folder, chat_body(max_tokens=4), script=Script(step_s=0.005, extra={"prefill_s": 0.002}))
    assert [stage.name for stage in trace.stages] == ["parse", "tokenise", "queue", "prefill", "decode", "detokenise"]
    parse, tokenise, queue, prefill, decode, detokenizing = trace.stages
    assert trace.start_s == parse.start_s < parse.end_s <= tokenise.start_s < tokenise.end_s <= queue.start_s
    assert queue.end_s == prefill.start_s < prefill.end_s == decode.start_s < decode.end_s
    assert queue.end_s < detokenizing.start_s < detokenizing.end_s <= trace.end_s
    assert trace.name == f"POST {CHAT}"
    assert trace.error is None


def test_attributes_have_cached_tokens_by_tier_and_the_cost_of_preemption(model_folder: Path) -> None:
    absences = (Absence(1.0, 2.0, None), Absence(3.0, 4.5, "debt"))
    told = {"num_cached_ddr": 3, "num_cached_ssd": 2, "preemptions": 1, "swapped_tokens": 48, "absences": absences}
    body = text_body(list(range(8, 20)), max_tokens=2, temperature=0.5, top_p=0.75)
    trace = _trace(model_folder, body, path=TEXT, script=Script(cached=9, extra=told))
    swaps = [stage for stage in trace.stages if stage.name == "swap"]
    assert [(stage.start_s, stage.end_s, stage.attributes) for stage in swaps] == [
        (1.0, 2.0, {"tiercel.reason": "prefix"}),
        (3.0, 4.5, {"tiercel.reason": "debt"}),
    ]
    first_s = trace.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(first_s, float)
    assert 0 < first_s < trace.end_s - trace.start_s
    assert len(str(trace.attributes.pop("tiercel.request_id"))) == 32
    assert trace.attributes == {
        "http.request.method": "POST",
        "http.route": TEXT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tiercel",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 9,
        "gen_ai.response.finish_reasons": ("length",),
        "tiercel.tenant": "default",
        "tiercel.sequences": 1,
        "tiercel.cached_tokens.hbm": 4,
        "tiercel.cached_tokens.ddr": 3,
        "tiercel.cached_tokens.ssd": 2,
        "tiercel.preemptions": 1,
        "tiercel.swapped_tokens": 48,
    }


def test_attribute_names_follow_the_semantic_conventions(model_folder: Path) -> None:
    trace = _trace(model_folder, text_body(max_tokens=2, n=2), path=TEXT)
    modules = (gen_ai_attributes, http_attributes, error_attributes)
    known = {str(value) for module in modules for name, value in vars(module).items() if name.isupper()}
    ours = {name for name in trace.attributes if name.startswith("tiercel.")}
    assert trace.attributes["gen_ai.request.choice.count"] == 2
    assert set(trace.attributes) - ours <= known
    assert {"chat", "text_completion"} <= {value.value for value in gen_ai_attributes.GenAiOperationNameValues}


def test_each_choice_has_stages_up_to_a_limit(model_folder: Path) -> None:
    two = _trace(model_folder, text_body(max_tokens=2, n=2), path=TEXT)
    assert [stage.attributes["tiercel.choice"] for stage in two.stages if stage.name == "queue"] == [0, 1]
    many = _trace(model_folder, text_body([[8, 9]] * 12, max_tokens=1), path=TEXT)
    assert sum(stage.name == "queue" for stage in many.stages) == MAX_SEQUENCES
    assert many.attributes["tiercel.sequences"] == 12


def test_only_failures_of_the_server_are_errors(model_folder: Path) -> None:
    failed = _trace(model_folder, text_body([7]), path=TEXT, script=Script(fail_prompt_with=7))
    assert (failed.error, failed.attributes["error.type"]) == ("500", "500")
    cut = _trace(model_folder, text_body(max_tokens=50, stream=True), path=TEXT, script=Script(die_at_step=2))
    assert (cut.error, cut.attributes["http.response.status_code"]) == ("error", 200)
    wrong = _trace(model_folder, chat_body(tools=[]))
    assert (wrong.error, wrong.attributes["http.response.status_code"]) == (None, 400)
    assert wrong.stages == ()


def test_the_trace_of_a_client_that_left_has_the_engines_final_report(model_folder: Path) -> None:
    sink = _Kept()

    async def test(server: Running) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=200)))
        await until(lambda: server.engine.steps > 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: bool(sink.traces))

    _serve(model_folder, test, sink, Script(step_s=0.02, extra={"preemptions": 2}))
    (trace,) = sink.traces
    assert (trace.attributes["tiercel.outcome"], trace.error) == ("client_gone", None)
    assert trace.attributes["tiercel.preemptions"] == 2
    assert {"queue", "decode"} <= {stage.name for stage in trace.stages}


def _unfinished_record(clock: ManualClock) -> tuple[RequestRecord, SequenceFacts]:
    """Return the record of a sequence that was submitted at 11 s and whose end the engine has not reported."""
    record = RequestRecord("id", clock)
    start = SequenceStart(prompt=b"", num_prompt=2, params=SamplingParams(), n=1)
    facts = SequenceFacts(start, 0, Mailbox(), record.arrival_s)
    client = EngineClient(clock, ServerMetrics("tiny"))
    clock.advance(1.0)
    record.note_submitted(Generation(client, Submission((SeqId(1),), (facts,)), Mailbox(), [], 2, clock))
    return record, facts


def _stages(record: RequestRecord) -> list[tuple[str, float, float]]:
    trace = trace_of(record, begin_context(), method="POST", route=TEXT, status=499, epoch_s=0.0)
    return [(stage.name, stage.start_s, stage.end_s) for stage in trace.stages]


def test_a_stage_without_a_reported_end_ends_with_the_request() -> None:
    clock = ManualClock(10.0)
    record, facts = _unfinished_record(clock)
    clock.advance(2.0)
    record.close()
    assert _stages(record) == [("queue", 11.0, 13.0)]
    facts.started_s = 11.5
    assert _stages(record) == [("queue", 11.0, 11.5), ("prefill", 11.5, 13.0)]
    facts.first_token_s = 12.0
    assert _stages(record) == [("queue", 11.0, 11.5), ("prefill", 11.5, 12.0), ("decode", 12.0, 13.0)]


# ---- from a trace to a collector


@contextmanager
def _export(endpoint: str, exporter: SpanExporter | None = None, **options: int) -> Iterator[TraceExport]:
    level = logging.getLogger("opentelemetry").level
    opener = None if exporter is None else lambda _: exporter
    export = TraceExport(endpoint, interval_s=0.01, open_exporter=opener, **options)
    export.open()
    try:
        yield export
    finally:
        export.close(10.0)
        logging.getLogger("opentelemetry").setLevel(level)


class _Exported(SpanExporter):
    """Keeps the messages that would go to a collector; `export` waits until the gate is open."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.gate = threading.Event()
        self.has_begun = threading.Event()
        self.batches: list[ResourceSpans] = []
        if is_open:
            self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        self.gate.wait(10)
        self.batches += encode_spans(spans).resource_spans
        return SpanExportResult.SUCCESS

    @property
    def spans(self) -> list[Span]:
        return [span for batch in self.batches for scope in batch.scope_spans for span in scope.spans]


def test_a_collector_gets_one_server_span_and_the_stages_below_it(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        headers = {"traceparent": SAMPLED, "tracestate": "congo=t61rcWkgMzE"}
        assert (await server.http.post(CHAT, json=chat_body(max_tokens=4), headers=headers)).status_code == 200

    with collector() as (url, spans):
        with _export(url) as export:
            _serve(model_folder, test, export, Script(step_s=0.005, extra={"prefill_s": 0.001}))
        (server,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        stages = [span for span in spans if span is not server]
        assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
        assert server.trace_state == "congo=t61rcWkgMzE"
        assert {span.name for span in stages} == {"parse", "tokenise", "queue", "prefill", "decode", "detokenise"}
        assert {span.parent_span_id for span in stages} == {server.span_id}
        assert {span.trace_id.hex() for span in stages} == {TRACE}
        assert len({span.span_id for span in spans}) == len(spans) == 7
        for span in stages:
            assert server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert abs(server.start_time_unix_nano / 1e9 - time.time()) < 60
        sent = {entry.key: entry.value for entry in server.attributes}
        assert sent["gen_ai.usage.output_tokens"].int_value == 4
        assert [value.string_value for value in sent["gen_ai.response.finish_reasons"].array_value.values] == ["length"]


@pytest.mark.parametrize(("parent", "spans"), [(SAMPLED, 1), (UNSAMPLED, 0), ("", 1), (f"{UNSAMPLED}9", 1)])
def test_the_caller_selects_the_sampled_rows(parent: str, spans: int) -> None:
    exported = _Exported()
    context = read_context(Headers({"traceparent": parent})) or begin_context()
    with _export("", exported) as export:
        export.take(Trace(context, "POST /", 1.0, 2.0, 0.0, {}, ()))
    assert len(exported.spans) == spans


def test_opentelemetrys_variables_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    exported = _Exported()
    with _export("", exported) as export:
        export.take(Trace(begin_context(), "dropped", 1.0, 2.0, 0.0, {}, ()))
        export.take(Trace(TraceContext(TRACE, PARENT, True), "kept", 1.0, 2.0, 0.0, {}, ()))
    (batch,) = exported.batches
    assert [span.name for span in exported.spans] == ["kept"]
    assert {entry.key: entry.value.string_value for entry in batch.resource.attributes}["service.name"] == "mine"


def test_spans_have_the_fields_of_the_otlp_format() -> None:
    stages = (Stage("queue", 1.25, 1.5, {"tiercel.choice": 1}), Stage("decode", 1.5, 1.5, {}))
    attributes = {"text": "é", "count": 2**40, "share": 0.5, "reasons": ("stop", "length")}
    context = TraceContext(TRACE, PARENT, True, (("a", "1"), ("b@c", "2")))
    exported = _Exported()
    with _export("", exported) as export:
        export.take(Trace(context, "POST /", 1.0, 2.0, 1e9, attributes, stages, "500"))
        export.take(Trace(begin_context(), "own", 1.0, 2.0, 0.0, {}, ()))
    server, queue, decode, own = exported.spans
    told = {entry.key: entry.value for entry in server.attributes}
    assert (told["text"].string_value, told["count"].int_value, told["share"].double_value) == ("é", 2**40, 0.5)
    assert [part.string_value for part in told["reasons"].array_value.values] == ["stop", "length"]
    assert (server.trace_id.hex(), server.parent_span_id.hex(), server.trace_state) == (TRACE, PARENT, "a=1,b@c=2")
    assert (server.kind, server.status.code) == (Span.SPAN_KIND_SERVER, Status.STATUS_CODE_ERROR)
    assert (server.flags, queue.flags, own.flags) == (0x300, 0x100, 0x100), "only the caller is in another process"
    assert (queue.parent_span_id, queue.trace_id, queue.trace_state) == (server.span_id, server.trace_id, "a=1,b@c=2")
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (
        1_000_000_001_250_000_000,
        1_000_000_001_500_000_000,
    )
    assert queue.attributes[0].value.int_value == 1
    assert decode.start_time_unix_nano == decode.end_time_unix_nano
    assert (own.parent_span_id, own.trace_state, own.status.code) == (b"", "", Status.STATUS_CODE_UNSET)
    assert len({span.span_id for span in exported.spans}) == 4
    assert {len(span.span_id) for span in exported.spans} == {8}


def test_an_unreachable_collector_is_logged_once_and_fails_no_request(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for _ in range(4):
            assert (await server.http.post(TEXT, json=text_body(max_tokens=1))).status_code == 200
            await asyncio.sleep(0.03)

    with collector(status=400) as (url, _), structlog.testing.capture_logs() as logs, _export(url) as export:
        _serve(model_folder, test, export)
    told = [entry for entry in logs if entry["event"].startswith("traces_")]
    assert [(entry["event"], entry["log_level"]) for entry in told] == [("traces_not_exported", "warning")]
    assert told[0]["endpoint"] == url


def test_closing_does_not_wait_for_the_retries_of_an_unreachable_collector(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.post(TEXT, json=text_body(max_tokens=1))).status_code == 200

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        before = set(threading.enumerate())
        with _export(f"http://127.0.0.1:{unused.getsockname()[1]}/v1/traces") as export:
            _serve(model_folder, test, export)
            begun_s = time.monotonic()
            export.close(0.1)  # the exporter's retries would take ten seconds
            assert time.monotonic() - begun_s < 1.0
            wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_collector_that_hangs_costs_traces_and_nothing_else() -> None:
    exported = _Exported(is_open=False)
    with structlog.testing.capture_logs() as logs, _export("", exported, max_queued_spans=3) as export:
        export.take(Trace(begin_context(), "first", 1.0, 2.0, 0.0, {}, ()))
        assert exported.has_begun.wait(10)
        for number in range(5):
            export.take(Trace(begin_context(), f"later {number}", 1.0, 2.0, 0.0, {}, ()))
        exported.gate.set()
    assert [span.name for span in exported.spans] == ["first", "later 0", "later 1", "later 2"]
    assert [(entry["event"], entry["lost"]) for entry in logs] == [
        ("traces_not_exported", 2),
        ("traces_exported_again", 2),
    ]


def test_only_the_attribute_that_cannot_be_encoded_is_left_out() -> None:
    attributes = {"gen_ai.request.model": "\ud800", "tiercel.sequences": 1}
    with structlog.testing.capture_logs() as logs, collector() as (url, spans):
        with _export(url) as export:
            export.take(Trace(begin_context(), "wrong", 1.0, 2.0, 0.0, attributes, ()))
        assert [[entry.key for entry in span.attributes] for span in spans] == [["tiercel.sequences"]]
    assert logs == []


def test_requests_continue_while_a_collector_hangs(model_folder: Path) -> None:
    gate = threading.Event()

    async def test(server: Running) -> None:
        for _ in range(5):
            assert (await server.http.post(TEXT, json=text_body(max_tokens=1))).status_code == 200
        assert not gate.is_set()

    with collector(gate=gate) as (url, spans), _export(url) as export:
        _serve(model_folder, test, export)
        gate.set()
        export.close(10.0)
        assert sum(span.kind == Span.SPAN_KIND_SERVER for span in spans) == 5


# ---- the flag


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert make_traces(None) is None
    assert isinstance(make_traces("http://127.0.0.1:4318/v1/traces"), TraceExport)


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tiercel.server.tracing.export")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint needs the extra otel: pip install 'tiercel.otel.'"):
        make_traces("http://127.0.0.1:4318/v1/traces")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318/otlp/v1/traces", "http://[::1]:4318/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(given: str, used: str) -> None:
    assert resolve({"otlp_traces_endpoint": given}).settings.server.otlp_traces_endpoint == used


@pytest.mark.parametrize(
    "given",
    ["http://c/v1/traces?token=SECRET", "http://u:SECRET@c", "http://u:SECRET/x@c", "http://c#SECRET"],
)
def test_a_secret_in_an_endpoint_is_refused_and_not_shown(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint http://.*: expected an http") as caught:
        resolve({"otlp_traces_endpoint": given})
    assert "SECRET" not in caught.value.message


@pytest.mark.parametrize("given", ["", "collector", "grpc://c:4317", "http://", "http://u:p@c", "http://c:99999"])
def test_an_invalid_endpoint_is_refused_and_named(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*: expected an http or https URL"):
        resolve({"otlp_traces_endpoint": given})
