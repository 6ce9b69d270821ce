"""Traces on their way to a collector: OTLP over HTTP, in batches, from a thread of its own. Needs the extra `otel`."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider

from tiercel import __version__
from tiercel.server.tracing.encode import TraceEncoder
from tiercel.server.tracing.trace import Trace

_MOST_WAITING = 4096  # traces; what comes while so many wait is dropped
_BATCH = 64  # traces in one export
_EVERY_S = 5.0  # between two exports of less
_TIMEOUT_S = 10.0  # of one export, with its repetitions
_GIVE_UP_S = 0.5  # for an export that was told to end


class Sender(Protocol):
    """Brings encoded traces to a collector."""

    def send(self, body: bytes) -> bool:
        """Blocks for the time of one export at most. False: they did not get there."""
        ...

    def shutdown(self) -> None:
        """End the repetitions of a `send`, in another thread too."""
        ...


class TraceExport:
    """A finite queue of traces and the thread that empties it. A collector that is away costs nothing but traces."""

    def __init__(
        self,
        endpoint: str,
        *,
        every_s: float = _EVERY_S,
        most_waiting: int = _MOST_WAITING,
        open_sender: Callable[[str], Sender] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._every_s = every_s
        self._most_waiting = most_waiting
        self._open_sender = open_sender or OtlpSender
        self._waiting: deque[Trace] = deque()
        self._wake = threading.Event()
        self._has_ended = False
        self._is_failing = False
        self._dropped = 0  # traces that did not get into the queue; written by `take` only
        self._told_dropped = 0
        self._lost = 0  # traces that did not get out of it
        self._has_told_unwritable = False
        self._thread: threading.Thread | None = None
        self._sender: Sender | None = None
        self._log = structlog.stdlib.get_logger("server.tracing")

    def open(self) -> None:
        """Start the thread."""
        self._sender = sender = self._open_sender(self._endpoint)
        # It logs every repetition of every batch. Ours is said once: see `_note`.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._thread = threading.Thread(target=self._run, args=(sender,), name="traces", daemon=True)
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
        if self._thread is None or self._sender is None:
            return
        self._thread.join(0.0 if self._is_failing else patience_s)
        if self._thread.is_alive():
            self._sender.shutdown()  # ends its repetitions
            self._thread.join(_GIVE_UP_S)

    def _run(self, sender: Sender) -> None:
        encoder = TraceEncoder(TracerProvider(resource=_resource(), shutdown_on_exit=False))
        is_last = False
        while not is_last:
            self._wake.wait(self._every_s)
            self._wake.clear()
            is_last, is_good = self._has_ended, True
            while self._waiting and (is_good or not self._has_ended):
                is_good = self._export(sender, encoder)
        sender.shutdown()

    def _export(self, sender: Sender, encoder: TraceEncoder) -> bool:
        """Some of what waits. False: it did not get there, and is lost. What cannot be written is lost alone."""
        traces = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        try:
            body = encoder.encode(traces)
        except (ValueError, TypeError, OverflowError) as exc:  # an attribute or a time that the format has no room for
            self._lost += len(traces)
            self._note_unwritable(exc)
            return True
        if not body:
            return True
        is_good = sender.send(body)
        self._lost += 0 if is_good else len(traces)
        self._note(is_good=is_good)
        return is_good

    def _note_unwritable(self, error: Exception) -> None:
        """One line for the first: the collector has no part in it."""
        if not self._has_told_unwritable:
            self._log.warning("traces_not_encoded", error=str(error), lost=self._lost + self._dropped)
        self._has_told_unwritable = True

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


class OtlpSender(OTLPSpanExporter):
    """OpenTelemetry's own exporter with its variables, repetitions and certificates, for what is encoded already."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint=endpoint, timeout=_TIMEOUT_S)

    def send(self, body: bytes) -> bool:
        """Post it, up to six times within the time of an export; nothing once shut down.

        The exporter's client and its `_shutdown`, which the client does not ask, are not public: pyproject.toml bounds
        the version.
        """
        return not self._shutdown and self._client.export(body).success


def _resource() -> Resource:
    """`OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` come before ours."""
    ours = Resource.create({SERVICE_NAME: "tiercel", SERVICE_VERSION: __version__})
    return ours.merge(OTELResourceDetector().detect())
