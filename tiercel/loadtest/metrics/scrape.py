"""Reads the server's /metrics before, during and after a run. A server without /metrics is not an error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from tiercel.loadtest.metrics.exposition import Exposition, parse_exposition, parse_series
from tiercel.loadtest.results.record import Counter, Sample
from tiercel.values.clock import Clock

_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_LEFT_OUT_BEGINS = ("python_", "http_")
_LEFT_OUT_ENDS = ("_bucket", "_created")


class Scraper:
    """Reads /metrics once a second while it is open. Histogram buckets and creation times are left out."""

    def __init__(self, client: httpx.AsyncClient, url: str, clock: Clock) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._url = url
        self._clock = clock
        self._before: Exposition | None = None
        self._after: Exposition | None = None
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Read the counters before and after the body of `async with`."""
        self._before = await self._read()
        try:
            yield
        finally:
            if self._task is not None:
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task
            if self._before is not None:
                self._after = await self._read()

    def begin(self, start_s: float) -> None:
        """Start to read every second; `start_s` is the start of the run."""
        if self._before is not None:
            self._task = asyncio.get_running_loop().create_task(self._sample(start_s))

    def counters(self) -> dict[str, Counter]:
        """Return the counters of the last reading; a counter that the first reading lacks started at zero."""
        if self._before is None or self._after is None:
            return {}
        before = self._before.values
        return {
            series: Counter(before.get(series, 0.0), value)
            for series, value in sorted(self._after.values.items())
            if series in self._after.counters
        }

    async def _sample(self, start_s: float) -> None:
        number = 0
        while True:
            await asyncio.sleep(max(0.0, start_s + number * _EVERY_S - self._clock.now_s()))
            number += 1
            at_s = self._clock.now_s() - start_s
            if (reading := await self._read()) is not None:
                self.samples.append(Sample(round(at_s, 3), reading.values))

    async def _read(self) -> Exposition | None:
        try:
            response = await self._client.get(self._url, timeout=_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        if response.status_code != 200:
            return None
        page = parse_exposition(response.text)
        kept = {series: value for series, value in page.values.items() if _is_kept(parse_series(series).name)}
        return Exposition(kept, page.counters) if kept else None


def _is_kept(name: str) -> bool:
    return not name.startswith(_LEFT_OUT_BEGINS) and not name.endswith(_LEFT_OUT_ENDS)
