"""The enforcement of the time limits of one request, from its arrival to the end of its answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from tiercel.server.api.deadline import Deadline
from tiercel.server.api.stream import ended_early
from tiercel.server.client.alarm import Alarm
from tiercel.server.client.generation import Generation
from tiercel.server.tracing.record import RequestRecord
from tiercel.values.clock import Clock

T = TypeVar("T")


class TimeoutCounter(Protocol):
    """The counter of passed time limits; see `metrics`."""

    def on_timeout(self, limit: str, *, has_tokens: bool) -> None: ...


class TimeLimits:
    """The deadline of a request and its limit in the queue, as times in this process.

    The engine knows neither, so that its restart extends none.
    """

    def __init__(
        self,
        deadline: Deadline | None,
        queue_limit: Deadline | None,
        clock: Clock,
        counter: TimeoutCounter,
        drain_s: Callable[[], float],  # see `Deadline.end`
    ) -> None:
        self._deadline = deadline
        self._queue_limit = queue_limit
        self._clock = clock
        self._counter = counter
        self._drain_s = drain_s

    async def prepare(self, work: Awaitable[T], record: RequestRecord) -> T:
        """Return the result of `work`, which precedes the submission.

        Errors: AdmissionError (503 or 504) at the earlier limit, and those of `work`.
        """
        limits = [limit for limit in (self._deadline, self._queue_limit) if limit is not None]
        if not limits:
            return await work
        limit = min(limits, key=lambda limit: limit.at_s)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                with Alarm(self._clock, limit.at_s, lambda: scope.reschedule(0.0)):
                    return await work
        except TimeoutError as exc:
            if not scope.expired():
                raise
            record.outcome = "timeout"
            self._counter.on_timeout(limit.limit, has_tokens=False)
            raise ended_early(limit.end(self._drain_s())) from exc

    def watch(self, generation: Generation) -> None:
        """End the generation at its limits. To be called when it has been submitted."""
        if self._deadline is not None:
            generation.call_at(self._deadline.at_s, lambda: self._expire(generation))
        if self._queue_limit is not None:
            limit = self._queue_limit
            generation.call_at(limit.at_s, lambda: generation.expire_queued(limit.end(self._drain_s())))

    def _expire(self, generation: Generation) -> None:
        deadline = self._deadline
        assert deadline is not None
        self._counter.on_timeout(deadline.limit, has_tokens=generation.has_tokens)
        generation.expire(deadline.end(self._drain_s()), keeps_text=deadline.keeps_text)
