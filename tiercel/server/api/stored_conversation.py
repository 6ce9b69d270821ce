"""Conversations as they are stored: their metadata, and the last of their turns, which refers to those before."""

from collections.abc import Iterator, Mapping, Sequence

from tiercel.server.api.object_store import ObjectStore, StoredObject
from tiercel.server.api.stored_chat import metadata_bytes
from tiercel.server.api.stored_items import StoredItem, StoredPart
from tiercel.server.api.stored_response import MAX_CONVERSATION, StoredTurn
from tiercel.values.errors import AdmissionError


class StoredConversation(StoredObject):
    """One conversation. Its turns are shared with the responses that were created in it."""

    __slots__ = ("created_at", "metadata", "turn")

    def __init__(self, id: str, created_at: int, metadata: Mapping[str, str], turn: StoredTurn | None) -> None:
        super().__init__(id)
        self.created_at = created_at
        self.metadata = metadata
        self.turn = turn

    @property
    def num_bytes(self) -> int:
        """Memory of the conversation without its turns."""
        return super().num_bytes + metadata_bytes(self.metadata)

    def parts(self) -> Iterator[StoredPart]:
        """Yield the last turn."""
        if self.turn is not None:
            yield self.turn

    def items(self) -> list[StoredItem]:
        """Return all items, the oldest first."""
        turns = [] if self.turn is None else list(self.turn.backwards())
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def with_metadata(self, metadata: Mapping[str, str]) -> "StoredConversation":
        """Return this conversation with other metadata."""
        return StoredConversation(self.id, self.created_at, metadata, self.turn)

    def with_items(self, items: Sequence[StoredItem]) -> "StoredConversation":
        """Return this conversation with more items."""
        if not items:
            return self
        return StoredConversation(self.id, self.created_at, self.metadata, StoredTurn(self.turn, items))

    def with_turn(self, turn: StoredTurn) -> "StoredConversation":
        """Return this conversation with a turn behind it. What others have added meanwhile stays."""
        last = turn if turn.parent is self.turn else StoredTurn(self.turn, turn.input, turn.output)
        return StoredConversation(self.id, self.created_at, self.metadata, last)

    def without_item(self, id: str) -> "StoredConversation":
        """Return this conversation without the items of an id. The turns before the first of them stay shared."""
        last: StoredTurn | None = None
        has_changed = False
        for turn in reversed([] if self.turn is None else list(self.turn.backwards())):
            has_changed = has_changed or any(item.id == id for item in (*turn.input, *turn.output))
            if not has_changed:
                last = turn
                continue
            input, output = ([item for item in items if item.id != id] for items in (turn.input, turn.output))
            if input or output:
                last = StoredTurn(last, input, output)
        return StoredConversation(self.id, self.created_at, self.metadata, last)

    def check(self, store: ObjectStore, field: str, *, more_items: int = 0) -> None:
        """Refuse a conversation that is too large to be kept. `more_items` are those of the request to come.

        Errors: AdmissionError (400 or 413) naming `field` and the limit.
        """
        length = (0 if self.turn is None else self.turn.length) + more_items
        if length > MAX_CONVERSATION:
            raise AdmissionError(
                400,
                f"{field}: a conversation has at most {MAX_CONVERSATION} items and turns. Please create another one"
                " with its latest items.",
                param=field,
            )
        size = self.num_bytes + (0 if self.turn is None else self.turn.whole_bytes)
        if size > store.object_bytes:
            raise AdmissionError(
                413,
                f"{field}: the conversation would take {size} bytes of memory; at most {store.object_bytes} are stored"
                " (--stored-response-tenant-bytes, --stored-response-bytes).",
                code="request_too_large",
                param=field,
            )

    def fits(self, store: ObjectStore) -> bool:
        """Return whether the store can have room for the conversation."""
        return self.num_bytes + (0 if self.turn is None else self.turn.whole_bytes) <= store.object_bytes


def find_conversation(store: ObjectStore, tenant: str, id: str, param: str) -> StoredConversation:
    """Return a conversation of a tenant. Errors: AdmissionError (404)."""
    found = store.get(tenant, StoredConversation, id)
    if found is None:
        raise AdmissionError(
            404,
            f"Conversation with id '{id[:128]}' not found. Conversations are kept in memory, for a limited time and"
            " number.",
            code="conversation_not_found",
            param=param,
        )
    return found
