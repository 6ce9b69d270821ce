"""Where traces go: to the collector that the operator named, or nowhere."""

from typing import Protocol

from tiercel.errors import ConfigError
from tiercel.server.tracing.trace import Trace


class TraceSink(Protocol):
    """Takes traces from the event loop; never makes it wait and never fails."""

    def open(self) -> None: ...

    def take(self, trace: Trace) -> None: ...

    def close(self, patience_s: float) -> None: ...


def make_traces(endpoint: str | None) -> TraceSink | None:
    """The way to a collector, not yet open; None without an endpoint. Errors: ConfigError without the extra `otel`."""
    if endpoint is None:
        return None
    try:
        from tiercel.server.tracing.export import TraceExport  # lazy: an extra, and 0.2 s of imports
    except ImportError as exc:
        raise ConfigError(
            "config.extra", "--otlp-traces-endpoint needs the extra otel: pip install 'tiercel[otel]'"
        ) from exc
    return TraceExport(endpoint)
