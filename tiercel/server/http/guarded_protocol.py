"""uvicorn's HTTP protocol with limits: on heads of requests, on connections and on time.

Every refusal is an error response in the shape of all others, with a request id, and closes the connection.
"""

import asyncio
import contextlib
import math
import secrets
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from tiercel.server.http.failure import refusal_body, refusal_status
from tiercel.server.http.framing import MAX_HEAD_BYTES, MAX_HEADER_LINES, MessageMeter
from tiercel.server.http.gate import ConnectionGate, Place, is_health_path, too_much_unfinished
from tiercel.server.http.message_failure import is_messages_path
from tiercel.server.http.transfer_coding import coding_fault
from tiercel.values.errors import AdmissionError

_LINGER_S = 1.0  # to read what the client still sends: closing with unread data resets the connection
_FRAMING = (b"content-length", b"transfer-encoding")


class _Flow(FlowControl):
    """Flow control of a connection that reads nothing more while received bytes are held back.

    uvicorn resumes reading whenever the application waits for a message. So a client that sends many requests without
    waiting would fill the memory.
    """

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """One client connection. `gate` is shared by all."""

    def __init__(
        self,
        gate: ConnectionGate,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as in uvicorn
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""  # of the newest request
        self._gate = gate
        self._meter = MessageMeter()
        self._place = Place.SERVED
        self._unanswered = 0  # requests
        self._timer: asyncio.TimerHandle | None = None  # of the head, later of the end of a refused connection
        self._pipelined = b""  # received behind a request that waits for another
        self._held_bytes = 0  # as reported to the gate
        self._is_crowded = False  # the head has too many lines
        self._is_replaying = False  # the parser reads a head again
        self._is_refused = False
        self._refusal: AdmissionError | None = None  # to be sent after the answers to earlier requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection. Called by the event loop."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._place = self._gate.place(len(self.connections))
        if self._place is Place.NONE:
            self._is_refused = True
            self._send(self._gate.too_many())
            transport.close()
            return
        limit_s = self._gate.limits.header_timeout_s
        self._start_timer(limit_s if self._place is Place.SERVED else min(limit_s, _LINGER_S))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection. Called by the event loop."""
        self._stop_timer()
        self._pipelined = b""
        self._is_refused = True
        self._report_held(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read requests. Called by the event loop."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._pipelined:
            data, self._pipelined = self._pipelined + data, b""
        self._parse(data)
        if self._is_refused:
            return
        head_bytes = self._meter.head_bytes
        if head_bytes and self._timer is None:
            self._start_timer(self._gate.limits.header_timeout_s)
        if not self._report_held(head_bytes + len(self._pipelined)):
            self._refuse(too_much_unfinished())

    def _report_held(self, held_bytes: int) -> bool:
        change_bytes, self._held_bytes = held_bytes - self._held_bytes, held_bytes
        return not change_bytes or self._gate.hold(change_bytes)

    def _parse(self, data: bytes) -> None:
        start, view = 0, memoryview(data)
        while start < len(data) and not self._is_refused and not self.transport.is_closing():
            if self.pipeline:
                self._pipelined = data[start:]
                self.flow.pause_reading()
                cast(_Flow, self.flow).is_held = True
                return
            end = self._meter.cut(data, start)
            try:
                self.parser.feed_data(view[start:end])
            except httptools.HttpParserUpgrade as exc:
                end = start + exc.args[0]
                self._ignore_upgrade()
            except httptools.HttpParserError:
                self._refuse(_unreadable())
                return
            if self._is_crowded or not self._meter.count(view[start:end]):
                self._refuse(_too_large())
            start = end

    def _ignore_upgrade(self) -> None:
        """Go on with HTTP/1.1. The parser takes what follows for another protocol, so a new one reads the framing."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self._is_replaying = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._is_replaying = False

    def on_message_begin(self) -> None:
        """Begin a head. Called by the parser."""
        if not self._is_replaying:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line. Called by the parser."""
        if not self._is_replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Called by the parser, also for the trailers of a chunked body, which are ignored."""
        if self._is_replaying or not self._meter.is_in_head:
            return
        if len(self.headers) >= MAX_HEADER_LINES:
            self._is_crowded = True
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request. Called by the parser."""
        if self._is_replaying or self._is_crowded or self._is_refused:
            return
        self._stop_timer()
        if self._place is Place.HEALTH_ONLY and not is_health_path(self.url):
            self._refuse(self._gate.too_many())
            return
        if (fault := coding_fault(self.headers, self.parser.get_http_version())) is not None:
            self._refuse(fault)
            return
        self.begin_request()  # raises if the URL is invalid
        self._meter.end_head(self.headers)
        self._unanswered += 1
        if self._place is Place.HEALTH_ONLY:
            self.cycle.keep_alive = False

    def begin_request(self) -> None:
        """Start the application on the request whose headers are complete."""
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body. Called by the parser."""
        self._meter.add_body(len(body))
        if not self._is_refused:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        """Begin a chunk of the body. Called by the parser."""
        self._meter.add_chunk()

    def on_message_complete(self) -> None:
        """End the body. Called by the parser, which takes a request with an upgrade for complete after its headers."""
        if self._is_crowded or self._is_refused or self.parser.should_upgrade():
            return
        self._meter.end_message()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with what the client sent behind the request. Called when the answer to a request is complete."""
        self._unanswered -= 1
        cast(_Flow, self.flow).is_held = False
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is not None and not self._unanswered:
            self._unset_keepalive_if_required()
            self._send_and_linger(self._refusal)
        elif self._pipelined and not self.pipeline:
            self.data_received(b"")

    def _refuse(self, error: AdmissionError) -> None:
        """Answer with an error after the answers to earlier requests, and read nothing more.

        The parser may fail at the same head that has been refused: the first error counts.
        """
        if self._is_refused:
            return
        self._is_refused = True
        self._pipelined = b""
        self._report_held(0)
        self._stop_timer()
        if not self._meter.is_in_head:  # the error is in the body of the newest request
            cycle = self.cycle
            if cycle.response_started:
                self.transport.close()
                return
            self._unanswered -= 1
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline:
                self.pipeline.popleft()
        if self._unanswered:
            self._refusal = error
        else:
            self._send_and_linger(error)

    def _send_and_linger(self, error: AdmissionError) -> None:
        self._send(error)
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
        self._start_timer(_LINGER_S)

    def _send(self, error: AdmissionError) -> None:
        request_id, path = secrets.token_hex(16), self.url.decode("latin-1")
        is_anthropic = is_messages_path(path)
        body = refusal_body(error, request_id, is_of_messages=is_anthropic)
        self._gate.note_refusal(error, request_id)
        lines = [
            *(b"%b: %b\r\n" % header for header in self.server_state.default_headers),
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body),
            b"x-request-id: %b\r\n" % request_id.encode(),
            b"request-id: %b\r\n" % request_id.encode() if is_anthropic else b"",
        ]
        if error.retry_after_s is not None:
            lines.append(b"retry-after: %d\r\n" % math.ceil(error.retry_after_s))
        status = refusal_status(error, is_of_messages=is_anthropic)
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))

    def _start_timer(self, limit_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """End the connection: its head is late, or its client has had the time to read a refusal."""
        self._timer = None
        if self._is_refused or not self._meter.head_bytes:
            self.transport.abort()
        else:
            self._refuse(_late())


def _unreadable() -> AdmissionError:
    return AdmissionError(400, "The request is not valid HTTP/1.1.", code="invalid_http")


def _too_large() -> AdmissionError:
    return AdmissionError(
        431,
        f"The request line and the headers, or the extensions and trailers of a chunked body, exceed {MAX_HEAD_BYTES}"
        f" bytes or {MAX_HEADER_LINES} lines.",
        code="headers_too_large",
    )


def _late() -> AdmissionError:
    return AdmissionError(408, "The headers did not arrive in time.", code="request_timeout")
