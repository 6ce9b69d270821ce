"""/v1/messages/batches: Anthropic's message batches, by the machinery of /v1/batches."""

import re
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import BODY_REFUSALS, KEY_REFUSALS, ApiRoute, Contract, QueryField
from tiercel.server.api.file_content import file_content
from tiercel.server.api.paging import message_page_of, message_page_query
from tiercel.server.api.replies.message_batches import DeletedMessageBatch, MessageBatch, MessageBatchList
from tiercel.server.api.routes.files import DISABLED_OR_DRAINING, service_of
from tiercel.server.api.schemas.message_batches import MessageBatchFields, max_requests, read_requests
from tiercel.server.batch.durable import NO_ROOM
from tiercel.server.batch.line import BatchLine
from tiercel.server.batch.quota import storage_full
from tiercel.server.batch.records import BatchRecord
from tiercel.server.http.answer import json_answer
from tiercel.server.http.body import check_json_type, read_body
from tiercel.server.http.message_failure import MessageFaultBody
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_PAGE = 20  # batches of a list, if the client names no number
_MAX_PAGE = 1000
_REQUEST_BYTES = 512  # of a request while it is checked, besides its text
_PIECE_LINES = 64  # that are written at once
_JSONL = "application/x-jsonl"
_PATH = "/v1/messages/batches"
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


class MessageBatchRoutes:
    """The handlers of message batches. A tenant sees its own batches only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        one, answer = f"{_PATH}/{{batch_id}}", MessageBatch
        query = message_page_query(default=_PAGE, most=_MAX_PAGE)
        return [
            ApiRoute(
                "POST",
                _PATH,
                self.create,
                _contract(answer, *BODY_REFUSALS, 429, 500, 507, bodies=(MessageBatchFields,)),
            ),
            ApiRoute("GET", _PATH, self.show_all, _contract(MessageBatchList, 400, query=query)),
            ApiRoute("GET", one, self.show, _contract(answer, 404)),
            ApiRoute("DELETE", one, self.delete, _contract(DeletedMessageBatch, 400, 404)),
            ApiRoute("POST", f"{one}/cancel", self.cancel, _contract(answer, 400, 404)),
            ApiRoute("GET", f"{one}/results", self.results, _contract(None, 404, text_type=_JSONL)),
        ]

    async def create(self, request: Request) -> Response:
        """Begin a batch of requests."""
        service, tenant = service_of(self._context), tenant_of(request.scope).name
        service.folder  # noqa: B018 - raises before the body is read
        limit_s = self._context.settings.timeout_body_s
        with self._context.hold_body(request) as holding:
            check_json_type(request)
            body = await read_body(request, holding, limit_s)
            holding.grow(len(body) + max_requests(body) * _REQUEST_BYTES)
            lines = await self._context.in_worker(lambda: read_requests(body))
            try:
                record = await service.create_message_batch(tenant, _pieces(lines), len(lines))
            except OSError as exc:
                if exc.errno in NO_ROOM:
                    raise storage_full() from exc
                raise
        return json_answer(self._object(request, record))

    async def show_all(self, request: Request) -> Response:
        """List the batches of the tenant, the newest first."""
        records = service_of(self._context).folder.book.listed(tenant_of(request.scope).name, of_messages=True)
        page, has_more = message_page_of(request, records, lambda record: record.id, default=_PAGE, most=_MAX_PAGE)
        data = [self._object(request, record) for record in page]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_answer(MessageBatchList(data=data, has_more=has_more, first_id=first, last_id=last))

    async def show(self, request: Request, batch_id: str) -> Response:
        """Describe a batch."""
        return json_answer(self._object(request, self._find(request, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch. The requests that were answered keep their results; one that has ended stays as it is (400)."""
        record = self._find(request, batch_id)
        if record.is_over:
            raise AdmissionError(400, "The batch has ended and cannot be cancelled.", code="invalid_status")
        return json_answer(self._object(request, await service_of(self._context).folder.worker.cancel(record.id)))

    async def delete(self, request: Request, batch_id: str) -> Response:
        """Remove a batch that has ended, with its results (400 before)."""
        record = self._find(request, batch_id)
        if not record.is_over:
            raise AdmissionError(400, "The batch has not ended. Cancel it first.", code="invalid_status")
        await service_of(self._context).remove_batch(record)
        return json_answer(DeletedMessageBatch(id=record.id))

    async def results(self, request: Request, batch_id: str) -> Response:
        """Return the results of a batch that has ended, one JSON object on each line, in any order."""
        record, service = self._find(request, batch_id), service_of(self._context)
        if not record.is_over:
            raise _no_results("the batch has not ended")
        gone = _no_results("they have expired or were deleted")
        ids = [file_id for file_id in (record.output_file_id, record.error_file_id) if file_id is not None]
        files = [service.folder.spool.find(record.tenant, file_id) for file_id in ids]
        found = [file for file in files if file is not None]
        if len(found) < len(ids):
            raise gone
        return await file_content(service, found, _JSONL, gone)

    def _find(self, request: Request, batch_id: str) -> BatchRecord:
        book = service_of(self._context).folder.book
        record = book.find(tenant_of(request.scope).name, batch_id, of_messages=True)
        if record is None:
            raise AdmissionError(404, "There is no message batch with this id.", code="not_found", param="batch_id")
        return record

    def _object(self, request: Request, record: BatchRecord) -> MessageBatch:
        return MessageBatch.of(record, self._context.wall_s(), f"{_origin(request)}{_PATH}/{record.id}/results")


def _contract(
    answer: object | None,
    *refusals: int,
    query: Sequence[QueryField] = (),
    bodies: tuple[object, ...] = (),
    text_type: str | None = None,
) -> Contract:
    """Return the contract of a route whose refusals have Anthropic's shape."""
    answers = dict.fromkeys((*refusals, *DISABLED_OR_DRAINING), MessageFaultBody)
    return Contract(
        query=tuple(query),
        bodies=bodies,
        answers=answers if answer is None else {200: answer, **answers},
        text_type=text_type,
        refusals=KEY_REFUSALS,
        takes_api_key=True,
    )


async def _pieces(lines: Sequence[BatchLine]) -> AsyncIterator[bytes]:
    """Yield the lines of the input of a batch, several at a time."""
    for start in range(0, len(lines), _PIECE_LINES):
        yield b"".join(msgspec.json.encode(line) + b"\n" for line in lines[start : start + _PIECE_LINES])


def _origin(request: Request) -> str:
    """Return the address of this server as the client has it: behind a proxy, by what the proxy says about it."""
    url, headers = request.base_url, request.headers
    scheme, host = headers.get("x-forwarded-proto", ""), headers.get("x-forwarded-host", "")
    scheme = scheme if scheme in ("http", "https") else url.scheme
    host = host if _HOST.fullmatch(host) else url.netloc
    return f"{scheme}://{host}{url.path.rstrip('/')}"


def _no_results(reason: str) -> AdmissionError:
    return AdmissionError(404, f"This batch has no results: {reason}.", code="not_found", param="batch_id")
