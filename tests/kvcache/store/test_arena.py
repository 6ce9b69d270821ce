"""Arenas that outlive their engine: what is found again, and what is not used."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from tests.kvcache.store.builders import CPU, SMALL, content, fill, key
from tiercel.kvcache.store.arena import open_arena
from tiercel.kvcache.store.journal import RECORD_BYTES, SlotJournal
from tiercel.kvcache.store.memory_file import kept_blocks
from tiercel.values.errors import ConfigError, InvariantError
from tiercel.values.ids import SlotId
from tiercel.values.tier import KVSpec

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("arena")
    yield fd
    os.close(fd)


def test_a_kept_arena_is_found_with_its_bytes_and_its_records(memfd: int) -> None:
    first = open_arena(SMALL, 20, CPU, memfd, b"model")
    assert not first.is_kept and first.journal is not None
    fill(first, 3)
    first.journal.sign(SlotId(4), key(4), b"d" * 16)
    expected = content(first, 4)
    second = open_arena(SMALL, 20, CPU, memfd, b"model")
    assert second.is_kept and second.journal is not None
    assert dict(second.journal.records()) == {4: key(4)}
    assert second.journal.digest(SlotId(4)) == b"d" * 16
    assert content(second, 4) == expected
    assert kept_blocks(memfd, SMALL, b"model") == 20


def test_the_bytes_of_a_block_follow_from_the_layout() -> None:
    spec = KVSpec(layers=24, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    assert (spec.token_bytes, spec.block_bytes, SMALL.block_bytes) == (98_304, 1_572_864, 180)


@pytest.mark.parametrize("change", ["fingerprint", "blocks", "layout"])
def test_the_memory_of_another_model_layout_or_size_is_emptied(memfd: int, change: str) -> None:
    first = open_arena(SMALL, 20, CPU, memfd, b"model")
    assert first.journal is not None
    fill(first, 3)
    first.journal.sign(SlotId(4), key(4), b"d" * 16)
    spec = KVSpec(layers=1, kv_heads=3, head_dim=5, block_size=3, dtype="bfloat16") if change == "layout" else SMALL
    assert spec.block_bytes == SMALL.block_bytes
    fingerprint = b"other" if change == "fingerprint" else b"model"
    blocks = 21 if change == "blocks" else 20
    assert kept_blocks(memfd, spec, fingerprint) == (20 if change == "blocks" else 0)
    del first
    second = open_arena(spec, blocks, CPU, memfd, fingerprint)
    assert not second.is_kept and second.journal is not None
    assert dict(second.journal.records()) == {}
    assert not second.kv.any()


@pytest.mark.parametrize("at", range(0, 76, 3))
def test_a_wrong_header_is_not_used(memfd: int, at: int) -> None:
    open_arena(SMALL, 20, CPU, memfd, b"model")
    (byte,) = os.pread(memfd, 1, at)
    os.pwrite(memfd, bytes([byte ^ 0x40]), at)
    assert kept_blocks(memfd, SMALL, b"model") == (20 if at >= 68 else 0)  # the header ends there


def test_a_truncated_file_is_not_used(memfd: int) -> None:
    open_arena(SMALL, 20, CPU, memfd, b"model")
    os.ftruncate(memfd, os.fstat(memfd).st_size - 1)
    assert kept_blocks(memfd, SMALL, b"model") == 0


def test_a_record_torn_at_any_byte_is_ignored() -> None:
    old, new = memoryview(bytearray(4 * RECORD_BYTES)), memoryview(bytearray(4 * RECORD_BYTES))
    SlotJournal(old).sign(SlotId(2), key(1), b"a" * 16)
    SlotJournal(new).sign(SlotId(2), key(2), b"b" * 16)
    start = 2 * RECORD_BYTES
    seen = set()
    for cut in range(RECORD_BYTES + 1):
        for first, second in ((old, new), (new, old), (memoryview(bytes(4 * RECORD_BYTES)), new)):
            torn = bytearray(first)
            torn[start : start + cut] = second[start : start + cut]
            seen |= set(SlotJournal(memoryview(torn)).records())
    assert seen == {(2, key(1)), (2, key(2))}


@pytest.mark.parametrize("bit", range(0, 60 * 8, 5))
def test_a_record_with_a_flipped_bit_is_ignored(bit: int) -> None:
    raw = bytearray(4 * RECORD_BYTES)
    journal = SlotJournal(memoryview(raw))
    journal.sign(SlotId(2), key(1), b"a" * 16)
    at = 2 * RECORD_BYTES + bit // 8
    raw[at] ^= 1 << bit % 8
    covered = not 4 <= at - 2 * RECORD_BYTES < 8  # padding
    assert list(journal.records()) == ([] if covered else [(2, key(1))])


def test_a_record_counts_for_its_own_slot_only() -> None:
    raw = bytearray(4 * RECORD_BYTES)
    journal = SlotJournal(memoryview(raw))
    journal.sign(SlotId(2), key(1), b"a" * 16)
    raw[3 * RECORD_BYTES :] = raw[2 * RECORD_BYTES : 3 * RECORD_BYTES]
    assert list(journal.records()) == [(2, key(1))]
    for slot in (0, 4, -1):
        with pytest.raises(InvariantError):
            journal.sign(SlotId(slot), key(1), b"a" * 16)


_SIGNER = """
import sys
import xxhash
from tiercel.kvcache.store.journal import RECORD_BYTES, SlotJournal
from tiercel.kvcache.store.memory_file import layout_of, map_memory
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import KVSpec

spec = KVSpec(layers=3, kv_heads=1, head_dim=5, block_size=3, dtype="bfloat16")
layout = layout_of(spec, b"model", 21)
pages, _ = map_memory(int(sys.argv[1]), layout)
raw = memoryview(pages)
journal = SlotJournal(raw[layout.journal_start :][: 21 * RECORD_BYTES])
print("go", flush=True)
count = 0
while True:
    count += 1
    slot = SlotId(count % 20 + 1)
    start = layout.arena_start + slot * spec.block_bytes
    journal.clear(slot)
    payload = raw[start : start + spec.block_bytes]
    payload[:] = count.to_bytes(4, "big") * (spec.block_bytes // 4)
    journal.sign(slot, BlockKey(count.to_bytes(32, "big")), xxhash.xxh3_128_digest(payload))
"""


@pytest.mark.parametrize("pause_s", [0.0, 0.003, 0.007, 0.017])
def test_after_a_kill_every_record_is_true(memfd: int, pause_s: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SIGNER, str(memfd)], cwd=ROOT, pass_fds=[memfd], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            child.wait(0.05 + pause_s)
        except subprocess.TimeoutExpired:
            child.kill()
    arena = open_arena(SMALL, 20, CPU, memfd, b"model")
    assert arena.is_kept and arena.journal is not None
    found = list(arena.journal.records())
    assert len(found) >= 19  # all but the record that was being written
    for slot, name in found:
        assert content(arena, slot) == name[-4:] * (SMALL.block_bytes // 4)
        assert arena.journal.digest(slot) == xxhash.xxh3_128_digest(arena.slot_bytes(slot))


def test_slots_as_bytes_are_the_slots_of_the_tensor() -> None:
    arena = open_arena(SMALL, 5, CPU)
    arena.slot_bytes(SlotId(3))[:] = bytes(range(SMALL.block_bytes))
    assert arena.kv[3].view(torch.uint8).flatten().tolist() == list(range(SMALL.block_bytes))
    assert not arena.kv[4].any()
    assert arena.kv.data_ptr() % 4096 == 0
    with pytest.raises(InvariantError):
        arena.slot_bytes(SlotId(6))


def test_missing_memory_is_reported_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="no room for a KV pool"):
        open_arena(SMALL, 1 << 55, CPU)
