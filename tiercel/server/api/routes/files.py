"""/v1/files."""

import asyncio
from collections.abc import AsyncIterator
from typing import get_args

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import BODY_REFUSALS, KEY_REFUSALS, ApiRoute, Contract, QueryField
from tiercel.server.api.file_content import file_content
from tiercel.server.api.paging import page_of, page_query
from tiercel.server.api.replies.batches import DeletedFile, FileList, FileObject
from tiercel.server.api.schemas.batches import MAX_LIFETIME_S, MIN_LIFETIME_S, FileFields
from tiercel.server.batch.records import FileRecord, UploadPurpose
from tiercel.server.batch.service import BatchService
from tiercel.server.batch.upload_form import UploadForm
from tiercel.server.http.answer import json_answer
from tiercel.server.http.watch import ClientGoneError, linger
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

DISABLED_OR_DRAINING = (403, 503)
_FORM = "multipart/form-data"
_BINARY = "application/octet-stream"
_LIFETIME_S = MAX_LIFETIME_S  # of files that name none
_STEP_BYTES = 1024 * 1024  # of an upload, for which --timeout-body is the limit
_MAX_PAGE = 10_000  # files of a list
_PURPOSE = QueryField("purpose", {"type": "string"}, "Only files with this purpose.")


class FileRoutes:
    """The handlers of files. A tenant sees its own files only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        refusals = (*KEY_REFUSALS, *DISABLED_OR_DRAINING)
        upload = Contract(
            bodies=(FileFields,),
            body_types=(_FORM,),
            answers={200: FileObject},
            refusals=(*BODY_REFUSALS, *refusals, 429, 500, 507),
        )
        listed = Contract(
            query=(_PURPOSE, *page_query(default=_MAX_PAGE, most=_MAX_PAGE)),
            answers={200: FileList},
            refusals=(400, *refusals),
        )
        one = "/v1/files/{file_id}"
        return [
            ApiRoute("POST", "/v1/files", self.upload, upload),
            ApiRoute("GET", "/v1/files", self.show_all, listed),
            ApiRoute("GET", one, self.show, Contract(answers={200: FileObject}, refusals=(*refusals, 404))),
            ApiRoute("DELETE", one, self.delete, Contract(answers={200: DeletedFile}, refusals=(*refusals, 404, 409))),
            ApiRoute("GET", f"{one}/content", self.content, Contract(text_type=_BINARY, refusals=(*refusals, 404))),
        ]

    async def upload(self, request: Request) -> Response:
        """Store a file. It is written to disk as it arrives; an upload that does not end leaves nothing."""
        folder, tenant = service_of(self._context).folder, tenant_of(request.scope).name
        form = UploadForm(request.headers.get("content-type", ""))
        with folder.spool.uploading(tenant) as upload:
            try:
                async for data in self._pieces(request):
                    if piece := form.feed(data):
                        await upload.write(piece)
            except AdmissionError as exc:
                if exc.status == 413:  # which closes the connection
                    await linger(request.receive)
                raise
            filename = form.finish()
            purpose, lifetime_s = _read_purpose(form.fields), _read_lifetime(form.fields)
            service_of(self._context).folder  # noqa: B018 - raises if the server has begun to drain
            record = await upload.commit(filename, purpose, lifetime_s)
        return json_answer(FileObject.of(record))

    async def show_all(self, request: Request) -> Response:
        """List the files of the tenant, the newest first."""
        records = service_of(self._context).folder.spool.of(tenant_of(request.scope).name)
        purpose = request.query_params.get("purpose")
        wanted = [record for record in records if purpose in (None, record.purpose)]
        page, has_more = page_of(request, wanted, lambda record: record.id, default=_MAX_PAGE, most=_MAX_PAGE)
        data = [FileObject.of(record) for record in page]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_answer(FileList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def show(self, request: Request, file_id: str) -> Response:
        """Describe a file."""
        return json_answer(FileObject.of(self._find(request, file_id)))

    async def delete(self, request: Request, file_id: str) -> Response:
        """Remove a file. The input of an unfinished batch is kept (409)."""
        await service_of(self._context).remove_file(self._find(request, file_id))
        return json_answer(DeletedFile(id=file_id))

    async def content(self, request: Request, file_id: str) -> Response:
        """Return the bytes of a file."""
        record, service = self._find(request, file_id), service_of(self._context)
        return await file_content(service, [record], _BINARY, no_such("file", "file_id"))

    def _find(self, request: Request, file_id: str) -> FileRecord:
        record = service_of(self._context).folder.spool.find(tenant_of(request.scope).name, file_id)
        if record is None:
            raise no_such("file", "file_id")
        return record

    async def _pieces(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Errors: AdmissionError (408) if a megabyte takes too long; ClientGoneError."""
        limit_s, loop = self._context.settings.timeout_body_s, asyncio.get_running_loop()
        stream, end_s, step_bytes = aiter(request.stream()), loop.time() + limit_s, 0
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    data = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError as exc:
                raise AdmissionError(408, "The file did not arrive in time.", code="request_timeout") from exc
            except ClientDisconnect as exc:
                raise ClientGoneError from exc
            step_bytes += len(data)
            if step_bytes >= _STEP_BYTES:
                end_s, step_bytes = loop.time() + limit_s, 0
            yield data


def service_of(context: ServerContext) -> BatchService:
    """Return the files and batches of the server. Errors: AdmissionError (403) if it has no folder for them."""
    if context.batches is None:
        raise AdmissionError(
            403,
            "This server keeps no files: its operator sets a folder for them with --files-path.",
            code="files_disabled",
            kind="permission_error",
        )
    return context.batches


def no_such(kind: str, param: str) -> AdmissionError:
    """Return the refusal of an id that the tenant does not have."""
    return AdmissionError(404, f"There is no {kind} with this id.", code="not_found", param=param)


def _read_purpose(fields: dict[str, str]) -> UploadPurpose:
    """Return the purpose that the form names. Errors: AdmissionError (400)."""
    named = fields.get("purpose")
    for purpose in get_args(UploadPurpose):
        if purpose == named:
            return purpose
    raise AdmissionError(400, f"purpose: expected one of {', '.join(get_args(UploadPurpose))}", param="purpose")


def _read_lifetime(fields: dict[str, str]) -> int:
    """Return the seconds until the file expires. Errors: AdmissionError (400)."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return _LIFETIME_S
    if anchor != "created_at":
        raise AdmissionError(400, "expires_after.anchor: expected created_at", param="expires_after")
    if seconds is None or not seconds.isascii() or not seconds.isdecimal() or len(seconds) > 9:
        seconds = "0"
    if not MIN_LIFETIME_S <= int(seconds) <= MAX_LIFETIME_S:
        raise AdmissionError(
            400, f"expires_after.seconds: expected {MIN_LIFETIME_S} to {MAX_LIFETIME_S}", param="expires_after"
        )
    return int(seconds)
