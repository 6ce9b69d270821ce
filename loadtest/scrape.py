"""The server's /metrics: read before, during and after a run. A server without it is no error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import httpx
from msgspec import Struct

from loadtest.record import Counter, Sample
from tiercel.clock import Clock

_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_LEFT_OUT = ("python_", "http_")


class Reading(Struct, frozen=True):
    """One reading: values by series, and which of them are counters."""

    values: dict[str, float]
    counters: frozenset[str]


def parse_metrics(text: str) -> Reading:
    """Prometheus text without histogram buckets and creation times. Lines that are none are passed over."""
    values: dict[str, float] = {}
    counting: set[str] = set()
    counters: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            words = line.split()
            if len(words) == 4 and words[3] == "counter":
                counting |= {words[2], f"{words[2]}_total"}
            continue
        if line.startswith("#"):
            continue
        for series, value in _sample(line):
            name = series.partition("{")[0]
            if name.endswith(("_bucket", "_created")) or name.startswith(_LEFT_OUT):
                continue
            values[series] = value
            if name in counting:
                counters.add(series)
    return Reading(values, frozenset(counters))


def _sample(line: str) -> Iterator[tuple[str, float]]:
    """`name{labels} value [time]`; the labels may hold blanks."""
    end = line.rfind("}") + 1 or line.find(" ")
    with contextlib.suppress(ValueError, IndexError):
        value = float(line[end:].split()[0])
        if end > 0 and value == value:  # not NaN
            yield line[:end], value


class Scraper:
    """Reads /metrics once a second while it is open."""

    def __init__(self, client: httpx.AsyncClient, url: str, clock: Clock) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._url = url
        self._clock = clock
        self._before: Reading | None = None
        self._after: Reading | None = None
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Read before and after what the `async with` does."""
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
        """The run begins: read every second from now on."""
        if self._before is not None:
            self._task = asyncio.get_running_loop().create_task(self._sample(start_s))

    def counters(self) -> dict[str, Counter]:
        """Counters that were there afterwards; one that was not there before began at zero."""
        if self._before is None or self._after is None:
            return {}
        before = self._before.values
        return {
            series: Counter(before.get(series, 0.0), self._after.values[series])
            for series in sorted(self._after.counters)
        }

    async def _sample(self, start_s: float) -> None:
        number = 0
        while True:
            await asyncio.sleep(max(0.0, start_s + number * _EVERY_S - self._clock.now_s()))
            number += 1
            at_s = self._clock.now_s() - start_s
            if (reading := await self._read()) is not None:
                self.samples.append(Sample(round(at_s, 3), reading.values))

    async def _read(self) -> Reading | None:
        try:
            response = await self._client.get(self._url, timeout=_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        if response.status_code != 200:
            return None
        reading = parse_metrics(response.text)
        return reading if reading.values else None
