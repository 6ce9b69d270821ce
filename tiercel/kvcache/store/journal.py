"""Records of what the slots of a shared arena hold, for the engine that follows this one."""

import struct
import zlib
from collections.abc import Iterator

from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SlotId

RECORD_BYTES = 64
_FLAGS = struct.Struct("<I")
_BODY = struct.Struct("<32s16sI")  # key, digest, crc
_COVERED = struct.Struct("<Q32s16sI")  # slot, key, digest, flags
_BODY_AT = 8  # flags first, alone in an aligned word: it is written last
_VALID = 0x5EA1ED01


class SlotJournal:
    """One fixed record per slot: the key and the xxh3-128 of the copy that landed there.

    A record is cleared before its slot is overwritten and signed after the copy landed, so a crash between the two
    leaves no record. A crash in the middle of writing a record leaves one whose crc is wrong. The records say what
    *should* lie in a slot; the next engine compares the bytes with the digest before their first use.
    """

    def __init__(self, records: memoryview) -> None:
        self._records = records
        self.slots = len(records) // RECORD_BYTES

    def sign(self, slot: SlotId, key: BlockKey, digest: bytes) -> None:
        """Record that the slot holds this copy."""
        start = self._start(slot)
        _FLAGS.pack_into(self._records, start, 0)
        crc = zlib.crc32(_COVERED.pack(slot, key, digest, _VALID))
        _BODY.pack_into(self._records, start + _BODY_AT, key, digest, crc)
        _FLAGS.pack_into(self._records, start, _VALID)

    def clear(self, slot: SlotId) -> None:
        """Remove the slot's record. Cost: one word."""
        _FLAGS.pack_into(self._records, self._start(slot), 0)

    def record(self, slot: SlotId) -> tuple[BlockKey, bytes] | None:
        """Return key and digest of the copy in a slot; None if the slot has no whole record."""
        start = self._start(slot)
        (flags,) = _FLAGS.unpack_from(self._records, start)
        if flags != _VALID:
            return None
        key, digest, crc = _BODY.unpack_from(self._records, start + _BODY_AT)
        if crc != zlib.crc32(_COVERED.pack(slot, key, digest, flags)):
            return None
        return BlockKey(key), digest

    def digest(self, slot: SlotId) -> bytes | None:
        """Return the checksum that a slot was signed with; None if the slot has no whole record."""
        record = self.record(slot)
        return record[1] if record else None

    def records(self) -> Iterator[tuple[SlotId, BlockKey]]:
        """Yield slot and key of every whole record. Two slots may claim one key."""
        for number in range(1, self.slots):
            slot = SlotId(number)
            if record := self.record(slot):
                yield slot, record[0]

    def _start(self, slot: SlotId) -> int:
        if not 0 < slot < self.slots:
            raise InvariantError("journal.slot", slot=slot, slots=self.slots)
        return slot * RECORD_BYTES
