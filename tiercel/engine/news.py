"""News of an engine for the fronts of a fleet, between its reports. Imports no torch."""

from collections.abc import Callable, Mapping

from tiercel.engine.progress import Outbox
from tiercel.kvcache.key_news import KeyNews
from tiercel.values.clock import Clock
from tiercel.values.ids import TenantId
from tiercel.wire.fleet_frames import pack_heads
from tiercel.wire.frames import EngineNews

NEWS_S = 0.25
"""The least time between two news: a front finds a prefix so late, and balances tenants on service so old."""


class NewsTeller:
    """Posts the keys that the tiers have stored and dropped, and the service that tenants have had.

    News are due after every step, and are empty if it changed nothing: fronts wait for them to know what was stored.
    """

    def __init__(
        self,
        keys: KeyNews,
        served_ms: Callable[[], Mapping[TenantId, float]],
        num_steps: Callable[[], int],
        post: Outbox,
        clock: Clock,
    ) -> None:
        """`served_ms`: returns the service of each tenant since the start, in milliseconds of the device.

        `num_steps`: returns the number of steps committed since the start.
        """
        self._keys = keys
        self._served_ms = served_ms
        self._num_steps = num_steps
        self._post = post
        self._clock = clock
        self._told_s = float("-inf")
        self._told_ms: dict[TenantId, float] = {}
        self._told_steps = 0

    def tend(self) -> None:
        """Post what has changed, if enough time has passed. Cost: O(tenants and changed keys), each `NEWS_S`."""
        now_s = self._clock.now_s()
        if now_s - self._told_s < NEWS_S:
            return
        self._told_s = now_s
        changes, steps = self._keys.take(), self._num_steps()
        totals_ms, told_ms = self._served_ms(), self._told_ms
        served = {
            tenant: ms - told_ms.get(tenant, 0.0) for tenant, ms in totals_ms.items() if ms != told_ms.get(tenant, 0.0)
        }
        if changes.stored or changes.dropped or served or steps != self._told_steps:
            self._told_ms, self._told_steps = dict(totals_ms), steps
            self._post.post(
                EngineNews(stored=pack_heads(changes.stored), dropped=pack_heads(changes.dropped), served_ms=served)
            )
