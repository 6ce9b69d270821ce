"""Act on new settings of tenants, over several steps where there are many tenants. Imports no torch."""

import logging
from collections.abc import Iterator
from itertools import chain

from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.values.tenant import Tenants

log = logging.getLogger(__name__)

_MAX_TENANTS_PER_STEP = 512
_END = object()


class TenantReload:
    """The change of weights, goals and quotas in the books of the scheduler and of the cache."""

    def __init__(self, book: SequenceBook, cache: CacheManager) -> None:
        self._book = book
        self._cache = cache
        self._pending: Iterator[None] | None = None  # the part of the reload that has not been done

    def start(self, tenants: Tenants, now_s: float) -> None:
        """Begin a reload; finish it at once if there are few tenants or no sequences.

        A reload that is still in progress is finished before the new one, otherwise a part of it would never be done.
        """
        self._pending = chain(self._pending or (), self._changes(tenants, now_s))
        if len(tenants.tenants) <= _MAX_TENANTS_PER_STEP or not len(self._book):
            for _ in self._pending:
                pass
            self._pending = None

    def go_on(self) -> bool:
        """Do the next part of a reload. Return True while more is left."""
        if self._pending is not None and next(self._pending, _END) is _END:
            self._pending = None
        return self._pending is not None

    def _changes(self, tenants: Tenants, now_s: float) -> Iterator[None]:
        yield from self._book.changing_tenants(tenants, now_s)
        yield from self._cache.changing_tenants(tenants)
        log.info("tenants set version=%d tenants=%d", tenants.version, len(tenants.tenants))
