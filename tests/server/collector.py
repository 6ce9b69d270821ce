"""A trace collector on loopback: OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@contextmanager
def collector(status: int = 200, gate: threading.Event | None = None) -> Iterator[tuple[str, list[Span]]]:
    """Run a collector; yield its URL and the list of spans received so far. It answers once the gate is open."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            if gate is not None:
                gate.wait(10)
            for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {entry.key: entry.value.string_value for entry in batch.resource.attributes}
                assert names["service.name"] == "tiercel"
                spans.extend(span for scope in batch.scope_spans for span in scope.spans)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
