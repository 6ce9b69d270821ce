"""The responses, chat completions and conversations that tenants store: in memory, bounded, and lost at a restart.

Memory is counted as the bytes of what is kept and a fixed amount for each object. Beyond a limit, the least recently
used objects are forgotten, those of the tenant itself first. What is still read, or was referred to by a request that
is being prepared, is counted until that has ended, even if it is forgotten meanwhile.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from msgspec import Struct

from tiercel.server.api.hold import Hold
from tiercel.server.api.stored_items import PartBooks, StoredItem, StoredPart
from tiercel.values.clock import Clock

ENTRY_BYTES = 1024
"""Memory of one stored object beside its bytes: objects, ids, and its places in the books."""


class StoreLimits(Struct, frozen=True, kw_only=True):
    """The limits of stored objects of all kinds together."""

    tenant_objects: int  # of one tenant; 0: nothing is stored
    tenant_bytes: int
    total_bytes: int
    lifetime_s: float  # after the last use


class StoredObject(StoredPart):
    """Anything that a tenant stores under an id. `used_s` is written by the store alone."""

    __slots__ = ("id", "used_s")

    def __init__(self, id: str) -> None:
        super().__init__()
        self.id = id
        self.used_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Memory beside what is particular to the kind."""
        return ENTRY_BYTES


StoredKind = TypeVar("StoredKind", bound=StoredObject)


class _Shelf:
    """The objects of one tenant, the least recently used first, and the books of their parts."""

    __slots__ = ("_by_kind", "books", "entries")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredObject] = OrderedDict()
        self._by_kind: dict[type[StoredObject], dict[str, StoredObject]] = {}  # in the order of their creation
        self.books = PartBooks()

    def add(self, entry: StoredObject) -> None:
        before = self.entries.pop(entry.id, None)
        self.entries[entry.id] = entry
        self._by_kind.setdefault(type(entry), {})[entry.id] = entry  # a later state keeps the place of the first one
        self.books.use(entry)  # first, so that what both have stays where it is
        if before is not None:
            self.books.drop(before)

    def remove(self, id: str) -> None:
        entry = self.entries.pop(id)
        del self._by_kind[type(entry)][id]
        self.books.drop(entry)

    def of_kind(self, kind: type[StoredObject]) -> list[StoredObject]:
        return list(self._by_kind.get(kind, {}).values())


class ObjectStore:
    """The stored objects of all tenants. An object is found by its own tenant only.

    All methods are called on the event loop; none decodes an item.
    """

    def __init__(self, limits: Callable[[], StoreLimits], clock: Clock, on_evicted: Callable[[str, int], None]) -> None:
        """`on_evicted` is called with a reason, `expired` or `full`, and a number of objects."""
        self._limits = limits
        self._clock = clock
        self._on_evicted = on_evicted
        self._shelves: dict[str, _Shelf] = {}
        self.num_objects = 0  # of all tenants; numbers, because a scrape reads them in another thread
        self.num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether anything is stored at all."""
        return self._limits().tenant_objects > 0

    @property
    def object_bytes(self) -> int:
        """The most memory that one object may have without being forgotten at once."""
        limits = self._limits()
        return min(limits.tenant_bytes, limits.total_bytes)

    def get(self, tenant: str, kind: type[StoredKind], id: str) -> StoredKind | None:
        """Return an object of a tenant and count this as a use; None if it is not there."""
        self._expire()
        shelf = self._shelves.get(tenant)
        entry = None if shelf is None else shelf.entries.get(id)
        if shelf is None or not isinstance(entry, kind):
            return None
        entry.used_s = self._clock.now_s()
        shelf.entries.move_to_end(id)
        return entry

    def of(self, tenant: str, kind: type[StoredKind]) -> list[StoredKind]:
        """Return the objects of one kind that a tenant has, the oldest first. This is no use of them."""
        self._expire()
        shelf = self._shelves.get(tenant)
        return [] if shelf is None else cast(list[StoredKind], shelf.of_kind(kind))

    def item(self, tenant: str, id: str) -> StoredItem | None:
        """Return a stored item of a tenant; None if it is not there."""
        self._expire()
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.books.item(id)

    def put(self, tenant: str, entry: StoredObject) -> None:
        """Store an object, in place of the one with its id. Others may be forgotten for it, or it may itself."""
        if not self.keeps_any:
            return
        self._expire()
        entry.used_s = self._clock.now_s()
        with self._changed(tenant) as shelf:
            shelf.add(entry)
        self._shrink(tenant)

    def remove(self, tenant: str, kind: type[StoredObject], id: str) -> bool:
        """Forget an object. Return whether it was there."""
        shelf = self._shelves.get(tenant)
        if shelf is None or not isinstance(shelf.entries.get(id), kind):
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
        assert self.num_objects == sum(len(shelf.entries) for shelf in self._shelves.values())
        assert self.num_bytes == sum(shelf.books.num_bytes for shelf in self._shelves.values())

    @contextlib.contextmanager
    def _changed(self, tenant: str) -> Generator[_Shelf]:
        """Yield the shelf of a tenant, and count what the block changes. A shelf exists while it has something."""
        shelf = self._shelves.setdefault(tenant, _Shelf())
        count, size = len(shelf.entries), shelf.books.num_bytes
        yield shelf
        self.num_objects += len(shelf.entries) - count
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
        """Forget objects of `tenant` until its limits hold, then of the largest tenants until that of all holds.

        What is held stays, so that nothing may be left to forget before a limit holds.
        """
        limits, evicted = self._limits(), 0
        while (
            (shelf := self._shelves.get(tenant)) is not None
            and shelf.entries
            and (len(shelf.entries) > limits.tenant_objects or shelf.books.num_bytes > limits.tenant_bytes)
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


def _until(entries: Iterable[StoredObject], limit_s: float) -> Iterator[str]:
    """Yield the ids of the first entries that were last used before a time."""
    for entry in entries:
        if entry.used_s > limit_s:
            return
        yield entry.id
