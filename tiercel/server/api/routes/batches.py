"""/v1/batches."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import BODY_REFUSALS, KEY_REFUSALS, ApiRoute, Contract
from tiercel.server.api.paging import page_of, page_query
from tiercel.server.api.replies.batches import BatchList, BatchObject
from tiercel.server.api.routes.files import DISABLED_OR_DRAINING, no_such, service_of
from tiercel.server.api.schemas.batches import BatchFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.batch.durable import NO_ROOM
from tiercel.server.batch.line import BATCH_ENDPOINTS
from tiercel.server.batch.quota import storage_full
from tiercel.server.batch.records import BatchRecord
from tiercel.server.http.answer import json_answer
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_PAGE = 20  # batches of a list, if the client names no number
_MAX_PAGE = 100


class BatchRoutes:
    """The handlers of batches. A tenant sees its own batches only. `others` are routes that a line may name."""

    def __init__(self, context: ServerContext, others: Sequence[ApiRoute]) -> None:
        self._context = context
        paths = {route.path for route in others if route.method == "POST"}
        self._endpoints = [path for path in BATCH_ENDPOINTS if path in paths]

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        refusals = (*KEY_REFUSALS, *DISABLED_OR_DRAINING)
        create = Contract(
            bodies=(BatchFields,), answers={200: BatchObject}, refusals=(*BODY_REFUSALS, *refusals, 429, 500, 507)
        )
        listed = Contract(
            query=page_query(default=_PAGE, most=_MAX_PAGE), answers={200: BatchList}, refusals=(400, *refusals)
        )
        one, answers = "/v1/batches/{batch_id}", {200: BatchObject}
        return [
            ApiRoute("POST", "/v1/batches", self.create, create),
            ApiRoute("GET", "/v1/batches", self.show_all, listed),
            ApiRoute("GET", one, self.show, Contract(answers=answers, refusals=(*refusals, 404))),
            ApiRoute("POST", f"{one}/cancel", self.cancel, Contract(answers=answers, refusals=(*refusals, 404, 409))),
        ]

    async def create(self, request: Request) -> Response:
        """Begin a batch of the requests in a file."""
        service, tenant = service_of(self._context), tenant_of(request.scope).name
        with self._context.hold_body(request) as holding:
            fields = read_fields(BatchFields, await self._context.read_object(request, holding))
        if fields.endpoint not in self._endpoints:
            raise AdmissionError(400, f"endpoint: expected one of {', '.join(self._endpoints)}", param="endpoint")
        file = service.folder.spool.find(tenant, fields.input_file_id)
        if file is None or file.purpose != "batch":
            raise AdmissionError(
                400, "input_file_id: there is no file with this id and the purpose batch", param="input_file_id"
            )
        lifetime_s = None if fields.output_expires_after is None else fields.output_expires_after.seconds
        try:
            record = await service.create_batch(tenant, fields.endpoint, file.id, fields.metadata, lifetime_s)
        except OSError as exc:
            if exc.errno in NO_ROOM:
                raise storage_full() from exc
            raise
        return json_answer(BatchObject.of(record))

    async def show_all(self, request: Request) -> Response:
        """List the batches of the tenant, the newest first."""
        records = service_of(self._context).folder.book.listed(tenant_of(request.scope).name)
        page, has_more = page_of(request, records, lambda record: record.id, default=_PAGE, most=_MAX_PAGE)
        data = [BatchObject.of(record) for record in page]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_answer(BatchList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def show(self, request: Request, batch_id: str) -> Response:
        """Describe a batch."""
        return json_answer(BatchObject.of(self._find(request, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch. The lines that were answered are in its files; one that is over cannot be cancelled (409)."""
        record = self._find(request, batch_id)
        if record.status not in ("validating", "in_progress", "cancelling"):
            raise AdmissionError(
                409, f"A batch with the status {record.status} cannot be cancelled.", code="invalid_status"
            )
        return json_answer(BatchObject.of(await service_of(self._context).folder.worker.cancel(batch_id)))

    def _find(self, request: Request, batch_id: str) -> BatchRecord:
        record = service_of(self._context).folder.book.find(tenant_of(request.scope).name, batch_id)
        if record is None:
            raise no_such("batch", "batch_id")
        return record
