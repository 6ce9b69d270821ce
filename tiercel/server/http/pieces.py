"""Bodies that are sent in pieces: a client that reads slowly makes the server hold one piece, not the whole."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.http.body_writer import body_writer
from tiercel.server.http.patience import PATIENCE_S, PatientSender
from tiercel.server.http.watch import run_watched

PIECE_BYTES = 64 * 1024


def in_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in chunks of 64 KiB; the last one may be smaller. No piece is copied as a whole."""
    chunk = bytearray()
    for piece in pieces:
        start = 0
        while start < len(piece):
            end = start + PIECE_BYTES - len(chunk)
            chunk += piece[start:end]
            start = end
            if len(chunk) == PIECE_BYTES:
                yield bytes(chunk)
                chunk.clear()
    yield bytes(chunk)


async def send_pieces(send: PatientSender, pieces: Iterable[bytes], length: int | None) -> None:
    """Send a JSON body in pieces of 64 KiB; if its length is not known, each piece with its own."""
    chunks = in_chunks(pieces)
    chunk, following = next(chunks), next(chunks, None)
    headers = [(b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while following is not None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await asyncio.sleep(0)  # a client that reads fast never makes `send` wait, and others would
        chunk, following = following, next(chunks, None)
    await send({"type": "http.response.body", "body": chunk, "more_body": False})


class PieceAnswer(Response):
    """A JSON body that is there already, sent piece by piece. What `hold` returns counts it until it is sent."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        hold: Callable[[], AbstractContextManager[object]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(media_type="application/json")
        self._pieces = pieces
        self._hold = hold
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body. Errors: ClientGoneError, SlowReaderError."""
        with self._hold():
            patient = patient_sender(scope, send, self._patience_s)
            pieces = () if scope["method"] == "HEAD" else self._pieces
            await run_watched(send_pieces(patient, pieces, sum(map(len, self._pieces))), receive)


def patient_sender(scope: Scope, send: Send, patience_s: float) -> PatientSender:
    """Return a `send` that ends with a client that takes no byte for `patience_s`."""
    writer = body_writer(scope)
    return PatientSender(send, None if writer is None else lambda: writer.unsent_bytes, patience_s)
