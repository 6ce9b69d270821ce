"""The on-disk format of the SSD tier's volume files. All input is untrusted: bounds are checked first.

A volume is one file in each folder, striped: slot i is slot i // stripes of file i % stripes.

    volume file   superblock, slot, slot, ...               each begins on a multiple of 4 KiB
    slot          header (4 KiB), payload rounded up to 4 KiB
    journal       see `journal_format`                      in the first folder only
"""

import struct
from dataclasses import dataclass

import xxhash

FORMAT_VERSION = 2
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


@dataclass(frozen=True, slots=True)
class Superblock:
    """The description of a volume in one of its files."""

    volume_id: bytes  # random; repeated in every header and journal record of the volume
    fingerprint: bytes  # of the model, the block layout and everything else that must match
    block_bytes: int
    slots: int  # of all folders
    stripe: int  # index of this file
    stripes: int
    opens: int  # number of times that the volume was opened; the upper bits of sequence numbers
    created_ns: int  # wall clock, for display

    @property
    def slots_here(self) -> int:
        """Number of slots in this file."""
        return (self.slots - self.stripe + self.stripes - 1) // self.stripes

    @property
    def file_bytes(self) -> int:
        """Length of this file in bytes."""
        return ALIGN + self.slots_here * slot_bytes(self.block_bytes)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The description of a block in the header of its slot."""

    volume_id: bytes
    slot: int
    sequence: int  # increases with every write to a volume, also across restarts
    length: int  # of the payload, in bytes
    key: bytes
    digest: bytes  # xxh3-128 of the payload


def round_up(count: int) -> int:
    """Return `count` rounded up to a multiple of `ALIGN`."""
    return -(-count // ALIGN) * ALIGN


def slot_bytes(block_bytes: int) -> int:
    """Return the bytes of a slot on disk: header and payload."""
    return ALIGN + round_up(block_bytes)


def digest_of(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the xxh3-128 digest of a payload. Cost: about 70 us per MiB; the GIL is released."""
    return xxhash.xxh3_128_digest(payload)


def pack_superblock(block: Superblock) -> bytes:
    """Return a superblock as 4 KiB."""
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
    """Return the superblock, or the reason why it is invalid as a predicate such as "is too short"."""
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
    """Return a slot header as 4 KiB."""
    return _sealed(_HEADER.pack(_HEADER_MAGIC, volume_id, slot, sequence, length, key, digest))


def parse_header(raw: memoryview) -> SlotHeader | None:
    """Return the header, or None if the slot is empty or any of the 4 KiB is damaged."""
    if len(raw) < ALIGN or not _is_sealed(raw):
        return None
    magic, volume_id, slot, sequence, length, key, digest = _HEADER.unpack_from(raw)
    if magic != _HEADER_MAGIC:
        return None
    return SlotHeader(volume_id, slot, sequence, length, key, digest)


def find_digest(raw: memoryview, volume_id: bytes, slot: int, length: int, key: bytes) -> bytes | None:
    """Return the digest in the header of a slot, or None if the header is not that of this block."""
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
