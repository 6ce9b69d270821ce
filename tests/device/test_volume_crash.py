"""After a kill or a truncation a volume opens, and returns only blocks that were written."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import end_unavailable, find_program
from tiercel.device.journal_format import (
    RECORD_BYTES,
    JournalReplay,
    pack_clean,
    pack_journal_head,
    pack_record,
    replay_journal,
    unpack_record,
)
from tiercel.device.volume import Volume, open_volume
from tiercel.device.volume_format import ALIGN, JOURNAL_NAME, VOLUME_NAME, slot_bytes
from tiercel.device.volume_journal import VolumeJournal, read_journal

BLOCK = 12_288
CAPACITY = 1 << 20
KIND = b"model and layout"
ID = b"sixteen bytes id"


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def block_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK)


def make(folder: Path, capacity: int = CAPACITY) -> Volume:
    return open_volume((folder,), capacity, BLOCK, KIND)


def put(volume: Volume, slot: int, key: bytes) -> None:
    volume.write(slot, key, memoryview(block_of(key)))


def got(volume: Volume, slot: int, key: bytes) -> bytes | None:
    into = memoryview(bytearray(BLOCK))
    return bytes(into) if volume.read(slot, key, into) else None


def journal_of(changes: list[tuple[int, int]], slots: int) -> bytes:
    """A journal with an empty snapshot; a change is (slot, number of the key)."""
    records = [pack_record(ID, slot, key_of(number), order) for order, (slot, number) in enumerate(changes, 1)]
    return b"".join([pack_journal_head(ID, slots), bytes(slots * RECORD_BYTES), *records, pack_clean(ID, len(records))])


def keys_of(replay: JournalReplay | None) -> dict[int, bytes]:
    assert replay is not None
    rows = (unpack_record(replay.table, at) for at in range(0, len(replay.table), RECORD_BYTES))
    return {slot: key for sequence, slot, key in rows if sequence}


def test_a_journal_cut_at_every_byte_is_read_up_to_its_last_whole_record() -> None:
    slots = 5
    changes = [(0, 1), (3, 2), (0, 3), (4, 4), (3, 5), (1, 6)]
    raw = journal_of(changes, slots)
    assert replay_journal(raw, ID, slots) == replay_journal(raw + bytes(1000), ID, slots)
    for cut in range(len(raw) + 1):
        for tail in (b"", bytes(64), b"\xa5" * 64):
            replay = replay_journal(raw[:cut] + tail, ID, slots)
            if cut + len(tail) < RECORD_BYTES:
                assert replay is None
                continue
            if replay is None:
                assert cut < RECORD_BYTES
                continue
            whole = min(max(0, cut // RECORD_BYTES - 1 - slots), len(changes))
            if tail == b"":
                assert keys_of(replay) == {slot: key_of(number) for slot, number in changes[:whole]}
            assert replay.records >= whole
            assert replay.is_clean == (cut == len(raw) and tail != b"\xa5" * 64)


def test_a_journal_with_any_byte_changed_is_never_clean() -> None:
    slots = 4
    raw = journal_of([(0, 1), (3, 2), (0, 3)], slots)
    for at in range(len(raw)):
        flipped = bytearray(raw)
        flipped[at] ^= 0x10
        replay = replay_journal(bytes(flipped), ID, slots)
        assert replay is None or not replay.is_clean, at


def test_a_hostile_journal_is_read_within_bounds() -> None:
    rng = random.Random(5)
    head = pack_journal_head(ID, 4)
    for _ in range(300):
        replay = replay_journal(head + rng.randbytes(rng.randrange(500)), ID, 4)
        assert replay is not None and not replay.is_clean and len(replay.table) == 4 * RECORD_BYTES
    outside = head + pack_record(ID, 4, key_of(1), 1) + pack_clean(ID, 1)
    replay = replay_journal(outside, ID, 4)
    assert replay is not None and replay.records == 0 and not replay.is_clean
    assert replay_journal(head, ID, 5) is None
    assert replay_journal(head, bytes(16), 4) is None


def test_a_journal_is_rewritten_before_it_outgrows_its_bound(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    slots = 1100
    journal = VolumeJournal(handle, ID, bytearray(slots * RECORD_BYTES))
    journal.start()
    path = tmp_path / JOURNAL_NAME
    bound = path.stat().st_size
    expected: dict[int, bytes] = {}
    rng = random.Random(1)
    for order in range(1, 5000):
        slot = rng.randrange(slots)
        expected[slot] = key_of(order)
        journal.append(slot, expected[slot], order)
        assert path.stat().st_size == bound
    assert list(tmp_path.iterdir()) == [path]
    journal.append(7, key_of(1), 1)  # older than the known record
    assert {slot: key for slot, key, _ in journal.entries()} == expected
    journal.close(is_complete=True)
    replay = read_journal(handle, ID, slots)
    assert replay is not None and replay.is_clean
    assert keys_of(replay) == expected
    assert path.stat().st_size == bound
    os.close(handle)


def test_a_scan_tells_of_damaged_headers_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kv"
    with make(folder) as volume:
        for slot in range(volume.slots - 1):  # one slot stays empty, which is no damage
            put(volume, slot, key_of(slot))
        slot_size, count = slot_bytes(volume.block_bytes), volume.slots
    (folder / JOURNAL_NAME).unlink()
    with (folder / VOLUME_NAME).open("r+b") as file:
        for slot in range(2, count - 1):
            file.seek(ALIGN + slot * slot_size)
            file.write(b"damaged")
    with make(folder) as volume:
        assert [slot for slot, _ in volume.recover()] == [0, 1]
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert said == [f"kv volume has headers that are damaged slots={count - 3} first_slot=2"]


def test_a_journal_that_cannot_be_written_costs_a_scan_but_no_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    with make(folder) as volume:
        in_the_way = folder / f"{JOURNAL_NAME}.new"
        in_the_way.mkdir()
        for turn in range(1200):  # more than fit before it must be rewritten
            put(volume, turn % 40, key_of(turn))
        assert "journal disabled" in caplog.text
        in_the_way.rmdir()
    expected = {turn % 40: key_of(turn) for turn in range(1200)}
    with make(folder) as volume:
        assert dict(volume.recover()) == expected
        assert all(got(volume, slot, key) == block_of(key) for slot, key in expected.items())


def test_a_volume_with_a_truncated_journal_finds_every_block_by_scanning(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with make(folder) as volume:
        slots = volume.slots
        for slot in range(0, slots, 2):
            put(volume, slot, key_of(slot))
    with make(folder) as volume:
        for slot in range(8):
            put(volume, slot, key_of(100 + slot))
        expected = {slot: key_of(100 + slot) for slot in range(8)}
        expected |= {slot: key_of(slot) for slot in range(8, slots, 2)}
    whole = (folder / JOURNAL_NAME).read_bytes()
    content = len(whole.rstrip(b"\0"))
    cuts = [*range(0, content, 61), *range(content - RECORD_BYTES - 3, content + 3), len(whole)]
    for cut in cuts:
        (folder / JOURNAL_NAME).write_bytes(whole[:cut])
        volume = make(folder)
        assert dict(volume.recover()) == expected, cut
        volume.close()


_WRITER = """
import hashlib, pathlib, random, sys
from tiercel.device.volume import open_volume

folder, capacity, block, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
with open_volume((folder,), capacity, block, b"model and layout", lock=True) as volume:
    print("open", flush=True)
    for _ in volume.recover():
        pass
    while True:
        key = rng.randbytes(32)
        slot = rng.randrange(volume.slots)
        if rng.random() < 0.02:
            volume.sync()
        else:
            volume.write(slot, key, memoryview(hashlib.shake_128(key).digest(block)))
"""


def test_every_block_found_after_kill_9_is_the_one_that_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    rng = random.Random(9)
    found = torn = 0
    for turn in range(30):
        command = [sys.executable, "-c", _WRITER, str(folder), str(CAPACITY), str(BLOCK), str(turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
        with make(folder) as volume:
            for slot, key in volume.recover():
                block = got(volume, slot, key)
                if block is None:
                    torn += 1
                else:
                    assert block == block_of(key)
                    found += 1
    assert found > 100
    assert torn <= 30  # at most the slot that was being written


_FAULTS = {
    "no space": ("pwritev,pwritev2:error=ENOSPC:when=6+", "ENOSPC"),
    "error on sync": ("fdatasync:error=EIO:when=5+", "EIO"),
    "short write": ("pwritev,pwritev2:retval=512:when=6+", "EIO"),
    "error on read": ("preadv,preadv2:error=EIO:when=6+", "EIO"),
}

_FAULTY = """
import errno, hashlib, pathlib, sys
from tiercel.device.volume import open_volume

block = int(sys.argv[3])
with open_volume((pathlib.Path(sys.argv[1]),), int(sys.argv[2]), block, b"model and layout") as volume:
    try:
        for number in range(40):
            key = hashlib.sha256(number.to_bytes(8, "little")).digest()
            volume.write(number, key, memoryview(hashlib.shake_128(key).digest(block)))
            volume.sync()
            volume.read(number, key, memoryview(bytearray(block)))
    except OSError as exc:
        print(errno.errorcode[exc.errno], number, flush=True)
"""


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_fault_loses_no_more_than_its_block(tmp_path: Path, fault: str) -> None:
    strace = find_program("strace")
    inject, expected = _FAULTS[fault]
    folder = tmp_path / "kv"
    program = [sys.executable, "-c", _FAULTY, str(folder), str(CAPACITY), str(BLOCK)]
    command = [strace, "-f", "-qq", "-o", os.devnull, "-e", f"trace={inject.split(':')[0]}", "-e", f"inject={inject}"]
    ran = subprocess.run([*command, *program], capture_output=True, text=True, check=False)
    if "PTRACE" in ran.stderr or "ptrace" in ran.stderr:
        end_unavailable("strace may not trace here")
    assert ran.stdout.split()[:1] == [expected], ran
    failed_at = int(ran.stdout.split()[1])
    with make(folder) as volume:
        found = dict(volume.recover())
        assert set(found) >= set(range(failed_at))
        for slot, key in found.items():
            block = got(volume, slot, key)
            assert block == block_of(key) if slot < failed_at else block in (None, block_of(key))


@pytest.mark.parametrize("seed", range(4))
def test_a_volume_is_a_dict_that_may_forget(tmp_path: Path, seed: int) -> None:
    """Writes, reads, clean and unclean restarts, truncated journals; nothing is torn, so nothing is lost."""
    rng = random.Random(seed)
    folders = tuple(tmp_path / name for name in "abc"[: 1 + seed % 3])
    volume = open_volume(folders, CAPACITY, BLOCK, KIND)
    model: dict[int, bytes] = {}
    dead: list[Volume] = []  # never closed: as if it had been killed
    for move in range(300):
        slot = rng.randrange(volume.slots)
        match rng.choices(("write", "read", "reopen", "kill", "cut"), (60, 35, 3, 2, 2))[0]:
            case "write":
                model[slot] = key_of(1000 * seed + move)
                put(volume, slot, model[slot])
            case "read":
                key = model.get(slot, key_of(0))
                assert got(volume, slot, key) == (block_of(key) if slot in model else None)
            case "kill":
                dead.append(volume)
                volume = open_volume(folders, CAPACITY, BLOCK, KIND)
                assert dict(volume.recover()) == model
            case step:
                volume.close()
                if step == "cut":
                    path = folders[0] / JOURNAL_NAME
                    os.truncate(path, rng.randrange(path.stat().st_size))
                volume = open_volume(folders, CAPACITY, BLOCK, KIND)
                if rng.random() < 0.7:
                    assert dict(volume.recover()) == model
    assert all(got(volume, slot, key) == block_of(key) for slot, key in model.items())
    for one in (*dead, volume):
        one.close()


def test_slots_of_random_bytes_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    rng = random.Random(3)
    with make(folder) as volume:
        put(volume, 0, key_of(0))
        slots = volume.slots
    path = folder / VOLUME_NAME
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096 + 4096 + BLOCK)
        file.write(rng.randbytes(size - file.tell()))
    (folder / JOURNAL_NAME).write_bytes(rng.randbytes(5000))
    with make(folder) as volume:
        assert list(volume.recover()) == [(0, key_of(0))]
        assert all(got(volume, slot, key_of(slot)) is None for slot in range(1, slots))
