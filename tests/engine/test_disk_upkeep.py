"""A disk that fails to sync: the SSD tier is closed, and requests go on without it."""

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

from tests.engine.test_loop_tiers import TierBench
from tiercel.device.sim_mover import SimMover
from tiercel.engine.measure.rate_book import RateBook
from tiercel.engine.memory.tiers import Tiers
from tiercel.engine.upkeep import Upkeep
from tiercel.kvcache.store.disk import DiskLanes
from tiercel.values.clock import ManualClock
from tiercel.values.outcome import DiskState, FinishReason, RouteGauges
from tiercel.values.rates import Rates
from tiercel.values.tier import Landing, Route, Transfer, Verdict


class UnsafeVolume:
    """A volume that writes and reads, and fails to sync."""

    def __init__(self) -> None:
        self.keys: dict[int, bytes] = {}
        self.syncs = 0

    def write(self, slot: int, key: bytes, payload: memoryview) -> bytes:
        self.keys[slot] = key
        return bytes(16)

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        return self.keys.get(slot) == key

    def check_files(self) -> None:
        pass

    def sync(self) -> None:
        self.syncs += 1
        raise OSError(5, "Input/output error")


class ThreadedDisk:
    """A mover that writes through the simulated machine and real disk threads, and reads through the threads."""

    def __init__(self, inner: SimMover, lanes: DiskLanes) -> None:
        self._inner, self._lanes = inner, lanes

    def start(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            room = memoryview(bytearray(8))
            if transfer.route is Route.PREFETCH:
                self._lanes.read(transfer.id, transfer.sources[0], transfer.keys[0], room)
            else:
                self._inner.start([transfer])
                if transfer.route is Route.PERSIST:
                    self._lanes.write(-transfer.id, transfer.targets[0], transfer.keys[0], room)

    def poll(self) -> list[Landing]:
        read = [Landing(one.ticket, Verdict[one.verdict.name]) for one in self._lanes.poll() if one.ticket > 0]
        assert all(landing.verdict is Verdict.FAILED for landing in read), "nothing is read before the disk is off"
        return self._inner.poll() + read

    def gauges(self) -> tuple[RouteGauges, ...]:
        return ()


def test_a_failed_sync_closes_the_tier_and_no_request_fails() -> None:
    volume = UnsafeVolume()
    opened: list[DiskLanes] = []

    def wrap(mover: SimMover, clock: ManualClock) -> ThreadedDisk:
        opened.append(DiskLanes(volume, clock, lambda: None))
        opened[0].start()
        return ThreadedDisk(mover, opened[0])

    bench = TierBench(blocks=24, host=0, disk=60, wrap=wrap)
    lanes = opened[0]

    class OpenTiers(SimpleNamespace):
        @property
        def disk_state(self) -> DiskState:
            return DiskState.OFF if lanes.is_off else DiskState.ON

    tiers = cast("Tiers", OpenTiers(disk=lanes, mover=SimpleNamespace(gauges=tuple)))
    upkeep = Upkeep(tiers, RateBook(Rates()), bench.cache.background, bench.clock, None)
    doc = list(range(9)) * 5
    bench.submit(doc, max_tokens=2)
    bench.run()
    assert bench.cache.tiers.disk is not None
    assert bench.cache.tiers.disk.slot_by_key
    ends_s = time.monotonic() + 10
    while not lanes.is_off and time.monotonic() < ends_s:
        bench.clock.advance(1.0)
        upkeep.tend()
        bench.loop.step()
        time.sleep(0.001)
    assert volume.syncs == 1
    for number in range(4):  # push the document out of memory
        bench.submit([number + 5] * 60, max_tokens=2)
        bench.run()
    written = len(volume.keys)
    first = bench.submit(doc, max_tokens=2)  # reads are rejected: a miss
    bench.run()
    bench.clock.advance(1.0)
    upkeep.tend()
    again = bench.submit([*doc, 1, 2, 3], max_tokens=2)
    bench.run()
    bench.assert_all_right()
    assert {bench.client.finished[seq].reason for seq in (first, again)} == {FinishReason.LENGTH}
    assert len(volume.keys) == written, "nothing is written any more"
    assert volume.syncs == 1
    assert lanes.close(5.0)
