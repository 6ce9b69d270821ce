"""The answer to a client that retrieves a stored response as the events of a stream."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.api.context import ServerContext
from tiercel.server.api.replies.response_replay import replayed
from tiercel.server.api.stored_response import StoredResponse
from tiercel.server.http.patience import PATIENCE_S, PatientSender
from tiercel.server.http.pieces import in_chunks, patient_sender
from tiercel.server.http.sse import MEDIA_TYPE
from tiercel.server.http.watch import SlowReaderError, run_watched
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_COPIES = 6
"""Times that the texts of a response are in memory while its events are made: in items, in parts and in events."""
_HEADERS = ((b"content-type", MEDIA_TYPE.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class ReplayAnswer(Response):
    """The events of a stored response, made piece by piece in a worker as the client reads them.

    Their memory counts among the bodies that are not admitted, from before the response is decoded until the last event
    is sent. A client that reads slowly gives way to others there: then its connection is closed.
    """

    def __init__(self, context: ServerContext, request: Request, entry: StoredResponse, starting_after: int) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._context = context
        self._request = request
        self._entry: StoredResponse | None = entry
        self._starting_after = starting_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Errors: AdmissionError (503) before the first one; ClientGoneError, SlowReaderError."""
        entry, self._entry = self._entry, None
        assert entry is not None
        parts = entry.read_parts
        size = len(entry.before) + len(entry.after) + sum(item.decoded_bytes for item in entry.turn.output)
        with (
            self._context.store.read(tenant_of(scope).name, parts),
            self._context.hold_body(self._request) as holding,
        ):
            holding.grow(size * _COPIES)
            head, output = entry.before + b"[]" + entry.after, [item.encoded for item in entry.turn.output]
            chunks = in_chunks(replayed(head, output, self._starting_after))
            del entry
            first = await self._context.in_worker(lambda: next(chunks))
            try:
                with holding.displaceable():
                    patient = patient_sender(scope, send, PATIENCE_S)
                    await run_watched(self._send(patient, first, chunks), receive)
            except AdmissionError as exc:
                raise SlowReaderError from exc  # it has given way to others

    async def _send(self, send: PatientSender, first: bytes, chunks: Iterator[bytes]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        chunk: bytes | None = first
        while chunk is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await self._context.in_worker(lambda: next(chunks, None))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
