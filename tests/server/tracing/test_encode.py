"""Attributes of spans and of the resource as OTLP values: each type as itself."""

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

from tiercel.server.tracing.context import begin_context
from tiercel.server.tracing.encode import TraceEncoder
from tiercel.server.tracing.trace import Trace


def test_attributes_of_the_resource_keep_their_types() -> None:
    told = {"pid": 12, "is_on": True, "share": 0.5, "name": "é", "none": (), "parts": (1, 2), "flags": (True, False)}
    provider = TracerProvider(resource=Resource(told), shutdown_on_exit=False)
    body = TraceEncoder(provider).encode([Trace(begin_context(), "GET /", 1.0, 2.0, 0.0, {"stream": True}, ())])
    (batch,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {entry.key: _read(entry.value) for entry in batch.resource.attributes} == {
        "pid": ("int_value", 12),
        "is_on": ("bool_value", True),
        "share": ("double_value", 0.5),
        "name": ("string_value", "é"),
        "none": ("array_value", []),
        "parts": ("array_value", [("int_value", 1), ("int_value", 2)]),
        "flags": ("array_value", [("bool_value", True), ("bool_value", False)]),
    }
    (stream,) = batch.scope_spans[0].spans[0].attributes
    assert _read(stream.value) == ("bool_value", True)


def _read(value: AnyValue) -> tuple[str | None, object]:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return kind, [_read(part) for part in value.array_value.values]
    return kind, getattr(value, str(kind))
