"""Items that tenants store, each encoded by itself, and the books of one tenant that count them.

The store counts parts. A response refers to a turn; a turn refers to its items and to the turn before it. The memory of
a part is counted once, however many parts refer to it, until neither a part nor a reader needs it any more.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import msgspec

from tiercel.values.errors import InvariantError

Item = Mapping[str, object]
"""An item as it is stored and listed: an object of JSON with `type` and `id`."""

ITEM_BYTES = 400
"""Memory of a stored item beside its JSON: the objects, the id, and its places in the books."""
_OBJECT_BYTES = 256  # of a decoded object beside its texts
_MAX_LETTER_BYTES = 4  # Python keeps a text with four bytes for each character if one of them needs them


class StoredPart:
    """Anything that is stored. `uses` is written by the books of its tenant alone."""

    __slots__ = ("uses",)

    def __init__(self) -> None:
        self.uses = 0  # stored parts that refer to this one, and places in the books

    @property
    def num_bytes(self) -> int:
        """Memory of this part without those that it refers to."""
        raise NotImplementedError

    def parts(self) -> Iterator["StoredPart"]:
        """Yield the parts that this one refers to, one as often as it does."""
        return iter(())


class StoredItem(StoredPart):
    """One item as JSON. `opens_turn`: it is a message of the user, with which a turn of the conversation begins.

    `num_letters`: the characters of its texts, or fewer; it tells without decoding that an item is too long.
    """

    __slots__ = ("decoded_bytes", "encoded", "id", "num_letters", "opens_turn")

    def __init__(self, id: str, encoded: bytes, *, opens_turn: bool, num_letters: int = 0) -> None:
        super().__init__()
        self.id = id
        self.encoded = encoded
        self.opens_turn = opens_turn
        self.num_letters = num_letters
        letter_bytes = 1 if encoded.isascii() else _MAX_LETTER_BYTES
        self.decoded_bytes = len(encoded) * letter_bytes + encoded.count(b"{") * _OBJECT_BYTES

    @property
    def num_bytes(self) -> int:
        """Memory of the item."""
        return len(self.encoded) + ITEM_BYTES


def encode_item(item: Item) -> StoredItem:
    """Return an item, which has an id, as it is stored."""
    opens_turn = item.get("type") == "message" and item.get("role") == "user"
    return StoredItem(str(item["id"]), msgspec.json.encode(item), opens_turn=opens_turn, num_letters=_num_letters(item))


def _num_letters(item: Item) -> int:
    """Return the number of characters of an item that certainly are in the messages made of it."""
    parts = item.get("content") if item["type"] in ("message", "reasoning") else None
    if not isinstance(parts, list):
        return 0
    texts = [cast(Item, part).get("text") for part in cast(list[object], parts) if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))


def decode_item(item: StoredItem) -> Item:
    """Return an item as an object. For workers only: the size of an item is limited by that of a body alone.

    Errors: InvariantError in the thread of an event loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return cast(Item, msgspec.json.decode(item.encoded))
    raise InvariantError("stored_items.decoded_on_event_loop", item=item.id)


def listed(items: Iterable[StoredItem]) -> Iterator[bytes]:
    """Yield the JSON of a list of items, piece by piece, without decoding any."""
    yield b"["
    is_first = True
    for item in items:
        if not is_first:
            yield b","
        yield item.encoded
        is_first = False
    yield b"]"


class PartBooks:
    """The parts that one tenant stores: their memory, and the items by id."""

    __slots__ = ("_item_by_id", "_readers", "num_bytes")

    def __init__(self) -> None:
        self._item_by_id: dict[str, StoredItem] = {}
        self._readers: Counter[StoredPart] = Counter()
        self.num_bytes = 0  # of all parts that are used or read

    def item(self, id: str) -> StoredItem | None:
        """Return the item with an id; None if none is stored. If several have it, the one stored last counts."""
        return self._item_by_id.get(id)

    def use(self, part: StoredPart) -> None:
        """Count one more use of a part, and with its first use those of its parts."""
        waiting = [part]
        while waiting:
            one = waiting.pop()
            one.uses += 1
            if one.uses > 1:
                continue
            if one not in self._readers:
                self.num_bytes += one.num_bytes
            if isinstance(one, StoredItem):
                self._item_by_id[one.id] = one
            waiting += one.parts()

    def drop(self, part: StoredPart) -> None:
        """Count one use of a part less, and with its last use those of its parts."""
        waiting = [part]
        while waiting:
            one = waiting.pop()
            one.uses -= 1
            if one.uses:
                continue
            if one not in self._readers:
                self.num_bytes -= one.num_bytes
            if isinstance(one, StoredItem) and self._item_by_id.get(one.id) is one:
                del self._item_by_id[one.id]
            waiting += one.parts()

    def read(self, parts: Iterable[StoredPart]) -> None:
        """Count a reader of these parts alone: they stay counted until `read_off`, also when they are used no more."""
        for part in parts:
            self._readers[part] += 1
            if self._readers[part] == 1 and not part.uses:
                self.num_bytes += part.num_bytes

    def read_off(self, parts: Iterable[StoredPart]) -> None:
        """Count a reader of these parts less."""
        for part in parts:
            self._readers[part] -= 1
            if self._readers[part]:
                continue
            del self._readers[part]
            if not part.uses:
                self.num_bytes -= part.num_bytes

    def check_integrity(self, roots: Iterable[StoredPart]) -> None:
        """Compare the books with the parts below `roots`, if nothing else is used. Errors: AssertionError."""
        uses: dict[StoredPart, int] = {}
        waiting = list(roots)
        while waiting:
            one = waiting.pop()
            uses[one] = uses.get(one, 0) + 1
            if uses[one] == 1:
                waiting += one.parts()
        assert {part: part.uses for part in uses} == uses
        assert self.num_bytes == sum(part.num_bytes for part in uses.keys() | self._readers.keys())
        assert set(self._item_by_id.values()) <= set(uses)
