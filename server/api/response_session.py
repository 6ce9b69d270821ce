"""One response in the store, from its creation to its end."""

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.replies.response_shape import ResponseShape
from tiercel.server.api.replies.responses import OutputItem, ResponseBody
from tiercel.server.api.response_store import ConversationTurn, ResponseStore, StoredResponse


class ResponseKeeper:
    """Writes the states of one response to the store.

    A response that was deleted or evicted while it was in progress is not stored again.
    """

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    def begin(self, body: ResponseBody, turn: ConversationTurn) -> None:
        """Store a response without output."""
        self._store.put(self._tenant, _entry(body, turn))

    def change(self, body: ResponseBody) -> None:
        """Store a later state of the response."""
        entry = self._store.get(self._tenant, body.id)
        if entry is not None:
            turn = entry.turn.ended(msgspec.json.encode(body.output))
            self._store.put(self._tenant, _entry(body, turn))

    def drop(self, id: str) -> None:
        """Forget the response."""
        self._store.remove(self._tenant, id)


def _entry(body: ResponseBody, turn: ConversationTurn) -> StoredResponse:
    before, after = msgspec.json.encode(replace(body, output=hole(list[OutputItem]))).split(HOLE)
    is_over = body.status not in ("queued", "in_progress")
    return StoredResponse(body.id, before, after, turn, is_over=is_over, is_in_background=body.background)


class KeptAnswer(Response):
    """The answer to a request whose response is stored.

    If the client leaves a stream, its response is stored as cancelled, with the output so far. If it gets no response
    at all, because the request failed or it left before a whole answer, nothing is stored.
    """

    def __init__(self, answer: Response, shape: ResponseShape, keeper: ResponseKeeper, turn: ConversationTurn) -> None:
        super().__init__()
        self._answer = answer
        self._shape = shape
        self._keeper = keeper
        self._turn: ConversationTurn | None = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn, self._turn = self._turn, None  # from here on only the store has it, which may evict it
        assert turn is not None
        self._keeper.begin(self._shape.body, turn)
        del turn
        try:
            await self._answer(scope, receive, send)
        finally:
            if self._shape.has_begun:
                self._shape.abandon()
            if not self._shape.is_over:
                self._keeper.drop(self._shape.body.id)
