"""The sink of traces: the collector that the operator named, if any."""

from typing import Protocol

from tiercel.server.tracing.trace import Trace
from tiercel.values.errors import ConfigError


class TraceSink(Protocol):
    """Takes traces from the event loop. `take` never blocks and never fails."""

    def open(self) -> None: ...

    def take(self, trace: Trace) -> None: ...

    def close(self, patience_s: float) -> None: ...


def make_traces(endpoint: str | None) -> TraceSink | None:
    """Return the sink for a collector, not yet open; None without an endpoint.

    Errors: ConfigError if the extra `otel` is not installed.
    """
    if endpoint is None:
        return None
    try:
        from tiercel.server.tracing.export import TraceExport  # lazy: an extra, and 0.2 s of imports
    except ImportError as exc:
        raise ConfigError(
            "config.extra", "--otlp-traces-endpoint needs the extra otel: pip install 'tiercel[otel]'"
        ) from exc
    return TraceExport(endpoint)
