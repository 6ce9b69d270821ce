"""/v1/conversations: create, retrieve, change, delete; and their items."""

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import BODY_REFUSALS, KEY_REFUSALS, ApiRoute, Contract
from tiercel.server.api.hold import Hold
from tiercel.server.api.paging import page_of, page_query
from tiercel.server.api.replies.conversations import (
    ConversationBody,
    ConversationItemList,
    DeletedConversation,
    Json,
)
from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.response_items import new_id, read_items
from tiercel.server.api.schemas.conversations import (
    MAX_ITEMS,
    ConversationFields,
    ConversationItemsFields,
    ConversationUpdateFields,
)
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.stored_conversation import StoredConversation, find_conversation
from tiercel.server.api.stored_items import Item, StoredItem, encode_item, listed
from tiercel.server.http.answer import json_answer
from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.pieces import PieceAnswer
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_PAGE = 20  # items of a list, if the client names no number
_MAX_PAGE = 100


class ConversationRoutes:
    """The handlers of conversations. A tenant sees its own only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._store = context.store

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        refusals = (*KEY_REFUSALS, 404)
        writes = (*BODY_REFUSALS, *refusals)
        create = Contract(bodies=(ConversationFields,), answers={200: ConversationBody}, refusals=(*writes, 403))
        update = Contract(bodies=(ConversationUpdateFields,), answers={200: ConversationBody}, refusals=writes)
        add = Contract(bodies=(ConversationItemsFields,), answers={200: ConversationItemList}, refusals=writes)
        shown = Contract(answers={200: ConversationBody}, refusals=refusals)
        page = page_query(default=_PAGE, most=_MAX_PAGE)
        items = Contract(query=page, answers={200: ConversationItemList}, refusals=(400, *refusals))
        one = "/v1/conversations/{id}"
        item = f"{one}/items/{{item_id}}"
        return [
            ApiRoute("POST", "/v1/conversations", self.create, create),
            ApiRoute("GET", one, self.show, shown),
            ApiRoute("POST", one, self.update, update),
            ApiRoute("DELETE", one, self.delete, Contract(answers={200: DeletedConversation}, refusals=refusals)),
            ApiRoute("POST", f"{one}/items", self.add_items, add),
            ApiRoute("GET", f"{one}/items", self.items, items),
            ApiRoute("GET", item, self.show_item, Contract(answers={200: Json}, refusals=refusals)),
            ApiRoute("DELETE", item, self.delete_item, shown),
        ]

    async def create(self, request: Request) -> Response:
        """Create a conversation, with up to 20 items."""
        tenant = tenant_of(request.scope).name
        if not self._store.keeps_any:
            raise AdmissionError(
                403,
                "This server stores nothing (--stored-responses 0), so there are no conversations.",
                code="storage_disabled",
                kind="permission_error",
            )
        with self._context.hold_body(request) as holding:
            fields = read_fields(ConversationFields, await self._context.read_object(request, holding))
            created_at = int(self._context.wall_s())
            made = StoredConversation(new_id("conv_"), created_at, fields.metadata or {}, None)
            made = made.with_items(await self._encoded(tenant, fields.items, holding))
            self._put(tenant, made, "items")
        return _shown(made)

    async def show(self, request: Request, id: str) -> Response:
        """Return a conversation without its items."""
        return _shown(self._find(request, id))

    async def update(self, request: Request, id: str) -> Response:
        """Give a conversation other metadata."""
        self._find(request, id)
        with self._context.hold_body(request) as holding:
            fields = read_fields(ConversationUpdateFields, await self._context.read_object(request, holding))
        changed = self._find(request, id).with_metadata(fields.metadata or {})
        self._put(tenant_of(request.scope).name, changed, "metadata")
        return _shown(changed)

    async def delete(self, request: Request, id: str) -> Response:
        """Forget a conversation. Responses that were created in it keep their context."""
        self._find(request, id)
        self._store.remove(tenant_of(request.scope).name, StoredConversation, id)
        return json_answer(DeletedConversation(id))

    async def add_items(self, request: Request, id: str) -> Response:
        """Add up to 20 items to a conversation, and return them."""
        tenant = tenant_of(request.scope).name
        self._find(request, id)
        with self._context.hold_body(request) as holding:
            fields = read_fields(ConversationItemsFields, await self._context.read_object(request, holding))
            added = await self._encoded(tenant, fields.items, holding)
            self._put(tenant, self._find(request, id).with_items(added), "items")
        return self._listed(request, added, has_more=False)

    async def items(self, request: Request, id: str) -> Response:
        """List the items of a conversation, the latest first, page by page."""
        items = self._find(request, id).items()
        page, has_more = page_of(request, items, lambda item: item.id, default=_PAGE, most=_MAX_PAGE)
        return self._listed(request, page, has_more=has_more)

    async def show_item(self, request: Request, id: str, item_id: str) -> Response:
        """Return an item of a conversation."""
        item = self._find_item(request, id, item_id)
        return PieceAnswer([item.encoded], self._reading(request, [item]))

    async def delete_item(self, request: Request, id: str, item_id: str) -> Response:
        """Remove an item from a conversation, which is returned."""
        self._find_item(request, id, item_id)
        changed = self._find(request, id).without_item(item_id)
        self._store.put(tenant_of(request.scope).name, changed)
        return _shown(changed)

    async def _encoded(self, tenant: str, value: object, holding: BodyHolding) -> list[StoredItem]:
        """Return the items of a request as they are stored. Errors: AdmissionError (400, 404 or 503)."""
        given = cast(list[object], value) if isinstance(value, list) else None
        if (value is not None and given is None) or len(given or ()) > MAX_ITEMS:
            raise AdmissionError(400, f"items: expected a list of at most {MAX_ITEMS} items", param="items")
        items = read_items(given, lambda id: self._store.item(tenant, id), "items")
        holding.grow(holding.bytes)  # the items once more, encoded
        with self._store.use(tenant, [item for item in items if isinstance(item, StoredItem)]):
            return await self._context.in_worker(lambda: list(map(_stored, items)))

    def _put(self, tenant: str, conversation: StoredConversation, field: str) -> None:
        conversation.check(self._store, field)
        self._store.put(tenant, conversation)

    def _find(self, request: Request, id: str) -> StoredConversation:
        return find_conversation(self._store, tenant_of(request.scope).name, id, "id")

    def _find_item(self, request: Request, id: str, item_id: str) -> StoredItem:
        for item in reversed(self._find(request, id).items()):
            if item.id == item_id:
                return item
        raise AdmissionError(
            404, f"The conversation has no item with id '{item_id[:128]}'.", code="item_not_found", param="item_id"
        )

    def _listed(self, request: Request, page: Sequence[StoredItem], *, has_more: bool) -> Response:
        first, last = (page[0].id, page[-1].id) if page else ("", "")
        answer = ConversationItemList(hole(list[Json]), first, last, has_more)
        before, after = msgspec.json.encode(answer).split(HOLE)
        return PieceAnswer([before, *listed(page), after], self._reading(request, page))

    def _reading(self, request: Request, items: Sequence[StoredItem]) -> Callable[[], Hold]:
        tenant = tenant_of(request.scope).name
        return lambda: self._store.read(tenant, items)


def _shown(conversation: StoredConversation) -> Response:
    return json_answer(ConversationBody(conversation.id, conversation.created_at, dict(conversation.metadata)))


def _stored(item: Item | StoredItem) -> StoredItem:
    return item if isinstance(item, StoredItem) else encode_item(item)
