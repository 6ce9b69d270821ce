"""The stored responses of all tenants: in memory, bounded, and lost at a restart.

Memory is counted as the bytes of what is kept and a fixed amount for each object. Beyond a limit, the least recently
used responses are forgotten, those of the tenant itself first. What is still read, or was referred to by a request that
is being prepared, is counted until that has ended, even if it is forgotten meanwhile.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from msgspec import Struct

from tiercel.clock import Clock
from tiercel.server.api.hold import Hold
from tiercel.server.api.stored_items import PartBooks, StoredItem, StoredPart, listed

ENTRY_BYTES = 1024
"""Memory of one stored response beside its bytes: objects, ids, and its places in the books."""
TURN_BYTES = 256
"""Memory of one turn beside its items."""
REFERENCE_BYTES = 8
"""Memory of the place of an item in a turn."""


class StoreLimits(Struct, frozen=True, kw_only=True):
    """The limits of stored responses."""

    tenant_responses: int  # of one tenant; 0: nothing is stored
    tenant_bytes: int
    total_bytes: int
    lifetime_s: float  # after the last use


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


class StoredResponse(StoredPart):
    """One stored response: the JSON of its body around the place of the output, and its turn of the conversation."""

    __slots__ = ("after", "before", "id", "is_in_background", "is_over", "turn", "used_s")

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
        super().__init__()
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


class _Shelf:
    """The responses of one tenant, the least recently used first, and the books of their parts."""

    __slots__ = ("books", "entries")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.books = PartBooks()

    def add(self, entry: StoredResponse) -> None:
        before = self.entries.pop(entry.id, None)
        self.entries[entry.id] = entry
        self.books.use(entry)  # first, so that what both have stays where it is
        if before is not None:
            self.books.drop(before)

    def remove(self, id: str) -> None:
        self.books.drop(self.entries.pop(id))


class ResponseStore:
    """The stored responses of all tenants. A response is found by its own tenant only.

    All methods are called on the event loop; none decodes an item.
    """

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

    def item(self, tenant: str, id: str) -> StoredItem | None:
        """Return a stored item of a tenant; None if it is not there."""
        self._expire()
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.books.item(id)

    def put(self, tenant: str, entry: StoredResponse) -> None:
        """Store a response, in place of the one with its id. Others may be forgotten for it, or it may itself."""
        if not self.keeps_any:
            return
        self._expire()
        entry.used_s = self._clock.now_s()
        with self._changed(tenant) as shelf:
            shelf.add(entry)
        self._shrink(tenant)

    def remove(self, tenant: str, id: str) -> bool:
        """Forget a response. Return whether it was there."""
        shelf = self._shelves.get(tenant)
        if shelf is None or id not in shelf.entries:
            return False
        self._remove(tenant, id)
        return True

    def use(self, tenant: str, parts: Sequence[StoredPart]) -> Hold:
        """Keep parts of a tenant, and all that they refer to, as if they were stored once more."""
        with self._changed(tenant) as shelf:
            for part in parts:
                shelf.books.use(part)

        def release() -> None:
            with self._changed(tenant) as shelf:
                for part in parts:
                    shelf.books.drop(part)

        return Hold(release)

    def read(self, tenant: str, parts: Sequence[StoredPart]) -> Hold:
        """Keep the bytes of parts of a tenant counted. Parts that are forgotten meanwhile are not found any more."""
        with self._changed(tenant) as shelf:
            shelf.books.read(parts)

        def release() -> None:
            with self._changed(tenant) as shelf:
                shelf.books.read_off(parts)

        return Hold(release)

    def check_integrity(self) -> None:
        """Compare the counts with what is there, while no request uses parts. Errors: AssertionError."""
        for shelf in self._shelves.values():
            assert shelf.entries or shelf.books.num_bytes
            shelf.books.check_integrity(shelf.entries.values())
        assert self.num_responses == sum(len(shelf.entries) for shelf in self._shelves.values())
        assert self.num_bytes == sum(shelf.books.num_bytes for shelf in self._shelves.values())

    @contextlib.contextmanager
    def _changed(self, tenant: str) -> Generator[_Shelf]:
        """Yield the shelf of a tenant, and count what the block changes. A shelf exists while it has something."""
        shelf = self._shelves.setdefault(tenant, _Shelf())
        responses, size = len(shelf.entries), shelf.books.num_bytes
        yield shelf
        self.num_responses += len(shelf.entries) - responses
        self.num_bytes += shelf.books.num_bytes - size
        if not shelf.entries and not shelf.books.num_bytes:
            del self._shelves[tenant]

    def _remove(self, tenant: str, id: str) -> None:
        with self._changed(tenant) as shelf:
            shelf.remove(id)

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
        """Forget responses of `tenant` until its limits hold, then of the largest tenants until that of all holds.

        What is held stays, so that nothing may be left to forget before a limit holds.
        """
        limits, evicted = self._limits(), 0
        while (
            (shelf := self._shelves.get(tenant)) is not None
            and shelf.entries
            and (len(shelf.entries) > limits.tenant_responses or shelf.books.num_bytes > limits.tenant_bytes)
        ):
            self._remove(tenant, next(iter(shelf.entries)))
            evicted += 1
        while self.num_bytes > limits.total_bytes:
            stocked = [name for name, shelf in self._shelves.items() if shelf.entries]
            if not stocked:
                break
            largest = max(stocked, key=lambda name: self._shelves[name].books.num_bytes)
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
