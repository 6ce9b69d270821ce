"""Responses with the bytes of files, which are read as they are sent."""

import asyncio
import os
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.batch.records import FileRecord
from tiercel.server.batch.service import BatchService
from tiercel.server.http.body_writer import body_writer
from tiercel.server.http.patience import PatientSender
from tiercel.server.http.watch import run_watched
from tiercel.values.errors import AdmissionError

_PIECE_BYTES = 256 * 1024
_PATIENCE_S = 30.0  # for a client that does not read


async def file_content(
    service: BatchService, records: Sequence[FileRecord], media_type: str, gone: AdmissionError
) -> Response:
    """Return the response with the bytes of files, one behind the other.

    Errors: `gone` if one of them was removed meanwhile; OSError.
    """
    paths = [service.folder.spool.path_of(record.id) for record in records]
    fds: list[int] = []

    def open_files() -> None:
        for path in paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    try:
        await service.on_disk(open_files)
    except OSError as exc:
        for fd in fds:
            os.close(fd)
        if isinstance(exc, FileNotFoundError):
            raise gone from exc
        raise
    return _FileContent([(fd, record.bytes) for fd, record in zip(fds, records, strict=True)], media_type)


class _FileContent(Response):
    """A response with the bytes of open files, which it closes."""

    def __init__(self, files: Sequence[tuple[int, int]], media_type: str) -> None:
        """`files`: descriptor and length of each."""
        super().__init__(media_type=media_type)
        self._files = files
        self._type = media_type.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = body_writer(scope)
        patient = PatientSender(send, None if writer is None else lambda: writer.unsent_bytes, _PATIENCE_S)
        try:
            await run_watched(self._send(scope["method"], patient), receive)
        finally:
            for fd, _ in self._files:
                os.close(fd)

    async def _send(self, method: str, send: PatientSender) -> None:
        total = sum(length for _, length in self._files)
        headers = [(b"content-type", self._type), (b"content-length", str(total).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for fd, length in () if method == "HEAD" else self._files:
            offset = 0
            while offset < length:
                piece = await asyncio.to_thread(os.pread, fd, _PIECE_BYTES, offset)
                if not piece:
                    raise OSError(f"the file ends at {offset} of {length} bytes")
                offset += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
