"""Export of traces to a collector: OTLP over HTTP, in batches, from a thread of OpenTelemetry's SDK. Needs the extra
`otel`."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
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

from tiercel import __version__
from tiercel.server.tracing.context import TraceContext
from tiercel.server.tracing.trace import Trace

_MAX_QUEUED_SPANS = 16_384  # of about 2,000 requests
_BATCH_SPANS = 128  # in one export: encoding them holds the interpreter lock for about 3 ms
_INTERVAL_S = 5.0  # between two exports of smaller batches
_TIMEOUT_S = 10.0  # of one export, its retries included
_ABANDON_S = 0.5  # for an export whose retries have been ended
_SCOPE = InstrumentationScope("tiercel", __version__)


class TraceExport:
    """The sink of traces that exports them as spans. A collector that is down or slow costs traces and nothing else."""

    def __init__(
        self,
        endpoint: str,
        *,
        interval_s: float = _INTERVAL_S,
        max_queued_spans: int = _MAX_QUEUED_SPANS,
        open_exporter: Callable[[str], SpanExporter] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._max_queued_spans = max_queued_spans
        self._open_exporter = open_exporter or _open_otlp
        self._ids = RandomIdGenerator()
        self._resource = _resource()
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        self._queued_spans = 0  # handed to the SDK since the start; written by `take` only
        self._exporter: _ReportingExporter | None = None
        self._processor: BatchSpanProcessor | None = None

    def open(self) -> None:
        """Start the SDK's thread."""
        # The SDK logs every retry of every batch. `_ReportingExporter` logs one line instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _ReportingExporter(self._open_exporter(self._endpoint), self._endpoint)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._max_queued_spans + _BATCH_SPANS,  # `take` refuses before the SDK drops a span
            schedule_delay_millis=self._interval_s * 1000,
            max_export_batch_size=_BATCH_SPANS,
        )

    def take(self, trace: Trace) -> None:
        """Queue the spans of a trace, or drop the trace if too many spans wait. Never blocks.

        A trace that its caller does not record is not exported.
        Cost: see docs/tracing.md.
        """
        context, exporter, processor = trace.context, self._exporter, self._processor
        if processor is None or exporter is None or (context.parent_id is not None and not context.is_sampled):
            return
        num_spans = 1 + len(trace.stages)
        if self._queued_spans - exporter.num_spans + num_spans > self._max_queued_spans:
            exporter.note_dropped()
            return
        for span in self._spans(trace):
            self._queued_spans += 1
            processor.on_end(span)

    def _spans(self, trace: Trace) -> Iterator[ReadableSpan]:
        """Make the span of the server and one for each stage; none if the sampler (`OTEL_TRACES_SAMPLER`) declines."""
        context = trace.context
        trace_id, caller = int(context.trace_id, 16), _caller(context)
        parent = None if caller is None else set_span_in_context(NonRecordingSpan(caller), Context())
        sampling = self._sampler.should_sample(parent, trace_id, trace.name, SpanKind.SERVER, trace.attributes)
        if not sampling.decision.is_sampled():
            return
        state = TraceState(context.state) if sampling.trace_state is None else sampling.trace_state
        flags = TraceFlags(TraceFlags.SAMPLED)

        def identity() -> SpanContext:
            return SpanContext(trace_id, self._ids.generate_span_id(), False, flags, state)

        server = identity()
        yield ReadableSpan(
            trace.name,
            context=server,
            parent=caller,
            kind=SpanKind.SERVER,
            attributes=trace.attributes,
            status=Status(StatusCode.UNSET if trace.error is None else StatusCode.ERROR),
            start_time=_ns(trace.start_s + trace.epoch_s),
            end_time=_ns(trace.end_s + trace.epoch_s),
            resource=self._resource,
            instrumentation_scope=_SCOPE,
        )
        for stage in trace.stages:
            yield ReadableSpan(
                stage.name,
                context=identity(),
                parent=server,
                attributes=stage.attributes,
                start_time=_ns(stage.start_s + trace.epoch_s),
                end_time=_ns(max(stage.end_s, stage.start_s) + trace.epoch_s),
                resource=self._resource,
                instrumentation_scope=_SCOPE,
            )

    def close(self, patience_s: float) -> None:
        """Export the queued spans within `patience_s`; give up at once if the last export failed. Blocks."""
        if self._processor is None or self._exporter is None:
            return
        patience_s = 0.0 if self._exporter.has_failed else patience_s
        self._exporter.is_closing = True
        closing = threading.Thread(target=self._processor.shutdown, name="traces-shutdown", daemon=True)
        closing.start()  # the SDK waits for up to 30 s, and offers no shorter limit
        closing.join(patience_s)
        if closing.is_alive():
            self._exporter.shutdown()
            closing.join(_ABANDON_S)


class _ReportingExporter(SpanExporter):
    """An exporter that logs one line when the collector cannot be reached or cannot keep up, and one when it is back.

    `export` runs in the SDK's thread; the other methods run in the event loop's.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._dropped = 0  # traces that did not get into the queue
        self._reported_dropped = 0
        self._lost = 0  # traces that left the queue and did not reach the collector
        self._is_failing = False  # as logged
        self._is_shut_down = False
        self._log = structlog.stdlib.get_logger("server.tracing")
        self.num_spans = 0  # that have left the queue
        self.has_failed = False  # the last export
        self.is_closing = False  # from then on the first failure ends all exports

    def note_dropped(self) -> None:
        """Count a trace that found the queue full."""
        self._dropped += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_spans += len(spans)
        result = SpanExportResult.FAILURE
        if not (self._is_shut_down or (self.is_closing and self.has_failed)):
            result = self._exporter.export(spans)
        self.has_failed = result is not SpanExportResult.SUCCESS
        if self.has_failed:
            self._lost += sum(span.kind is SpanKind.SERVER for span in spans)
        self._report()
        return result

    def _report(self) -> None:
        dropped = self._dropped
        is_failing = self.has_failed or dropped > self._reported_dropped
        self._reported_dropped = dropped
        if is_failing != self._is_failing:
            lost = self._lost + dropped
            if is_failing:
                self._log.warning("traces_not_exported", endpoint=self._endpoint, lost=lost)
            else:
                self._log.info("traces_exported_again", endpoint=self._endpoint, lost=lost)
        self._is_failing = is_failing

    def shutdown(self) -> None:
        """End the export that runs, retries included, and refuse those that follow."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _open_otlp(endpoint: str) -> SpanExporter:
    """Open OpenTelemetry's exporter; its environment variables (headers, compression, certificate) apply."""
    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)


def _resource() -> Resource:
    """Return the resource of all spans. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over our values."""
    ours = Resource.create({SERVICE_NAME: "tiercel", SERVICE_VERSION: __version__})
    return ours.merge(OTELResourceDetector().detect())


def _caller(context: TraceContext) -> SpanContext | None:
    """Return the caller's span; None for a trace that begins here."""
    if context.parent_id is None:
        return None
    return SpanContext(
        int(context.trace_id, 16),
        int(context.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState(context.state),
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
