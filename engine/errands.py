"""What takes longer than a step may: a reload of very many tenants, and the survey of how they stand."""

import logging
from collections.abc import Iterator
from itertools import chain

from tiercel.kvcache.manager import CacheManager
from tiercel.outcome import FairGauges
from tiercel.scheduler.book import SequenceBook
from tiercel.tenant import Tenants

log = logging.getLogger(__name__)

_AT_ONCE = 512  # tenants that are reloaded or surveyed within one step; more take several
_STANDING_EVERY_S = 1.0  # between two surveys
_OVER = object()


class Errands:
    """Work of the books that the loop does piece by piece, one piece a step."""

    def __init__(self, book: SequenceBook, cache: CacheManager) -> None:
        self._book = book
        self._cache = cache
        self._reload: Iterator[None] | None = None  # under way
        self._survey: Iterator[FairGauges | None] | None = None  # under way
        self._standing: FairGauges | None = None  # found out, to be told
        self._surveyed_s = 0.0
        self._has_ended = True  # no sequence was left when many tenants were last surveyed

    @property
    def has_standing(self) -> bool:
        """A survey is over and has not been told."""
        return self._standing is not None

    def go_on(self) -> bool:
        """Do one piece. Return True while there is more."""
        if self._reload is not None and next(self._reload, _OVER) is _OVER:
            self._reload = None
        if self._survey is not None:
            self._standing = next(self._survey)
            if self._standing is not None:
                self._survey = None
        return self._reload is not None or self._survey is not None

    def reload(self, tenants: Tenants, now_s: float) -> None:
        """Act on new weights, goals and quotas; of many tenants over several steps, tenant by tenant.

        A reload that is still under way is finished first: half of it would stay undone for ever.
        """
        self._reload = chain(self._reload or (), self._changing(tenants, now_s))
        if len(tenants.tenants) <= _AT_ONCE or not len(self._book):
            for _ in self._reload:
                pass
            self._reload = None

    def standing(self, now_s: float) -> FairGauges | None:
        """Return what the scheduler owes whom, once a second and when the last sequence has ended; None: nothing new.

        Of many tenants it is found out over several steps, and told with the next full report.
        """
        is_empty = not len(self._book)
        is_due = now_s - self._surveyed_s >= _STANDING_EVERY_S
        if self._book.num_tenants <= _AT_ONCE:
            if not is_due and not is_empty:
                return None
            self._surveyed_s = now_s
            return self._book.standing(now_s)
        is_end, self._has_ended = is_empty and not self._has_ended, is_empty
        if self._survey is None and (is_end or (is_due and not is_empty)):
            self._surveyed_s = now_s
            self._survey = self._book.standings(now_s)
        told, self._standing = self._standing, None
        return told

    def _changing(self, tenants: Tenants, now_s: float) -> Iterator[None]:
        yield from self._book.changing_tenants(tenants, now_s)
        yield from self._cache.changing_tenants(tenants)
        log.info("tenants set version=%d tenants=%d", tenants.version, len(tenants.tenants))
