"""One response in the store, from its creation to its end."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.api.hold import Hold
from tiercel.server.api.object_store import ObjectStore
from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.replies.response_shape import ResponseShape
from tiercel.server.api.replies.responses import OutputItem, ResponseBody
from tiercel.server.api.response_input import ResponseInput
from tiercel.server.api.response_items import new_id
from tiercel.server.api.stored_conversation import StoredConversation
from tiercel.server.api.stored_items import Item, StoredItem
from tiercel.server.api.stored_response import StoredResponse, StoredTurn


class ResponseKeeper:
    """Writes the states of one response to the store.

    A response that was deleted or evicted while it was in progress is not stored again. `parent` and the stored items
    of `input` stay in the store until `release` at the latest.
    """

    def __init__(
        self,
        store: ObjectStore,
        tenant: str,
        parent: StoredTurn | None,
        input: Sequence[Item | StoredItem],
        conversation: str | None = None,
    ) -> None:
        """`conversation`: the id of that to which the turn is added when it has ended."""
        self._store = store
        self._tenant = tenant
        self._parent = parent
        self._conversation = conversation
        self._id = ""  # under which the response is stored
        items = [item for item in input if isinstance(item, StoredItem)]
        self._hold: Hold = store.use(tenant, items if parent is None else [parent, *items])

    def begin(self, body: ResponseBody, input: ResponseInput) -> None:
        """Store a response without output. From here on only the store has its turn, and may evict it.

        A response of a conversation that is not to be stored is there until its end, under an id that nobody knows.
        """
        self._id = body.id if body.store else new_id("turn_")
        self._store.put(self._tenant, _entry(self._id, body, StoredTurn(self._parent, input.encoded)))
        self.release()

    def release(self) -> None:
        """Hold nothing of the store any more. A second call has no effect."""
        self._parent = None
        self._hold.release()

    def change(self, body: ResponseBody) -> None:
        """Store a later state of the response."""
        entry = self._store.get(self._tenant, StoredResponse, self._id)
        if entry is None:
            return
        output = [StoredItem(item.id, msgspec.json.encode(item), opens_turn=False) for item in body.output]
        turn = entry.turn.ended(output)
        self._store.put(self._tenant, _entry(self._id, body, turn))
        if body.status in ("completed", "incomplete"):
            self._add_to_conversation(turn)
        if not body.store:
            self.drop()

    def drop(self) -> None:
        """Forget the response."""
        self._store.remove(self._tenant, StoredResponse, self._id)

    def _add_to_conversation(self, turn: StoredTurn) -> None:
        """Add the turn to its conversation, if that is still there and the store has room for it with the turn."""
        if self._conversation is None:
            return
        conversation = self._store.get(self._tenant, StoredConversation, self._conversation)
        if conversation is not None and (grown := conversation.with_turn(turn)).fits(self._store):
            self._store.put(self._tenant, grown)


def _entry(id: str, body: ResponseBody, turn: StoredTurn) -> StoredResponse:
    before, after = msgspec.json.encode(replace(body, output=hole(list[OutputItem]))).split(HOLE)
    is_over = body.status not in ("queued", "in_progress")
    return StoredResponse(id, before, after, turn, is_over=is_over, is_in_background=body.background)


class KeptAnswer(Response):
    """The answer to a request whose response is stored.

    If the client leaves a stream, its response is stored as cancelled, with the output so far. If it gets no response
    at all, because the request failed or it left before a whole answer, nothing is stored.
    """

    def __init__(self, answer: Response, shape: ResponseShape, keeper: ResponseKeeper, input: ResponseInput) -> None:
        super().__init__()
        self._answer = answer
        self._shape = shape
        self._keeper = keeper
        self._input: ResponseInput | None = input

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        input, self._input = self._input, None
        assert input is not None
        self._keeper.begin(self._shape.body, input)
        del input
        try:
            await self._answer(scope, receive, send)
        finally:
            if self._shape.has_begun:
                self._shape.abandon()
            if not self._shape.is_over:
                self._keeper.drop()
