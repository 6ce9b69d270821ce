"""The SSD tier compared with a bare O_DIRECT loop in the same folder with the same sizes and number of threads.

python benchmarks/ssd.py FOLDER [--block-bytes 196608 2097152] [--total-mib 1024] [--threads 4] [--repeats 5]
python benchmarks/ssd.py FOLDER --stripe FOLDER2 [...]

FOLDER gets a temporary folder that is deleted at the end. The volume is used through DiskLanes, so that its times
include checksums, headers, the journal and the hand-over between threads; the bare loop is pwrite and pread of the same
payloads in a preallocated file. Both run in turns; the figures are medians, with minimum and maximum. Exit code 1 if
the tier reaches less than `--least-share` (0.8) of the bare loop in any row.

`--stripe` compares one volume in FOLDER with one striped over FOLDER and FOLDER2 instead, in turns. With the folders
on two devices the exit code is 1 if reading or writing is less than 1.8 times as fast; on one device striping cannot
gain, and the exit code is 1 if it costs more than 20 %.
"""

import argparse
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tiercel.device.journal_format import pack_clean, pack_journal_head, pack_record, replay_journal
from tiercel.device.volume import Volume, open_volume
from tiercel.device.volume_format import JOURNAL_NAME
from tiercel.device.volume_layout import total_bytes
from tiercel.kvcache.store.disk import DiskLanes, DiskVerdict
from tiercel.values.clock import MonotonicClock

MIB = 1 << 20
QUEUED = 64  # calls asked for at a time
POLL_S = 0.001
MIN_GAIN = 1.8  # of striping over two devices
MIN_SHARE_ON_ONE_DEVICE = 0.8  # part of the speed of one folder: two folders on one device cannot be faster


def open_bare(path: Path, size: int) -> int:
    """Open a preallocated file for direct I/O, or for plain I/O if the file system has no direct I/O."""
    path.touch()
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        print("no direct I/O here: the bare loop is buffered")
        fd = os.open(path, os.O_RDWR)
    os.posix_fallocate(fd, 0, size)
    return fd


def bare(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: list[memoryview],
    order: list[int],
    threads: int,
) -> float:
    """Return the MB/s of the bare loop."""
    size = len(buffers[0])
    rest = enumerate(order)
    lock = threading.Lock()

    def work(_: int) -> None:
        while True:
            with lock:
                turn, index = next(rest, (0, -1))
            if index < 0:
                return
            done = call(fd, [buffers[turn % QUEUED]], index * size)
            assert done == size

    began_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return len(order) * size / (time.perf_counter() - began_s) / 1e6


def tiered(
    lanes: DiskLanes, ready: threading.Event, ask: Callable[[int, int], None], order: list[int], size: int
) -> float:
    """Return the MB/s through the lanes, with the number of queued calls that the engine has."""
    began_s = time.perf_counter()
    done = asked = 0
    while done < len(order):
        while asked < len(order) and asked - done < QUEUED:
            ask(asked, order[asked])
            asked += 1
        ready.wait()
        ready.clear()
        time.sleep(POLL_S)  # a loop looks once a step
        for result in lanes.poll():
            assert result.verdict is DiskVerdict.OK, result
            done += 1
    return len(order) * size / (time.perf_counter() - began_s) / 1e6


def device_of(folder: Path) -> str:
    """Return the name of the block device of a folder, without the partition, or else the number of its file system."""
    number = folder.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not node.exists():
        return str(number)
    node = node.resolve()
    return node.parent.name if (node / "partition").exists() else node.name


class Tier:
    """A volume over some folders behind lanes of their own, and the speed of random passes over all its slots."""

    def __init__(self, volume: Volume, threads: int, buffers: list[memoryview], keys: list[bytes]) -> None:
        self._ready = threading.Event()
        half = threads // 2
        self.lanes = DiskLanes(
            volume, MonotonicClock(), self._ready.set, load_threads=threads - half, store_threads=half, deadline_s=30.0
        )
        self._buffers, self._keys = buffers, keys

    def write(self, order: list[int]) -> float:
        """Return the MB/s of writing these slots."""
        return self._run(self.lanes.write, order)

    def read(self, order: list[int]) -> float:
        """Return the MB/s of reading these slots."""
        return self._run(self.lanes.read, order)

    def _run(self, call: Callable[[int, int, bytes, memoryview], object], order: list[int]) -> float:
        def ask(turn: int, slot: int) -> None:
            call(turn, slot, self._keys[slot], self._buffers[turn % QUEUED])

        return tiered(self.lanes, self._ready, ask, order, len(self._buffers[0]))


def payloads(slots: int, block_bytes: int) -> tuple[list[memoryview], list[bytes]]:
    """Return buffers for what is queued, full of random bytes, and a key for each slot."""
    rng = random.Random(1)
    memory = memoryview(mmap.mmap(-1, QUEUED * block_bytes))
    memory[:] = rng.randbytes(len(memory))
    buffers = [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
    return buffers, [rng.randbytes(32) for _ in range(slots)]


def compare_stripes(folders: tuple[Path, Path], block_bytes: int, total: int, threads: int, repeats: int) -> list[str]:
    """Compare a volume over both folders with one in the first. Return the missed checks."""
    devices = {device_of(folder) for folder in folders}
    slots = max(QUEUED, total // block_bytes) // 2 * 2  # the same number in each folder
    buffers, keys = payloads(slots, block_bytes)
    rng = random.Random(2)
    figures: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as closing:
        tiers: dict[str, Tier] = {}
        for name, parts in (("one", folders[:1]), ("two", folders)):
            capacity = total_bytes(slots, len(parts), block_bytes)
            volume = open_volume(tuple(part / name for part in parts), capacity, block_bytes, b"benchmark")
            closing.enter_context(volume)
            tiers[name] = Tier(volume, threads, buffers, keys)
            tiers[name].lanes.start()
            closing.callback(tiers[name].lanes.close, 60.0)
        for repeat in range(-1, repeats):  # the first round allocates the blocks of the files and does not count
            order = rng.sample(range(slots), slots)
            for name in ("one", "two") if repeat % 2 else ("two", "one"):
                for way in ("write", "read"):
                    rate = tiers[name].write(order) if way == "write" else tiers[name].read(order)
                    if repeat >= 0:
                        figures.setdefault((way, name), []).append(rate)
    least = MIN_GAIN if len(devices) == 2 else MIN_SHARE_ON_ONE_DEVICE
    broken: list[str] = []
    for way in ("write", "read"):
        one, two = figures[way, "one"], figures[way, "two"]
        gain = statistics.median(two) / statistics.median(one)
        print(
            f"{block_bytes:>9,} B  {way:<5}  one folder {statistics.median(one):>7,.0f} MB/s ({min(one):,.0f} to "
            f"{max(one):,.0f})  two {statistics.median(two):>7,.0f} MB/s ({min(two):,.0f} to {max(two):,.0f})  "
            f"gain {gain:.2f}, devices {len(devices)}, wanted {least}"
        )
        if gain < least:
            broken.append(f"striping, {block_bytes:,} B, {way}: gain {gain:.2f}, less than {least}")
    return broken


def compare(folder: Path, block_bytes: int, total: int, threads: int, repeats: int, least: float) -> list[str]:
    """Print the medians of writes and reads of one block size. Return the missed checks."""
    slots = max(QUEUED, total // block_bytes)
    rng = random.Random(2)
    buffers, keys = payloads(slots, block_bytes)
    fd = open_bare(folder / "bare", slots * block_bytes)
    figures: dict[str, list[float]] = {}
    capacity = total_bytes(slots, 1, block_bytes)
    with open_volume((folder / "kv",), capacity, block_bytes, b"benchmark") as volume:
        tier = Tier(volume, threads, buffers, keys)
        tier.lanes.start()
        for repeat in range(-1, repeats):  # the first round allocates the blocks of the files and does not count
            order = list(range(slots))
            rng.shuffle(order)
            measured: list[tuple[str, Callable[[], float]]] = [
                ("bare write", lambda order=order: bare(os.pwritev, fd, buffers, order, threads)),
                ("tier write", partial(tier.write, order)),
                ("bare read", lambda order=order: bare(os.preadv, fd, buffers, order, threads)),
                ("tier read", partial(tier.read, order)),
            ]
            if repeat % 2:
                measured[0:2], measured[2:4] = measured[1::-1], measured[3:1:-1]
            for name, run in measured:
                rate = run()
                if repeat >= 0:
                    figures.setdefault(name, []).append(rate)
        tier.lanes.close(60.0)
    os.close(fd)
    median = {name: statistics.median(rates) for name, rates in figures.items()}
    broken: list[str] = []
    for way in ("write", "read"):
        rate, loop = median[f"tier {way}"], median[f"bare {way}"]
        spread = f"{min(figures[f'tier {way}']):,.0f} to {max(figures[f'tier {way}']):,.0f}"
        loop_spread = f"{min(figures[f'bare {way}']):,.0f} to {max(figures[f'bare {way}']):,.0f}"
        print(
            f"{block_bytes:>9,} B  {way:<5}  tier {rate:>7,.0f} MB/s ({spread})  "
            f"bare {loop:>7,.0f} MB/s ({loop_spread})  ratio {rate / loop:.2f}"
        )
        if rate < least * loop:
            broken.append(f"{block_bytes:,} B, {way}: {rate / loop:.0%} of the bare loop, less than {least:.0%}")
    return broken


def scan(folder: Path, block_bytes: int, total: int) -> None:
    """Print how fast the content of a volume is found with and without its journal."""
    slots = total // block_bytes

    def opened() -> Volume:
        return open_volume((folder / "scan",), total_bytes(slots, 1, block_bytes), block_bytes, b"scan")

    with opened() as volume:
        payload = memoryview(mmap.mmap(-1, 4096))
        for slot in range(slots):
            volume.write(slot, slot.to_bytes(31, "little") + b"k", payload)
    for name in ("journal", "scan"):
        if name == "scan":
            (folder / "scan" / JOURNAL_NAME).unlink()
        began_s = time.perf_counter()
        with opened() as volume:
            ready_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            found = sum(1 for _ in volume.recover())
            spent_s = time.perf_counter() - began_s
        assert found == slots
        print(
            f"{block_bytes:>9,} B  {name:<7}  {slots:,} slots: open {ready_s * 1e3:.0f} ms, "
            f"recover {spent_s * 1e3:.0f} ms, {slots / spent_s:,.0f} slots/s"
        )


def replay(slots: int) -> None:
    """Print how fast a journal is read."""
    volume_id = bytes(16)
    records = b"".join(pack_record(volume_id, slot, b"k" * 32, slot + 1) for slot in range(slots))
    raw = pack_journal_head(volume_id, slots) + bytes(len(records)) + records + pack_clean(volume_id, slots)
    began_s = time.perf_counter()
    journal = replay_journal(raw, volume_id, slots)
    spent_s = time.perf_counter() - began_s
    assert journal is not None
    assert journal.is_clean
    print(f"journal replay: {slots:,} records in {spent_s * 1e3:.0f} ms, {slots / spent_s:,.0f} records/s")


def main() -> int:
    """Measure and print. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stripe", type=Path, metavar="FOLDER2", help="compare one folder with both instead")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[196_608, 2 * MIB])
    parser.add_argument("--total-mib", type=int, default=1024, help="bytes of each pass")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least-share", type=float, default=0.8, help="of the bare loop's speed, in every row")
    given = parser.parse_args()
    total = given.total_mib * MIB
    broken: list[str] = []
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {given.threads} threads")
    for block_bytes in given.block_bytes:
        with ExitStack() as closing:
            places = [given.folder, *([given.stripe] if given.stripe else [])]
            folders = [Path(closing.enter_context(tempfile.TemporaryDirectory(dir=place))) for place in places]
            if given.stripe:
                broken += compare_stripes((folders[0], folders[1]), block_bytes, total, given.threads, given.repeats)
                continue
            (folder,) = folders
            broken += compare(folder, block_bytes, total, given.threads, given.repeats, given.least_share)
            shutil.rmtree(folder / "kv")
            (folder / "bare").unlink()
            scan(folder, block_bytes, total)
    if not given.stripe:
        replay(200_000)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")
    for text in broken:
        print(f"FAILED: {text}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
