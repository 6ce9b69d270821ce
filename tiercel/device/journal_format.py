"""The on-disk format of a volume's journal: a head, then records of equal length. All input is untrusted."""

import struct
import zlib
from dataclasses import dataclass

import xxhash

from tiercel.device.volume_format import FORMAT_VERSION, ID_BYTES, KEY_BYTES, MAX_SLOTS, round_up

_JOURNAL_MAGIC = b"tierclJL"
_JOURNAL_HEAD = struct.Struct(f"<8sII{ID_BYTES}sQQ")
_RECORD = struct.Struct(f"<QI{KEY_BYTES}sI")
RECORD_BYTES = _RECORD.size
_RECORD_CHECKED = RECORD_BYTES - 4
_CLEAN_SLOT = MAX_SLOTS + 1
_CLEAN_KEY = b"closed".ljust(KEY_BYTES, b"\0")
_MIN_RECORDS = 1024
_NO_RECORD = bytes(RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class JournalReplay:
    """The content of a journal. `table` holds the last record of each slot, `RECORD_BYTES` each, or zeros."""

    table: bytearray
    records: int
    is_clean: bool  # ends with the clean-shutdown record, so it lists every slot


def journal_bytes(slots: int) -> int:
    """Return the maximum bytes of a journal file: one record per slot and the same number of changes."""
    return round_up(RECORD_BYTES * (1 + slots + max(slots, _MIN_RECORDS)))


def pack_journal_head(volume_id: bytes, slots: int) -> bytes:
    """Return the head of a journal. It has the length of a record."""
    body = _JOURNAL_HEAD.pack(_JOURNAL_MAGIC, FORMAT_VERSION, 0, volume_id, slots, 0)[:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def pack_record(volume_id: bytes, slot: int, key: bytes, sequence: int) -> bytes:
    """Return one record. `NO_KEY` means an empty slot: this version never writes such records but reads them."""
    body = _RECORD.pack(sequence, slot, key, 0)[:_RECORD_CHECKED]
    return body + zlib.crc32(body, zlib.crc32(volume_id)).to_bytes(4, "little")


def pack_clean(volume_id: bytes, records: int) -> bytes:
    """Return the clean-shutdown record, which follows `records` other records."""
    return pack_record(volume_id, _CLEAN_SLOT, _CLEAN_KEY, records)


def unpack_record(raw: bytes | bytearray | memoryview, at: int) -> tuple[int, int, bytes]:
    """Return (sequence, slot, key) of a record that has already been checked."""
    sequence, slot, key, _ = _RECORD.unpack_from(raw, at)
    return sequence, slot, key


def replay_journal(raw: bytes, volume_id: bytes, slots: int) -> JournalReplay | None:
    """Return the content of a journal up to its first invalid record, or None if it is the journal of another volume.

    Cost: about a million records per second, and `RECORD_BYTES` of memory per slot beside `raw`.
    """
    if raw[:RECORD_BYTES] != pack_journal_head(volume_id, slots):
        return None
    table = bytearray(slots * RECORD_BYTES)
    records, seed = 0, zlib.crc32(volume_id)
    for at in range(RECORD_BYTES, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        record = raw[at : at + RECORD_BYTES]
        if record == _NO_RECORD:  # a slot without a record, or the space after the last record
            continue
        sequence, slot, key, check = _RECORD.unpack(record)
        if check != zlib.crc32(record[:_RECORD_CHECKED], seed):
            break
        if slot == _CLEAN_SLOT:
            is_last = not raw[at + RECORD_BYTES :].strip(b"\0")
            return JournalReplay(table, records, is_last and key == _CLEAN_KEY and sequence == records)
        if slot >= slots:
            break
        table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
        records += 1
    return JournalReplay(table, records, is_clean=False)
