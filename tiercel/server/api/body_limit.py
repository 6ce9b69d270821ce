"""A pure ASGI layer: the limit of request bodies, and the decoding of compressed ones within it."""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.server.http.content_coding import ContentDecoder, content_coding
from tiercel.server.http.failure import fault_response
from tiercel.server.http.watch import linger
from tiercel.values.errors import AdmissionError

UPLOAD_PATH = "/v1/files"


class BodyLimit:
    """Refuses bodies over a limit, by the declared length, by the received length, and by the decoded length.

    Compressed bodies are decoded here, for all routes.
    """

    def __init__(self, app: ASGIApp, limit_bytes: Callable[[], int], upload_bytes: Callable[[], int]) -> None:
        """`upload_bytes` is the limit of uploaded files, which are written to disk as they arrive."""
        self._app = app
        self._limit_bytes = limit_bytes
        self._upload_bytes = upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = scope["method"] == "POST" and scope["path"].removeprefix(scope.get("root_path", "")) == UPLOAD_PATH
        limit_bytes = self._upload_bytes() if is_upload else self._limit_bytes()
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > limit_bytes:
            await linger(receive)
            await fault_response(_too_large(limit_bytes), scope)(scope, receive, send)
            return
        coded = ",".join(headers.getlist("content-encoding"))
        await self._app(scope, _BodyReceiver(receive, limit_bytes, coded).receive, send)


class _BodyReceiver:
    """Receives the messages of one request."""

    def __init__(self, receive: Receive, limit_bytes: int, coded: str) -> None:
        """`coded`: the header `Content-Encoding`. It is judged when the body is read: most routes of GET read none."""
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._coded = coded
        self._decoder: ContentDecoder | None = None
        self._received_bytes = 0
        self._decoded_bytes = 0
        self._has_ended = False  # the last bytes of the body have arrived
        self._is_over = False  # the last piece of the body has been handed on

    async def receive(self) -> Message:
        """Return the next message. Errors: AdmissionError (400, 413, 415)."""
        if self._is_over:
            return await self._receive()
        if not self._coded:
            message = await self._counted()
            self._is_over = self._has_ended
            return message
        return await self._decoded()

    async def _counted(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received_bytes += len(message.get("body", b""))
            self._has_ended = not message.get("more_body", False)
            if self._received_bytes > self._limit_bytes:
                await linger(self._receive)
                raise _too_large(self._limit_bytes)
        return message

    async def _decoded(self) -> Message:
        """Return the next piece of the decoded body. It counts before the one behind it is decoded."""
        try:
            if self._decoder is None:
                coding = content_coding(self._coded)
                if coding is None:
                    self._coded = ""
                    return await self.receive()
                self._decoder = ContentDecoder(coding)
            while not (piece := self._decoder.take()):
                if self._has_ended:
                    self._decoder.finish()
                    self._is_over = True
                    return {"type": "http.request", "body": b"", "more_body": False}
                message = await self._counted()
                if message["type"] != "http.request":
                    return message
                self._decoder.feed(message.get("body", b""))
            self._decoded_bytes += len(piece)
            if self._decoded_bytes > self._limit_bytes:
                raise _too_large(self._limit_bytes)
        except AdmissionError:
            if not self._has_ended:
                await linger(self._receive)
            raise
        await asyncio.sleep(0)  # a body that expands to many pieces must not keep the loop from others
        return {"type": "http.request", "body": piece, "more_body": True}


def _too_large(limit_bytes: int) -> AdmissionError:
    return AdmissionError(413, f"The request body is larger than {limit_bytes} bytes.", code="request_too_large")
