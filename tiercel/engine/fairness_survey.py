"""Collect the fairness gauges of all tenants, over several steps where there are many. Imports no torch."""

from collections.abc import Iterator

from tiercel.scheduler.book import SequenceBook
from tiercel.values.outcome import FairGauges

_MAX_TENANTS_PER_STEP = 512
_INTERVAL_S = 1.0  # between two surveys


class FairnessSurvey:
    """Asks the scheduler once a second how much service each tenant is owed."""

    def __init__(self, book: SequenceBook) -> None:
        self._book = book
        self._pending: Iterator[FairGauges | None] | None = None  # a survey in progress
        self._result: FairGauges | None = None  # of a finished survey that has not been reported
        self._started_s = 0.0
        self._was_empty = True  # no sequence was left when many tenants were last surveyed

    @property
    def has_result(self) -> bool:
        """Whether a survey has ended that `take` has not returned yet."""
        return self._result is not None

    def go_on(self) -> bool:
        """Do the next part of a survey. Return True while more is left."""
        if self._pending is not None:
            self._result = next(self._pending)
            if self._result is not None:
                self._pending = None
        return self._pending is not None

    def take(self, now_s: float) -> FairGauges | None:
        """Return the gauges once a second and when the last sequence has ended; None if nothing is new.

        With few tenants the survey is made here. With many it is started here, continued by `go_on` over several
        steps, and returned by a later call.
        """
        is_empty = not len(self._book)
        is_due = now_s - self._started_s >= _INTERVAL_S
        if self._book.num_tenants <= _MAX_TENANTS_PER_STEP:
            if not is_due and not is_empty:
                return None
            self._started_s = now_s
            return self._book.fair_gauges(now_s)
        has_just_emptied, self._was_empty = is_empty and not self._was_empty, is_empty
        if self._pending is None and (has_just_emptied or (is_due and not is_empty)):
            self._started_s = now_s
            self._pending = self._book.survey(now_s)
        result, self._result = self._result, None
        return result
