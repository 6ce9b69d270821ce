"""The format of the SSD tier's files. Everything read here is untrusted: bounds are checked first.

A volume is one file in each folder, striped: slot i is the (i // stripes)-th of file i % stripes.

    volume file   superblock, slot, slot, ...               each begins on a multiple of 4 KiB
    slot          header (4 KiB), payload rounded up to 4 KiB
    journal       head, then records of one width           in the first folder only
"""

import struct
import zlib
from dataclasses import dataclass

import xxhash

FORMAT_VERSION = 1
ALIGN = 4096  # of file offsets, lengths and addresses of direct I/O; also the size of a superblock and of a header
KEY_BYTES = 32
ID_BYTES = 16
DIGEST_BYTES = 16
FINGERPRINT_BYTES = 64  # at most
MAX_SLOTS = (1 << 32) - 2
MAX_STRIPES = 64

VOLUME_NAME = "tiercel-kv.blocks"
JOURNAL_NAME = "tiercel-kv.journal"

NO_KEY = bytes(KEY_BYTES)

_CHECK = struct.Struct("<Q")
_CHECKED_BYTES = ALIGN - _CHECK.size

_SUPERBLOCK_MAGIC = b"tierclKV"
_SUPERBLOCK = struct.Struct(f"<8sIIIIQQQQ{ID_BYTES}s{FINGERPRINT_BYTES}s")
_HEADER_MAGIC = b"tierclBK"
_HEADER = struct.Struct(f"<8s{ID_BYTES}sQQQ{KEY_BYTES}s{DIGEST_BYTES}s")

# Bytes of a folder beside the slots: superblock, lock file, the directory and the file system's own first blocks.
_FOLDER_BYTES = 2 * ALIGN + 16 * ALIGN
# Bytes of the file system's map for a file written in random order: at most one extent per slot, in half-full leaves.
_EXTENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Superblock:
    """The description of a volume in one of its files."""

    volume_id: bytes  # drawn when the volume was made; every header and record of the volume repeats it
    fingerprint: bytes  # of the model, the layout and everything else that must be equal
    block_bytes: int
    slots: int  # of all folders
    stripe: int  # which of the files this is
    stripes: int
    opens: int  # number of times it was opened: the upper bits of sequence numbers
    created_ns: int  # wall clock, for display

    @property
    def slots_here(self) -> int:
        """Slots of this file."""
        return (self.slots - self.stripe + self.stripes - 1) // self.stripes

    @property
    def file_bytes(self) -> int:
        """Length of this file."""
        return ALIGN + self.slots_here * slot_bytes(self.block_bytes)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The description of a block in the header of its slot."""

    volume_id: bytes
    slot: int
    sequence: int  # increases with every write to a volume, over restarts too
    length: int  # of the payload
    key: bytes
    digest: bytes  # xxh3-128 of the payload


def round_up(count: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-count // ALIGN) * ALIGN


def slot_bytes(block_bytes: int) -> int:
    """Return the size of a slot on the disk: header and payload."""
    return ALIGN + round_up(block_bytes)


def digest_of(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the xxh3-128 of a payload. Cost: about 70 us per MiB, without the GIL."""
    return xxhash.xxh3_128_digest(payload)


def pack_superblock(block: Superblock) -> bytes:
    """Return the 4 KiB of a superblock."""
    body = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC,
        FORMAT_VERSION,
        block.stripe,
        block.stripes,
        len(block.fingerprint),
        block.block_bytes,
        block.slots,
        block.opens,
        block.created_ns,
        block.volume_id,
        block.fingerprint,
    )
    return _sealed(body)


def parse_superblock(raw: memoryview) -> Superblock | str:
    """Return the superblock, or the reason why there is none, as the end of a sentence."""
    if len(raw) < ALIGN:
        return "is too short"
    (
        magic,
        version,
        stripe,
        stripes,
        fingerprint_bytes,
        block_bytes,
        slots,
        opens,
        created_ns,
        volume_id,
        fingerprint,
    ) = _SUPERBLOCK.unpack_from(raw)
    if magic != _SUPERBLOCK_MAGIC:
        return "has no superblock"
    if version != FORMAT_VERSION:
        return f"has format version {version}, not {FORMAT_VERSION}"
    if not _is_sealed(raw):
        return "has a damaged superblock"
    if not (
        fingerprint_bytes <= FINGERPRINT_BYTES
        and block_bytes > 0
        and stripe < stripes <= min(slots, MAX_STRIPES)
        and slots <= MAX_SLOTS
    ):
        return "has an impossible superblock"
    return Superblock(
        volume_id, fingerprint[:fingerprint_bytes], block_bytes, slots, stripe, stripes, opens, created_ns
    )


def pack_header(volume_id: bytes, slot: int, sequence: int, length: int, key: bytes, digest: bytes) -> bytes:
    """Return the 4 KiB of a slot header."""
    return _sealed(_HEADER.pack(_HEADER_MAGIC, volume_id, slot, sequence, length, key, digest))


def parse_header(raw: memoryview) -> SlotHeader | None:
    """Return the header; None if the slot is empty or any of the 4 KiB is damaged."""
    if len(raw) < ALIGN or not _is_sealed(raw):
        return None
    magic, volume_id, slot, sequence, length, key, digest = _HEADER.unpack_from(raw)
    if magic != _HEADER_MAGIC:
        return None
    return SlotHeader(volume_id, slot, sequence, length, key, digest)


def find_digest(raw: memoryview, volume_id: bytes, slot: int, length: int, key: bytes) -> bytes | None:
    """Return the digest of this block from the header of its slot; None if the header is of another block."""
    if not _is_sealed(raw):
        return None
    magic, *found, digest = _HEADER.unpack_from(raw)
    del found[2]  # the sequence number
    return digest if magic == _HEADER_MAGIC and found == [volume_id, slot, length, key] else None


def _sealed(body: bytes) -> bytes:
    padded = body.ljust(_CHECKED_BYTES, b"\0")
    return padded + _CHECK.pack(xxhash.xxh3_64_intdigest(padded))


def _is_sealed(raw: memoryview) -> bool:
    (check,) = _CHECK.unpack_from(raw, _CHECKED_BYTES)
    return check == xxhash.xxh3_64_intdigest(raw[:_CHECKED_BYTES])


# ---- the journal

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
    """The content of a journal. `table` holds the last record of each slot, `RECORD_BYTES` wide, or zeros."""

    table: bytearray
    records: int
    is_clean: bool  # it ends with the mark of a clean shutdown: it is complete


def journal_bytes(slots: int) -> int:
    """Return the largest size of a journal file: a snapshot and as many changes again."""
    return round_up(RECORD_BYTES * (1 + slots + max(slots, _MIN_RECORDS)))


def pack_journal_head(volume_id: bytes, slots: int) -> bytes:
    """Return the head of a journal, which is as wide as a record."""
    body = _JOURNAL_HEAD.pack(_JOURNAL_MAGIC, FORMAT_VERSION, 0, volume_id, slots, 0)[:-8]
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def pack_record(volume_id: bytes, slot: int, key: bytes, sequence: int) -> bytes:
    """Return one record. `NO_KEY` means an empty slot: this version writes none, but reads them."""
    body = _RECORD.pack(sequence, slot, key, 0)[:_RECORD_CHECKED]
    return body + zlib.crc32(body, zlib.crc32(volume_id)).to_bytes(4, "little")


def pack_clean(volume_id: bytes, records: int) -> bytes:
    """Return the mark of a clean shutdown behind `records` other records."""
    return pack_record(volume_id, _CLEAN_SLOT, _CLEAN_KEY, records)


def unpack_record(raw: bytes | bytearray | memoryview, at: int) -> tuple[int, int, bytes]:
    """Return (sequence, slot, key) of a record that was checked before."""
    sequence, slot, key, _ = _RECORD.unpack_from(raw, at)
    return sequence, slot, key


def replay_journal(raw: bytes, volume_id: bytes, slots: int) -> JournalReplay | None:
    """Read a journal up to its first invalid record; None if this is not the journal of this volume.

    Cost: about a million records per second, and `RECORD_BYTES` of memory per slot beside `raw`.
    """
    if raw[:RECORD_BYTES] != pack_journal_head(volume_id, slots):
        return None
    table = bytearray(slots * RECORD_BYTES)
    records, seed = 0, zlib.crc32(volume_id)
    for at in range(RECORD_BYTES, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        record = raw[at : at + RECORD_BYTES]
        if record == _NO_RECORD:  # a slot without a record in the snapshot, or the space behind the last record
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


@dataclass(frozen=True, slots=True)
class VolumeLayout:
    """The slots that fit a capacity."""

    slots: int  # of all folders, the same number in each
    total_bytes: int  # at most, for everything in the folders


def total_bytes(slots: int, stripes: int, block_bytes: int) -> int:
    """Return the most that a volume and its journal ever take, including a journal that is being rewritten."""
    fixed = stripes * _FOLDER_BYTES + 2 * journal_bytes(slots)
    return fixed + slots * (slot_bytes(block_bytes) + _EXTENT_BYTES)


def fit_layout(capacity_bytes: int, stripes: int, block_bytes: int) -> VolumeLayout | None:
    """Return the layout with the most slots that fit; None if not even one slot per folder fits."""
    each = capacity_bytes // (stripes * slot_bytes(block_bytes))
    each = min(each, MAX_SLOTS // stripes)
    low, high = 0, each
    while low < high:
        middle = (low + high + 1) // 2
        if total_bytes(middle * stripes, stripes, block_bytes) <= capacity_bytes:
            low = middle
        else:
            high = middle - 1
    return VolumeLayout(low * stripes, total_bytes(low * stripes, stripes, block_bytes)) if low else None
