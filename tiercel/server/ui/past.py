"""The last ten minutes of the server in a few sums, so that the charts of the page do not begin when it is opened."""

import asyncio
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from tiercel.server.api.context import ServerContext
from tiercel.server.ui.snapshot import PastHistogram, PastSnapshot, PastWork

PERIOD_S = 2.0
KEPT_S = 600.0


class _PastSample(Struct, frozen=True, gc=False):
    """The sums of one moment."""

    at_s: float
    running: int
    waiting: int
    preempted: int
    prompt_tokens: int
    generation_tokens: int
    first_token: tuple[int, ...]  # values up to each bound, and all
    gap: tuple[int, ...]


class ServerPast:
    """One sample every `PERIOD_S`, of the last `KEPT_S`: about 300 KB at most. Nothing of it names a tenant."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._samples: deque[_PastSample] = deque(maxlen=int(KEPT_S / PERIOD_S))
        self._first_token_bounds: tuple[float, ...] = ()
        self._gap_bounds: tuple[float, ...] = ()

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(PERIOD_S)

    def take(self) -> None:
        """Add a sample of this moment; the oldest one is dropped."""
        gauges, work = self._context.client.gauges, self._context.metrics.sample()
        self._first_token_bounds, first_token = _parted(work.first_token)
        self._gap_bounds, gap = _parted(work.gap)
        self._samples.append(
            _PastSample(
                at_s=round(self._context.clock.now_s(), 3),
                running=gauges.num_running,
                waiting=gauges.num_waiting,
                preempted=gauges.num_preempted,
                prompt_tokens=work.prompt_tokens,
                generation_tokens=work.generation_tokens,
                first_token=first_token,
                gap=gap,
            )
        )

    def snapshot(self, *, is_operator: bool) -> PastSnapshot:
        """Return the samples, oldest first. Sums of all tenants are the operator's; others see the queue."""
        kept = self._samples
        return PastSnapshot(
            at_s=[one.at_s for one in kept],
            running=[one.running for one in kept],
            waiting=[one.waiting for one in kept],
            preempted=[one.preempted for one in kept],
            work=self._work() if is_operator else None,
        )

    def _work(self) -> PastWork:
        kept = self._samples
        return PastWork(
            prompt_tokens=[one.prompt_tokens for one in kept],
            generation_tokens=[one.generation_tokens for one in kept],
            first_token=PastHistogram(self._first_token_bounds, [one.first_token for one in kept]),
            gap=PastHistogram(self._gap_bounds, [one.gap for one in kept]),
        )


def _parted(below: Sequence[tuple[float, int]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the bounds without the last, which is infinite, and the counts; both empty before the engine is ready."""
    return tuple(bound for bound, _ in below[:-1]), tuple(count for _, count in below)
