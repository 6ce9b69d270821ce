"""Responses as they are stored, and the turns of their conversations."""

from collections.abc import Iterator, Sequence

from tiercel.server.api.object_store import StoredObject
from tiercel.server.api.schemas.fields import MAX_MESSAGES
from tiercel.server.api.stored_items import ITEM_BYTES, StoredItem, StoredPart, listed

TURN_BYTES = 256
"""Memory of one turn beside its items."""
REFERENCE_BYTES = 8
"""Memory of the place of an item in a turn."""


MAX_CONVERSATION = 4 * MAX_MESSAGES
"""Maximum number of stored items, and turns, of one conversation: thoughts, a text and calls are one message."""


class StoredTurn(StoredPart):
    """The items that one response has added to a conversation: those of the client, and the output.

    Turns and items are shared: a later turn refers to its parent, and two turns may refer to one item.
    """

    __slots__ = ("_asked_before", "input", "item_bytes", "length", "output", "parent")

    def __init__(
        self, parent: "StoredTurn | None", input: Sequence[StoredItem], output: Sequence[StoredItem] = ()
    ) -> None:
        super().__init__()
        self.parent = parent
        self.input = tuple(input)
        self.output = tuple(output)
        items = (*self.input, *self.output)
        self.length = 1 + len(items) + (0 if parent is None else parent.length)  # turns and items of the conversation
        self.item_bytes = sum(len(item.encoded) for item in items) + (0 if parent is None else parent.item_bytes)
        self._asked_before = None if parent is None else parent.first_asked

    @property
    def num_bytes(self) -> int:
        """Memory of the turn without its items and its parent."""
        return TURN_BYTES + REFERENCE_BYTES * (len(self.input) + len(self.output))

    @property
    def whole_bytes(self) -> int:
        """An upper bound of the memory of the turn, its items, and the turns before it."""
        return self.item_bytes + self.length * (ITEM_BYTES + REFERENCE_BYTES)

    @property
    def first_asked(self) -> "StoredTurn | None":
        """The first turn of the conversation with a message of the user; None if there is none."""
        if self._asked_before is not None:
            return self._asked_before
        return self if any(item.opens_turn for item in (*self.input, *self.output)) else None

    def parts(self) -> Iterator[StoredPart]:
        """Yield the items, and the turn before this one."""
        yield from self.input
        yield from self.output
        if self.parent is not None:
            yield self.parent

    def ended(self, output: Sequence[StoredItem]) -> "StoredTurn":
        """Return this turn with its output."""
        return StoredTurn(self.parent, self.input, output)

    def backwards(self) -> Iterator["StoredTurn"]:
        """Yield this turn and those before it, the latest first."""
        turn: StoredTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


class StoredResponse(StoredObject):
    """One stored response: the JSON of its body around the place of the output, and its turn of the conversation."""

    __slots__ = ("after", "before", "is_in_background", "is_over", "turn")

    def __init__(
        self,
        id: str,
        before: bytes,
        after: bytes,
        turn: StoredTurn,
        *,
        is_over: bool,
        is_in_background: bool = False,
    ) -> None:
        super().__init__(id)
        self.before = before
        self.after = after
        self.turn = turn
        self.is_over = is_over
        self.is_in_background = is_in_background

    @property
    def num_bytes(self) -> int:
        """The memory of the response without its turn."""
        return len(self.before) + len(self.after) + super().num_bytes

    def parts(self) -> Iterator[StoredPart]:
        """Yield the turn."""
        yield self.turn

    def body(self) -> Iterator[bytes]:
        """Yield the JSON of the response, piece by piece."""
        yield self.before
        yield from listed(self.turn.output)
        yield self.after

    @property
    def read_parts(self) -> tuple[StoredPart, ...]:
        """The parts that `body` reads."""
        return (self, *self.turn.output)
