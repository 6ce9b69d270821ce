"""Chat completions that were created with `store`: list, retrieve, change, delete, and list their messages."""

import re
from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import BODY_REFUSALS, KEY_REFUSALS, ApiRoute, Contract, QueryField
from tiercel.server.api.hold import Hold
from tiercel.server.api.paging import page_of, page_query
from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.replies.stored_chats import (
    DeletedChat,
    StoredChatBody,
    StoredChatList,
    StoredMessage,
    StoredMessageList,
)
from tiercel.server.api.schemas.chat import StoredChatFields
from tiercel.server.api.schemas.fields import MAX_METADATA, read_fields
from tiercel.server.api.stored_chat import StoredChat
from tiercel.server.http.answer import json_answer
from tiercel.server.http.pieces import PieceAnswer
from tiercel.server.tenancy.auth import tenant_of
from tiercel.values.errors import AdmissionError

_PAGE = 20  # of a list, if the client names no number
_MAX_PAGE = 100
_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)
_MAX_TEXT = 512
_FILTERS = (
    QueryField("model", {"type": "string"}, "Only completions of this name of the model."),
    QueryField(
        "metadata[key]",
        {"type": "string", "maxLength": _MAX_TEXT},
        "Only completions whose metadata has this value under `key`, which stands for any name.",
    ),
)


class StoredChatRoutes:
    """The handlers of stored chat completions. A tenant sees its own only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._store = context.store

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        page = page_query(default=_PAGE, most=_MAX_PAGE, least=0, order="asc")
        listed = Contract(query=(*page, *_FILTERS), answers={200: StoredChatList}, refusals=(400, *KEY_REFUSALS))
        refusals = (*KEY_REFUSALS, 404)
        show = Contract(answers={200: StoredChatBody}, refusals=refusals)
        change = Contract(
            bodies=(StoredChatFields,), answers={200: StoredChatBody}, refusals=(*BODY_REFUSALS, *refusals)
        )
        messages = Contract(query=page, answers={200: StoredMessageList}, refusals=(400, *refusals))
        one = "/v1/chat/completions/{id}"
        return [
            ApiRoute("GET", "/v1/chat/completions", self.show_all, listed),
            ApiRoute("GET", one, self.show, show),
            ApiRoute("POST", one, self.change, change),
            ApiRoute("DELETE", one, self.delete, Contract(answers={200: DeletedChat}, refusals=refusals)),
            ApiRoute("GET", f"{one}/messages", self.messages, messages),
        ]

    async def show_all(self, request: Request) -> Response:
        """List the completions of the tenant, the oldest first, page by page."""
        model, metadata = request.query_params.get("model"), _metadata_filter(request)
        chats = [
            chat
            for chat in self._store.of(tenant_of(request.scope).name, StoredChat)
            if chat.is_over
            and model in (None, chat.model)
            and all(chat.metadata.get(name) == value for name, value in metadata.items())
        ]
        page, has_more = page_of(
            request, chats, lambda chat: chat.id, default=_PAGE, most=_MAX_PAGE, least=0, order="asc"
        )
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        head, tail = msgspec.json.encode(StoredChatList(hole(list[StoredChatBody]), first, last, has_more)).split(HOLE)
        pieces = [head, b"["]
        for index, chat in enumerate(page):
            pieces += [b"," if index else b"", *chat.body()]
        return PieceAnswer([*pieces, b"]", tail], self._reading(request, page))

    async def show(self, request: Request, id: str) -> Response:
        """Return a stored completion."""
        return self._shown(request, self._find(request, id))

    async def change(self, request: Request, id: str) -> Response:
        """Give a stored completion other metadata."""
        self._find(request, id)
        with self._context.hold_body(request) as holding:
            fields = read_fields(StoredChatFields, await self._context.read_object(request, holding))
        chat = self._find(request, id).with_metadata(fields.metadata or {})
        self._store.put(tenant_of(request.scope).name, chat)
        return self._shown(request, chat)

    async def delete(self, request: Request, id: str) -> Response:
        """Forget a stored completion."""
        self._find(request, id)
        self._store.remove(tenant_of(request.scope).name, StoredChat, id)
        return json_answer(DeletedChat(id))

    async def messages(self, request: Request, id: str) -> Response:
        """List the messages of the request of a stored completion, the oldest first, page by page."""
        chat = self._find(request, id)
        places = range(len(chat.messages))
        page, has_more = page_of(request, places, chat.message_id, default=_PAGE, most=_MAX_PAGE, least=0, order="asc")
        first, last = (chat.message_id(page[0]), chat.message_id(page[-1])) if page else (None, None)
        answer = StoredMessageList(hole(list[StoredMessage]), first, last, has_more)
        head, tail = msgspec.json.encode(answer).split(HOLE)
        pieces = [head, b"["]
        for index, place in enumerate(page):
            pieces += [b"," if index else b"", chat.messages[place]]
        return PieceAnswer([*pieces, b"]", tail], self._reading(request, [chat]))

    def _shown(self, request: Request, chat: StoredChat) -> Response:
        return PieceAnswer(list(chat.body()), self._reading(request, [chat]))

    def _reading(self, request: Request, chats: Sequence[StoredChat]) -> Callable[[], Hold]:
        tenant = tenant_of(request.scope).name
        return lambda: self._store.read(tenant, chats)

    def _find(self, request: Request, id: str) -> StoredChat:
        chat = self._store.get(tenant_of(request.scope).name, StoredChat, id)
        if chat is None or not chat.is_over:
            raise AdmissionError(
                404,
                f"Chat completion with id '{id[:128]}' not found. Completions are kept if they were created with store,"
                " in memory, for a limited time and number.",
                code="chat_completion_not_found",
                param="id",
            )
        return chat


def _metadata_filter(request: Request) -> dict[str, str]:
    """Return the metadata that listed completions must have. Errors: AdmissionError (400)."""
    wanted: dict[str, str] = {}
    for name, value in request.query_params.items():
        if not name.startswith("metadata["):
            continue
        match = _METADATA.fullmatch(name)
        if match is None or len(value) > _MAX_TEXT:
            raise AdmissionError(
                400,
                f"metadata: expected metadata[NAME]=VALUE with at most 64 and {_MAX_TEXT} characters",
                param="metadata",
            )
        wanted[match[1]] = value
    if len(wanted) > MAX_METADATA:
        raise AdmissionError(400, f"metadata: at most {MAX_METADATA} entries", param="metadata")
    return wanted
