"""Calls to a disk that works, hangs, fails or is full: each ends with the right results, and no caller waits."""

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from tiercel.device.volume import open_volume
from tiercel.kvcache.store.disk import BlockStore, DiskLanes, DiskResult, DiskVerdict
from tiercel.values.clock import ManualClock, MonotonicClock

BLOCK = 8192
OK, MISS, FAILED = DiskVerdict.OK, DiskVerdict.MISS, DiskVerdict.FAILED
LATE, RETURNED = DiskVerdict.LATE, DiskVerdict.RETURNED
Open = Callable[..., DiskLanes]


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def block_of(number: int) -> memoryview:
    return memoryview(hashlib.shake_128(number.to_bytes(8, "little")).digest(BLOCK))


def room() -> memoryview:
    return memoryview(bytearray(BLOCK))


class MemoryVolume:
    """A volume whose calls wait at a gate and then fail if an error is set."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[bytes, bytes]] = {}
        self.is_open = threading.Event()  # the gate of reads
        self.is_open.set()
        self.is_writable = threading.Event()  # the gate of writes
        self.is_writable.set()
        self.entered = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.order: list[str] = []
        self.pause_s = 0.0
        self.num_looks = 0
        self.lost: OSError | None = None  # raised by a look at the files

    def write(self, slot: int, key: bytes, payload: memoryview) -> bytes:
        self._pass("w", self.is_writable)
        self.blocks[slot] = (key, bytes(payload))
        return xxhash.xxh3_128_digest(payload)

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        self._pass("r", self.is_open)
        known, block = self.blocks.get(slot, (b"", b""))
        if known == key:
            into[:] = block
        return known == key

    def check_files(self) -> None:
        self.num_looks += 1
        if self.lost is not None:
            raise self.lost

    def sync(self) -> None:
        self._pass("s", self.is_writable)

    def _pass(self, name: str, gate: threading.Event) -> None:
        self.order.append(name)
        self.entered.release()
        gate.wait()
        time.sleep(self.pause_s)
        if self.error is not None:
            raise self.error


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def volume() -> MemoryVolume:
    return MemoryVolume()


@pytest.fixture
def open_lanes(volume: MemoryVolume, clock: ManualClock) -> Iterator[Open]:
    opened: list[DiskLanes] = []

    def opener(over: BlockStore = volume, **options: int) -> DiskLanes:
        lanes = DiskLanes(over, clock, lambda: None, **options)
        lanes.start()
        opened.append(lanes)
        return lanes

    yield opener
    volume.is_open.set()
    volume.is_writable.set()
    assert all(lanes.close(5.0) for lanes in opened)


def collect(lanes: DiskLanes, count: int) -> list[DiskResult]:
    """Poll until there are `count` results."""
    results: list[DiskResult] = []
    ends_s = time.monotonic() + 10
    while len(results) < count:
        assert time.monotonic() < ends_s, results
        results += lanes.poll()
        time.sleep(0.0005)
    return results


def verdicts(results: list[DiskResult]) -> list[tuple[int, DiskVerdict]]:
    return [(result.ticket, result.verdict) for result in results]


def entered(volume: MemoryVolume, calls: int) -> None:
    for _ in range(calls):
        assert volume.entered.acquire(timeout=10)


class NicenessVolume(MemoryVolume):
    """Notes the nice values of the threads that read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nice: dict[str, int] = {}

    def _pass(self, name: str, gate: threading.Event) -> None:
        self.nice[threading.current_thread().name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        super()._pass(name, gate)


def test_threads_that_write_have_a_low_priority(clock: ManualClock, open_lanes: Open) -> None:
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    for threads, name, nice in (
        ({"store_threads": 0}, "kv-load", own),
        ({"load_threads": 0}, "kv-store", max(own, 10)),
    ):
        volume = NicenessVolume()
        lanes = open_lanes(volume, **threads)
        lanes.write(1, 1, key_of(1), block_of(1))
        collect(lanes, 1)
        assert volume.nice == {name: nice}


def test_blocks_go_to_a_real_volume_and_come_back(tmp_path: Path, clock: ManualClock, open_lanes: Open) -> None:
    with open_volume((tmp_path / "kv",), 1 << 20, BLOCK, b"kind") as real:
        lanes = open_lanes(real)
        for number in range(20):
            lanes.write(number, number, key_of(number), block_of(number))
        written = collect(lanes, 20)
        assert {result.ticket: result.digest for result in written} == {
            number: xxhash.xxh3_128_digest(block_of(number)) for number in range(20)
        }
        buffers = {number: room() for number in range(22)}
        for number, buffer in buffers.items():
            lanes.read(number, number % 21, key_of(number), buffer)
        found = dict(verdicts(collect(lanes, 22)))
        assert found == {number: OK if number < 20 else MISS for number in range(22)}
        assert all(buffers[number] == block_of(number) for number in range(20))
        counts = lanes.counts
        assert (counts.reads, counts.read_bytes, counts.writes, counts.write_bytes) == (20, 20 * BLOCK) * 2
        assert (counts.misses, counts.late, counts.failed) == (2, 0, 0)
        assert lanes.bytes_in_flight == 0
        assert lanes.close(5.0)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_gives_the_results_of_a_dict(tmp_path: Path, seed: int, clock: ManualClock) -> None:
    """At most one call for each slot at a time, as the books ensure, and many slots at once."""
    rng = random.Random(seed)
    with open_volume((tmp_path / "a", tmp_path / "b"), 2 << 20, BLOCK, b"kind") as real:
        lanes = DiskLanes(real, clock, lambda: None, load_threads=3, store_threads=2)
        lanes.start()
        model: dict[int, int] = {}
        flying: dict[int, tuple[int, int | None, memoryview]] = {}  # by ticket: slot, number to be found, buffer
        busy: set[int] = set()
        for ticket in range(1500):
            slot = rng.randrange(real.slots)
            if slot not in busy:
                busy.add(slot)
                if rng.random() < 0.5:
                    model[slot] = ticket
                    flying[ticket] = (slot, None, block_of(ticket))
                    lanes.write(ticket, slot, key_of(ticket), flying[ticket][2])
                else:
                    number = model.get(slot, -1) if rng.random() < 0.9 else 10_000
                    flying[ticket] = (slot, number, room())
                    lanes.read(ticket, slot, key_of(number) if number >= 0 else key_of(20_000), flying[ticket][2])
            for result in collect(lanes, len(flying)) if ticket % 20 == 19 else lanes.poll():
                slot, number, buffer = flying.pop(result.ticket)
                busy.discard(slot)
                is_there = number is None or model.get(slot) == number
                assert result.verdict is (OK if is_there else MISS)
                assert not is_there or number is None or buffer == block_of(number)
        assert lanes.close(10.0)
        assert lanes.counts.failed == 0
        assert dict(real.recover()) == {}  # the volume was empty at opening
    with open_volume((tmp_path / "a", tmp_path / "b"), 2 << 20, BLOCK, b"kind") as real:
        assert dict(real.recover()) == {slot: key_of(number) for slot, number in model.items()}


def test_a_late_read_is_reported_once_and_gives_its_buffer_back_when_it_returns(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open
) -> None:
    lanes = open_lanes()
    volume.blocks[0] = (key_of(0), bytes(block_of(0)))
    volume.is_open.clear()
    lanes.read(1, 0, key_of(0), room())
    entered(volume, 1)
    assert lanes.next_deadline_s() == 0.25
    clock.advance(0.2499)
    assert lanes.poll() == []
    clock.advance(0.0001)
    assert lanes.poll() == [DiskResult(1, LATE, 0.25, BLOCK)]
    assert lanes.poll() == []
    assert lanes.next_deadline_s() is None
    assert lanes.bytes_in_flight == BLOCK
    clock.advance(0.5)
    volume.is_open.set()
    assert collect(lanes, 1) == [DiskResult(1, RETURNED, 0.75, BLOCK)]
    assert lanes.bytes_in_flight == 0
    assert lanes.counts.late == 1
    assert (lanes.counts.reads, lanes.counts.misses, lanes.counts.failed) == (0, 0, 0)
    assert not lanes.is_off


def test_a_queued_read_that_is_late_is_dropped(volume: MemoryVolume, clock: ManualClock, open_lanes: Open) -> None:
    lanes = open_lanes(load_threads=1, store_threads=0)
    volume.is_open.clear()
    lanes.read(1, 0, key_of(0), room())
    entered(volume, 1)
    clock.advance(0.125)
    lanes.read(2, 0, key_of(0), room())
    clock.advance(0.125)
    lanes.read(3, 0, key_of(0), room())
    clock.advance(0.125)
    assert verdicts(lanes.poll()) == [(1, LATE), (2, LATE), (2, RETURNED)]
    assert lanes.bytes_in_flight == 2 * BLOCK
    volume.is_open.set()
    assert verdicts(collect(lanes, 2)) == [(1, RETURNED), (3, MISS)]
    assert volume.order == ["r", "r"]


def test_a_read_that_ends_after_its_deadline_but_before_the_next_poll_counts(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open
) -> None:
    lanes = open_lanes()
    volume.is_open.clear()
    lanes.read(1, 0, key_of(0), room())
    entered(volume, 1)
    clock.advance(1.0)
    volume.is_open.set()
    time.sleep(0.05)
    assert verdicts(lanes.poll()) in ([(1, MISS)], [(1, LATE)])


def test_writes_have_no_deadline(volume: MemoryVolume, clock: ManualClock, open_lanes: Open) -> None:
    lanes = open_lanes()
    volume.is_writable.clear()
    lanes.write(1, 0, key_of(0), block_of(0))
    entered(volume, 1)
    clock.advance(100.0)
    assert lanes.poll() == []
    volume.is_writable.set()
    assert verdicts(collect(lanes, 1)) == [(1, OK)]


def test_stuck_load_threads_switch_the_tier_off(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = open_lanes()
    volume.is_open.clear()
    volume.is_writable.clear()
    for ticket in range(4):
        lanes.read(ticket, 0, key_of(0), room())
    entered(volume, 4)
    for ticket in (10, 11):
        lanes.write(ticket, 0, key_of(0), block_of(0))
    clock.advance(0.9)
    assert verdicts(lanes.poll()) == [(ticket, LATE) for ticket in range(4)]
    assert not lanes.is_off
    clock.advance(0.2)
    assert verdicts(lanes.poll()) == [(10, FAILED), (11, FAILED)]
    assert lanes.is_off
    assert "hang" in caplog.text
    assert "tier off" in caplog.text
    lanes.read(21, 0, key_of(0), room())
    assert verdicts(lanes.poll()) == [(21, FAILED)]
    volume.is_open.set()
    assert sorted(verdicts(collect(lanes, 4))) == [(ticket, RETURNED) for ticket in range(4)]
    assert lanes.bytes_in_flight == 0


def test_one_hanging_write_does_not_switch_the_tier_off(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open
) -> None:
    lanes = open_lanes()
    volume.is_writable.clear()
    lanes.write(1, 0, key_of(0), block_of(0))
    entered(volume, 1)
    clock.advance(60.0)
    lanes.poll()
    lanes.read(2, 0, key_of(0), room())
    assert verdicts(collect(lanes, 1)) == [(2, MISS)]
    assert not lanes.is_off


def test_a_disk_that_stalls_for_seconds_never_blocks_the_caller(tmp_path: Path) -> None:
    """In real time: a stall of 0.6 s stands for 5 s; submitting and polling take far less than a step."""
    volume = MemoryVolume()
    woken = threading.Event()
    lanes = DiskLanes(volume, MonotonicClock(), woken.set, deadline_s=0.05)
    lanes.start()
    volume.is_open.clear()
    threading.Timer(0.6, volume.is_open.set).start()
    longest_s, news, began_s = 0.0, [], time.monotonic()
    for ticket in range(60):
        before_s = time.thread_time()
        lanes.read(ticket, 0, key_of(0), room())
        news += lanes.poll()
        longest_s = max(longest_s, time.thread_time() - before_s)
        time.sleep(0.01)
    assert time.monotonic() - began_s < 5
    assert longest_s < 0.02
    assert woken.wait(5)
    assert lanes.close(5.0)
    news += lanes.poll()
    late = [result.ticket for result in news if result.verdict is LATE]
    returned = [result.ticket for result in news if result.verdict is RETURNED]
    assert 4 <= len(late) < 60
    assert late == sorted(returned)
    assert lanes.is_off
    assert {result.ticket for result in news} == set(range(60))
    assert lanes.bytes_in_flight == 0


def test_three_io_errors_within_a_minute_switch_the_tier_off(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = open_lanes()
    volume.error = OSError(errno.EIO, os.strerror(errno.EIO))
    for ticket in range(5):  # the window slides: errors 31 s apart are never three in 60 s
        lanes.read(ticket, 0, key_of(0), room())
        assert verdicts(collect(lanes, 1)) == [(ticket, FAILED)]
        assert not lanes.is_off
        clock.advance(31.0)
    for ticket in range(3):
        lanes.read(ticket, 0, key_of(0), room())
        assert verdicts(collect(lanes, 1)) == [(ticket, FAILED)]
    assert lanes.is_off
    assert "I/O errors" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_read_only(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = open_lanes(load_threads=1, store_threads=1)
    volume.blocks[0] = (key_of(0), bytes(block_of(0)))
    volume.is_writable.clear()
    for ticket in range(5):
        lanes.write(ticket, ticket, key_of(ticket), block_of(ticket))
    entered(volume, 2)
    volume.error = OSError(code, os.strerror(code))
    volume.is_writable.set()
    assert sorted(verdicts(collect(lanes, 5))) == [(ticket, FAILED) for ticket in range(5)]
    assert volume.order == ["w", "w"]  # the queued writes are not tried
    assert lanes.is_read_only
    assert not lanes.is_off
    assert caplog.text.count("read-only") == 1
    volume.error = None
    buffer = room()
    lanes.read(9, 0, key_of(0), buffer)
    lanes.write(10, 1, key_of(1), block_of(1))
    assert dict(verdicts(collect(lanes, 2))) == {9: OK, 10: FAILED}
    assert buffer == block_of(0)


def written(lanes: DiskLanes, tickets: int) -> None:
    for ticket in range(tickets):
        lanes.write(ticket, ticket, key_of(ticket), block_of(ticket))
    assert dict(verdicts(collect(lanes, tickets))) == dict.fromkeys(range(tickets), OK)


def test_writes_are_synced_within_seconds_and_once(volume: MemoryVolume, clock: ManualClock, open_lanes: Open) -> None:
    lanes = open_lanes()
    clock.advance(60.0)
    assert lanes.poll() == []
    written(lanes, 3)
    for second in range(20):
        clock.advance(1.0)
        assert lanes.poll() == [], "a sync has no ticket"
        if second == 5:
            entered(volume, 4)
    assert volume.order == ["w"] * 3 + ["s"]


def test_a_sync_that_fails_drops_the_volume(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = open_lanes()
    written(lanes, 2)
    volume.error = OSError(errno.EIO, os.strerror(errno.EIO))
    clock.advance(5.0)
    lanes.poll()
    entered(volume, 3)
    ends_s = time.monotonic() + 10
    while not lanes.is_off and time.monotonic() < ends_s:
        time.sleep(0.001)
    assert "sync failed with EIO" in caplog.text
    lanes.read(7, 0, key_of(0), room())
    lanes.write(8, 0, key_of(0), block_of(0))
    assert verdicts(collect(lanes, 2)) == [(7, FAILED), (8, FAILED)]
    clock.advance(60.0)
    assert lanes.poll() == []
    assert volume.order == ["w", "w", "s"], "it is never tried again"


def test_files_that_are_lost_are_noticed_without_any_work(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = open_lanes()
    for second in range(1, 9):
        clock.advance(1.0)
        assert lanes.poll() == []
        ends_s = time.monotonic() + 10
        while volume.num_looks < second // 2 and time.monotonic() < ends_s:
            time.sleep(0.001)
        assert volume.num_looks == second // 2, "one look every two seconds"
    assert not lanes.is_off and not volume.order
    volume.lost = OSError(errno.ENOENT, "deleted")
    clock.advance(2.0)
    lanes.poll()
    ends_s = time.monotonic() + 10
    while not lanes.is_off and time.monotonic() < ends_s:
        time.sleep(0.001)
    assert "its files are lost: ENOENT (deleted)" in caplog.text
    lanes.read(7, 0, key_of(0), room())
    assert verdicts(collect(lanes, 1)) == [(7, FAILED)]


def test_looks_do_not_pile_up_behind_writes_that_hang(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open
) -> None:
    lanes = open_lanes(load_threads=0, store_threads=1)
    volume.is_writable.clear()
    lanes.write(0, 0, key_of(0), block_of(0))
    entered(volume, 1)
    for _ in range(10):
        clock.advance(3.0)
        lanes.poll()
    volume.is_writable.set()
    assert verdicts(collect(lanes, 1)) == [(0, OK)]
    assert volume.num_looks <= 2, "one that waited, and one after it"


def test_closing_syncs_the_last_writes(volume: MemoryVolume, clock: ManualClock) -> None:
    lanes = DiskLanes(volume, clock, lambda: None)
    lanes.start()
    for ticket in range(5):
        lanes.write(ticket, ticket, key_of(ticket), block_of(ticket))
    assert lanes.close(5.0)
    assert volume.order == ["w"] * 5 + ["s"]


def test_closing_does_not_wait_for_a_sync_that_hangs(volume: MemoryVolume, clock: ManualClock) -> None:
    lanes = DiskLanes(volume, MonotonicClock(), lambda: None)
    lanes.start()
    written(lanes, 1)
    volume.is_writable.clear()
    assert not lanes.close(0.05)
    volume.is_writable.set()


def test_a_late_read_counts_with_the_time_in_its_call(
    volume: MemoryVolume, clock: ManualClock, open_lanes: Open
) -> None:
    lanes = open_lanes(load_threads=1, store_threads=0)
    volume.is_open.clear()
    lanes.read(1, 0, key_of(0), room())
    entered(volume, 1)
    lanes.read(2, 0, key_of(0), room())  # no thread begins it in time
    clock.advance(0.25)
    assert sorted(verdicts(lanes.poll()), key=str) == [(1, LATE), (2, LATE), (2, RETURNED)]
    counts = lanes.counts
    assert (counts.late, counts.late_bytes, counts.late_seconds) == (2, BLOCK, 0.25)
    clock.advance(3.0)
    volume.is_open.set()
    assert verdicts(collect(lanes, 1)) == [(1, RETURNED)]
    assert (lanes.counts.late_bytes, lanes.counts.late_seconds) == (BLOCK, 0.25)


def test_a_faulty_volume_fails_the_call_and_not_the_thread(
    volume: MemoryVolume, open_lanes: Open, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = open_lanes(load_threads=1, store_threads=0)
    volume.error = KeyError("a bug")
    lanes.read(1, 0, key_of(0), room())
    assert verdicts(collect(lanes, 1)) == [(1, FAILED)]
    assert "a bug" in caplog.text
    volume.error = None
    lanes.read(2, 0, key_of(0), room())
    assert verdicts(collect(lanes, 1)) == [(2, MISS)]


def test_neither_queue_starves(volume: MemoryVolume, open_lanes: Open) -> None:
    """While one queue always has work, a call of the other queue is the next that a thread of its kind begins."""
    volume.pause_s = 0.002
    for flood, single in (("w", "r"), ("r", "w")):
        volume.order.clear()
        lanes = open_lanes(load_threads=1, store_threads=1)
        volume.is_open.clear()
        volume.is_writable.clear()
        ask = {"r": lambda ticket: lanes.read(ticket, 0, key_of(0), room())}  # noqa: B023
        ask["w"] = lambda ticket: lanes.write(ticket, 0, key_of(0), block_of(0))  # noqa: B023
        for ticket in range(100):
            ask[flood](ticket)
        entered(volume, 2)  # both threads work for the full queue: none is idle while there is work
        ask[single](100)
        volume.is_open.set()
        volume.is_writable.set()
        collect(lanes, 101)
        # The thread of its kind begins it after the current call; the other thread makes a few calls meanwhile.
        assert volume.order.index(single) < 10
        while volume.entered.acquire(blocking=False):
            pass


def test_the_caller_is_woken_for_every_result(volume: MemoryVolume, clock: ManualClock) -> None:
    woken = threading.Semaphore(0)
    lanes = DiskLanes(volume, clock, lambda: woken.release())
    lanes.start()
    lanes.write(1, 0, key_of(0), block_of(0))
    assert woken.acquire(timeout=10)
    assert verdicts(lanes.poll()) == [(1, OK)]
    lanes.read(2, 1, key_of(1), room())
    assert woken.acquire(timeout=10)
    assert verdicts(lanes.poll()) == [(2, MISS)]
    assert lanes.close(5.0)
    lanes.read(3, 0, key_of(0), room())
    assert woken.acquire(timeout=10)
    assert verdicts(lanes.poll()) == [(3, FAILED)]


def test_closing_lets_writes_end_and_refuses_reads(volume: MemoryVolume, clock: ManualClock) -> None:
    lanes = DiskLanes(volume, clock, lambda: None, load_threads=1, store_threads=1)
    lanes.start()
    volume.is_writable.clear()
    for ticket in range(4):
        lanes.write(ticket, ticket, key_of(ticket), block_of(ticket))
    entered(volume, 2)
    lanes.read(9, 0, key_of(0), room())
    threading.Timer(0.05, volume.is_writable.set).start()
    assert lanes.close(5.0)
    found = dict(verdicts(lanes.poll()))
    assert found == {**dict.fromkeys(range(4), OK), 9: FAILED}
    assert len(volume.blocks) == 4


def test_closing_does_not_wait_for_a_call_that_hangs(volume: MemoryVolume, clock: ManualClock) -> None:
    lanes = DiskLanes(volume, clock, lambda: None, load_threads=1, store_threads=0)
    lanes.start()
    volume.is_writable.clear()
    lanes.write(1, 0, key_of(0), block_of(0))
    lanes.write(2, 1, key_of(1), block_of(1))
    entered(volume, 1)
    assert not lanes.close(0.05)
    assert verdicts(lanes.poll()) == [(2, FAILED)]
    assert lanes.bytes_in_flight == BLOCK
    volume.is_writable.set()
    assert verdicts(collect(lanes, 1)) == [(1, OK)]
