"""The stored responses of all tenants: in memory, bounded, and lost at a restart.

Memory is counted as the bytes of what is kept and a fixed amount for each object. Beyond a limit, the least recently
used responses are forgotten, those of the tenant itself first.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from tiercel.clock import Clock

ENTRY_BYTES = 1024
"""Memory of one stored response beside its bytes: objects, ids, and its places in the books."""
ITEM_BYTES = 256
"""Memory of the index of one item."""


class StoreLimits(Struct, frozen=True, kw_only=True):
    """The limits of stored responses."""

    tenant_responses: int  # of one tenant; 0: nothing is stored
    tenant_bytes: int
    total_bytes: int
    lifetime_s: float  # after the last use


class ConversationTurn:
    """The items that one response has added to a conversation. Turns are shared: a later turn refers to its parent."""

    __slots__ = ("input", "item_ids", "num_bytes", "output", "parent", "uses")

    def __init__(self, parent: "ConversationTurn | None", input: bytes, output: bytes) -> None:
        """`input` and `output` are lists of items as JSON, each item with an id."""
        self.parent = parent
        self.input = input
        self.output = output
        self.item_ids = tuple(str(item["id"]) for item in self.items())
        self.num_bytes = len(input) + len(output) + ITEM_BYTES * len(self.item_ids)
        self.uses = 0  # stored responses and stored turns that refer to this one

    @staticmethod
    def begin(parent: "ConversationTurn | None", items: Sequence[Mapping[str, object]]) -> "ConversationTurn":
        """Return a turn with the items of the client and no output yet."""
        return ConversationTurn(parent, msgspec.json.encode(items), b"[]")

    def ended(self, output: bytes) -> "ConversationTurn":
        """Return this turn with its output."""
        return ConversationTurn(self.parent, self.input, output)

    def items(self) -> list[dict[str, object]]:
        """Return the items of this turn alone, those of the client first."""
        return [*self.input_items(), *_decoded(self.output)]

    def input_items(self) -> list[dict[str, object]]:
        """Return the items that the client sent."""
        return _decoded(self.input)

    def conversation(self) -> list[dict[str, object]]:
        """Return the items of all turns up to this one."""
        turns: list[ConversationTurn] = []
        turn: ConversationTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return [item for turn in reversed(turns) for item in turn.items()]


def _decoded(items: bytes) -> list[dict[str, object]]:
    return cast(list[dict[str, object]], msgspec.json.decode(items))


class StoredResponse:
    """One stored response: the JSON of its body around the place of the output, and its turn of the conversation."""

    __slots__ = ("after", "before", "id", "is_in_background", "is_over", "turn", "used_s")

    def __init__(
        self,
        id: str,
        before: bytes,
        after: bytes,
        turn: ConversationTurn,
        *,
        is_over: bool,
        is_in_background: bool = False,
    ) -> None:
        self.id = id
        self.before = before
        self.after = after
        self.turn = turn
        self.is_over = is_over
        self.is_in_background = is_in_background
        self.used_s = 0.0

    @property
    def num_bytes(self) -> int:
        """The memory of the response without its turn."""
        return len(self.before) + len(self.after) + ENTRY_BYTES

    @property
    def body(self) -> bytes:
        """The JSON of the response."""
        return self.before + self.turn.output + self.after


class _Shelf:
    """The responses of one tenant, the least recently used first."""

    __slots__ = ("entries", "num_bytes", "turn_by_item")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.turn_by_item: dict[str, ConversationTurn] = {}
        self.num_bytes = 0

    def add(self, entry: StoredResponse) -> None:
        self.entries[entry.id] = entry
        self.num_bytes += entry.num_bytes
        turn: ConversationTurn | None = entry.turn
        while turn is not None:
            turn.uses += 1
            if turn.uses > 1:
                return
            self.num_bytes += turn.num_bytes
            self.turn_by_item.update(dict.fromkeys(turn.item_ids, turn))
            turn = turn.parent

    def remove(self, id: str) -> None:
        entry = self.entries.pop(id)
        self.num_bytes -= entry.num_bytes
        turn: ConversationTurn | None = entry.turn
        while turn is not None:
            turn.uses -= 1
            if turn.uses:
                return
            self.num_bytes -= turn.num_bytes
            for item in turn.item_ids:
                if self.turn_by_item.get(item) is turn:
                    del self.turn_by_item[item]
            turn = turn.parent


class ResponseStore:
    """The stored responses of all tenants. A response is found by its own tenant only."""

    def __init__(self, limits: Callable[[], StoreLimits], clock: Clock, on_evicted: Callable[[str, int], None]) -> None:
        """`on_evicted` is called with a reason, `expired` or `full`, and a number of responses."""
        self._limits = limits
        self._clock = clock
        self._on_evicted = on_evicted
        self._shelves: dict[str, _Shelf] = {}
        self.num_responses = 0  # of all tenants; numbers, because a scrape reads them in another thread
        self.num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether responses are stored at all."""
        return self._limits().tenant_responses > 0

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """Return a response of a tenant and count this as a use; None if it is not there."""
        self._expire()
        shelf = self._shelves.get(tenant)
        entry = None if shelf is None else shelf.entries.get(id)
        if shelf is not None and entry is not None:
            entry.used_s = self._clock.now_s()
            shelf.entries.move_to_end(id)
        return entry

    def item(self, tenant: str, id: str) -> dict[str, object] | None:
        """Return a stored item of a tenant; None if it is not there."""
        self._expire()
        shelf = self._shelves.get(tenant)
        turn = None if shelf is None else shelf.turn_by_item.get(id)
        return None if turn is None else next(item for item in turn.items() if item["id"] == id)

    def put(self, tenant: str, entry: StoredResponse) -> None:
        """Store a response, in place of the one with its id. Others may be forgotten for it, or it may itself."""
        if not self.keeps_any:
            return
        self._expire()
        shelf = self._shelves.setdefault(tenant, _Shelf())
        entry.used_s = self._clock.now_s()
        with self._counted(shelf):
            if entry.id in shelf.entries:
                shelf.remove(entry.id)
            shelf.add(entry)
        self._shrink(tenant)

    def remove(self, tenant: str, id: str) -> bool:
        """Forget a response. Return whether it was there."""
        shelf = self._shelves.get(tenant)
        if shelf is None or id not in shelf.entries:
            return False
        self._remove(tenant, id)
        return True

    def check_integrity(self) -> None:
        """Compare the counts with what is there. Errors: AssertionError."""
        for shelf in self._shelves.values():
            assert shelf.entries
            uses: dict[ConversationTurn, int] = {}
            for entry in shelf.entries.values():
                turn: ConversationTurn | None = entry.turn
                while turn is not None:
                    uses[turn] = uses.get(turn, 0) + 1
                    turn = turn.parent if uses[turn] == 1 else None
            assert {turn: turn.uses for turn in uses} == uses
            own = sum(entry.num_bytes for entry in shelf.entries.values())
            assert shelf.num_bytes == own + sum(turn.num_bytes for turn in uses)
            assert set(shelf.turn_by_item.values()) <= set(uses)
        assert self.num_responses == sum(len(shelf.entries) for shelf in self._shelves.values())
        assert self.num_bytes == sum(shelf.num_bytes for shelf in self._shelves.values())

    @contextlib.contextmanager
    def _counted(self, shelf: _Shelf) -> Generator[None]:
        """Count what the block changes on a shelf."""
        responses, size = len(shelf.entries), shelf.num_bytes
        yield
        self.num_responses += len(shelf.entries) - responses
        self.num_bytes += shelf.num_bytes - size

    def _remove(self, tenant: str, id: str) -> None:
        shelf = self._shelves[tenant]
        with self._counted(shelf):
            shelf.remove(id)
        if not shelf.entries:
            del self._shelves[tenant]

    def _expire(self) -> None:
        """Forget what has not been used for its lifetime."""
        limit_s = self._clock.now_s() - self._limits().lifetime_s
        for tenant in list(self._shelves):
            expired = list(_until(self._shelves[tenant].entries.values(), limit_s))
            for id in expired:
                self._remove(tenant, id)
            if expired:
                self._on_evicted("expired", len(expired))

    def _shrink(self, tenant: str) -> None:
        """Forget responses of `tenant` until its limits hold, then of the largest tenants until that of all holds."""
        limits, evicted = self._limits(), 0
        while (shelf := self._shelves.get(tenant)) is not None and (
            len(shelf.entries) > limits.tenant_responses or shelf.num_bytes > limits.tenant_bytes
        ):
            self._remove(tenant, next(iter(shelf.entries)))
            evicted += 1
        while self.num_bytes > limits.total_bytes:
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self._remove(largest, next(iter(self._shelves[largest].entries)))
            evicted += 1
        if evicted:
            self._on_evicted("full", evicted)


def _until(entries: Iterable[StoredResponse], limit_s: float) -> Iterator[str]:
    """Yield the ids of the first entries that were last used before a time."""
    for entry in entries:
        if entry.used_s > limit_s:
            return
        yield entry.id
