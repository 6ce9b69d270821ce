"""The SSD tier beside a bare O_DIRECT loop: same folder, same run, same sizes, same number of threads.

python benchmarks/ssd.py FOLDER [--block-bytes 196608 2097152] [--total-mib 1024] [--threads 4] [--repeats 5]

FOLDER gets a temporary folder that is deleted at the end. The volume works through DiskLanes, so its figures hold
checksums, headers, the journal and the hand-over between threads; the bare loop is pwrite and pread of the same
payloads into a preallocated file. The two take turns; the figures are medians, with the least and the most.
"""

import argparse
import mmap
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from device.volume import Volume, open_volume
from device.volume_format import JOURNAL_NAME, pack_clean, pack_journal_head, pack_record, replay_journal, total_bytes
from kvcache.store.disk import DiskLanes, DiskVerdict
from tiercel.clock import MonotonicClock

MIB = 1 << 20
QUEUED = 64  # calls asked for at a time
POLL_S = 0.001


def open_bare(path: Path, size: int) -> int:
    """A preallocated file for direct I/O, or plain I/O where the file system has none."""
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
    """MB/s of a loop that does nothing else."""
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
    """MB/s through the lanes, with so many calls queued as the engine would."""
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


def compare(folder: Path, block_bytes: int, total: int, threads: int, repeats: int) -> dict[str, float]:
    """Print the medians of writes and reads of one block size, and return them in MB/s."""
    slots = max(QUEUED, total // block_bytes)
    rng = random.Random(1)
    memory = memoryview(mmap.mmap(-1, QUEUED * block_bytes))
    memory[:] = rng.randbytes(len(memory))
    buffers = [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
    keys = [rng.randbytes(32) for _ in range(slots)]
    fd = open_bare(folder / "bare", slots * block_bytes)
    figures: dict[str, list[float]] = {}
    capacity = total_bytes(slots, 1, block_bytes)
    with open_volume((folder / "kv",), capacity, block_bytes, b"benchmark") as volume:
        ready = threading.Event()
        half = threads // 2
        lanes = DiskLanes(
            volume, MonotonicClock(), ready.set, load_threads=threads - half, store_threads=half, deadline_s=30.0
        )
        lanes.start()

        def write(turn: int, slot: int) -> None:
            lanes.write(turn, slot, keys[slot], buffers[turn % QUEUED])

        def read(turn: int, slot: int) -> None:
            lanes.read(turn, slot, keys[slot], buffers[turn % QUEUED])

        for repeat in range(-1, repeats):  # the first round makes the files' blocks real and does not count
            order = list(range(slots))
            rng.shuffle(order)
            measured: list[tuple[str, Callable[[], float]]] = [
                ("bare write", lambda order=order: bare(os.pwritev, fd, buffers, order, threads)),
                ("tier write", lambda order=order: tiered(lanes, ready, write, order, block_bytes)),
                ("bare read", lambda order=order: bare(os.preadv, fd, buffers, order, threads)),
                ("tier read", lambda order=order: tiered(lanes, ready, read, order, block_bytes)),
            ]
            if repeat % 2:
                measured[0:2], measured[2:4] = measured[1::-1], measured[3:1:-1]
            for name, run in measured:
                rate = run()
                if repeat >= 0:
                    figures.setdefault(name, []).append(rate)
        lanes.close(60.0)
    os.close(fd)
    median = {name: statistics.median(rates) for name, rates in figures.items()}
    for way in ("write", "read"):
        tier, loop = median[f"tier {way}"], median[f"bare {way}"]
        spread = f"{min(figures[f'tier {way}']):,.0f} to {max(figures[f'tier {way}']):,.0f}"
        loop_spread = f"{min(figures[f'bare {way}']):,.0f} to {max(figures[f'bare {way}']):,.0f}"
        print(
            f"{block_bytes:>9,} B  {way:<5}  tier {tier:>7,.0f} MB/s ({spread})  "
            f"bare {loop:>7,.0f} MB/s ({loop_spread})  ratio {tier / loop:.2f}"
        )
    return median


def scan(folder: Path, block_bytes: int, total: int) -> None:
    """Print how fast a volume is found again with and without its journal."""
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
    told = replay_journal(raw, volume_id, slots)
    spent_s = time.perf_counter() - began_s
    assert told is not None
    assert told.is_clean
    print(f"journal replay: {slots:,} records in {spent_s * 1e3:.0f} ms, {slots / spent_s:,.0f} records/s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[196_608, 2 * MIB])
    parser.add_argument("--total-mib", type=int, default=1024, help="bytes of each pass")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {given.threads} threads")
    for block_bytes in given.block_bytes:
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            os.chmod(name, 0o700)
            folder = Path(name)
            compare(folder, block_bytes, given.total_mib * MIB, given.threads, given.repeats)
            shutil.rmtree(folder / "kv")
            (folder / "bare").unlink()
            scan(folder, block_bytes, given.total_mib * MIB)
    replay(200_000)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
