"""Traces on their way to a collector: OTLP over HTTP, in batches, from a thread of its own. Needs the extra `otel`."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from server.tracing.context import TraceContext
from server.tracing.trace import Trace
from tiercel import __version__

_MOST_WAITING = 4096  # traces; what comes while so many wait is dropped
_BATCH = 64  # traces in one export
_EVERY_S = 5.0  # between two exports of less
_TIMEOUT_S = 10.0  # of one export, with its repetitions
_GIVE_UP_S = 0.5  # for an export that was told to end
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class TraceExport:
    """A finite queue of traces and the thread that empties it. A collector that is away costs nothing but traces."""

    def __init__(
        self,
        endpoint: str,
        *,
        every_s: float = _EVERY_S,
        most_waiting: int = _MOST_WAITING,
        open_exporter: Callable[[str], SpanExporter] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._every_s = every_s
        self._most_waiting = most_waiting
        self._open_exporter = open_exporter or _open_exporter
        self._waiting: deque[Trace] = deque()
        self._wake = threading.Event()
        self._has_ended = False
        self._is_failing = False
        self._dropped = 0  # traces that did not get into the queue; written by `take` only
        self._told_dropped = 0
        self._lost = 0  # traces that did not get out of it
        self._thread: threading.Thread | None = None
        self._exporter: SpanExporter | None = None
        self._log = structlog.stdlib.get_logger("server.tracing")

    def open(self) -> None:
        """Start the thread."""
        self._exporter = exporter = self._open_exporter(self._endpoint)
        # It logs every repetition of every batch. Ours is said once: see `_note`.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._thread = threading.Thread(target=self._run, args=(exporter,), name="traces", daemon=True)
        self._thread.start()

    def take(self, trace: Trace) -> None:
        """Queue a trace, or drop it when too many wait. Never blocks. Cost: an append."""
        context = trace.context
        if context.parent_id is not None and not context.is_sampled:
            return
        if len(self._waiting) >= self._most_waiting:
            self._dropped += 1
            return
        self._waiting.append(trace)
        if len(self._waiting) >= _BATCH:
            self._wake.set()

    def close(self, patience_s: float) -> None:
        """Export what waits, as far as that goes in so long; a collector that is away is not waited for. Blocks."""
        self._has_ended = True
        self._wake.set()
        if self._thread is None or self._exporter is None:
            return
        self._thread.join(0.0 if self._is_failing else patience_s)
        if self._thread.is_alive():
            self._exporter.shutdown()  # ends its repetitions
            self._thread.join(_GIVE_UP_S)

    def _run(self, exporter: SpanExporter) -> None:
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        spans = SpanMaker(provider)
        is_last = False
        while not is_last:
            self._wake.wait(self._every_s)
            self._wake.clear()
            is_last, is_good = self._has_ended, True
            while self._waiting and (is_good or not self._has_ended):
                is_good = self._export(exporter, spans)
        exporter.shutdown()

    def _export(self, exporter: SpanExporter, spans: "SpanMaker") -> bool:
        """Some of what waits. False: it did not get there, and is lost."""
        traces = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        batch = [span for trace in traces for span in spans.spans(trace)]
        if not batch:
            return True
        is_good = exporter.export(batch) is SpanExportResult.SUCCESS
        self._lost += 0 if is_good else len(traces)
        self._note(is_good=is_good)
        return is_good

    def _note(self, *, is_good: bool) -> None:
        """One line when the collector cannot be reached or cannot keep up, one when it is back."""
        dropped = self._dropped
        is_failing = not is_good or dropped > self._told_dropped
        self._told_dropped = dropped
        if is_failing != self._is_failing:
            lost = self._lost + dropped
            if is_failing:
                self._log.warning("traces_not_exported", endpoint=self._endpoint, lost=lost)
            else:
                self._log.info("traces_exported_again", endpoint=self._endpoint, lost=lost)
        self._is_failing = is_failing


class SpanMaker:
    """Traces to spans of the SDK, as its sampler wants them (`OTEL_TRACES_SAMPLER`)."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._scope = InstrumentationScope("tiercel", __version__)

    def spans(self, trace: Trace) -> Iterator[ReadableSpan]:
        """The span of the server and those of the stages; nothing when the trace is not sampled."""
        caller = _caller(trace.context)
        trace_id = int(trace.context.trace_id, 16)
        parent = None if caller is None else set_span_in_context(NonRecordingSpan(caller))
        verdict = self._provider.sampler.should_sample(parent, trace_id, trace.name, SpanKind.SERVER)
        if not verdict.decision.is_sampled():
            return
        state = verdict.trace_state or TraceState(trace.context.state)
        server = self._context(trace_id, state)
        status = Status(StatusCode.UNSET if trace.error is None else StatusCode.ERROR)
        yield ReadableSpan(
            trace.name,
            context=server,
            parent=caller,
            resource=self._provider.resource,
            attributes=trace.attributes,
            kind=SpanKind.SERVER,
            status=status,
            start_time=_ns(trace.start_s + trace.epoch_s),
            end_time=_ns(trace.end_s + trace.epoch_s),
            instrumentation_scope=self._scope,
        )
        for stage in trace.stages:
            yield ReadableSpan(
                stage.name,
                context=self._context(trace_id, state),
                parent=server,
                resource=self._provider.resource,
                attributes=stage.attributes,
                start_time=_ns(stage.start_s + trace.epoch_s),
                end_time=_ns(max(stage.end_s, stage.start_s) + trace.epoch_s),
                instrumentation_scope=self._scope,
            )

    def _context(self, trace_id: int, state: TraceState) -> SpanContext:
        span_id = self._provider.id_generator.generate_span_id()
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state)


def _caller(context: TraceContext) -> SpanContext | None:
    if context.parent_id is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(
        int(context.trace_id, 16), int(context.parent_id, 16), is_remote=True, trace_flags=flags,
        trace_state=TraceState(context.state),
    )  # fmt: skip


def _open_exporter(endpoint: str) -> SpanExporter:
    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)


def _resource() -> Resource:
    """`OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` come before ours."""
    ours = Resource.create({SERVICE_NAME: "tiercel", SERVICE_VERSION: __version__})
    return ours.merge(OTELResourceDetector().detect())


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
