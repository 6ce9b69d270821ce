"""The journal of a volume: an index that makes opening fast. Without it, opening scans the headers.

Records are appended as slots change. A journal is used only if it ends with the clean-shutdown record. Opening a
volume writes a new journal without that record, so that the headers are scanned after a crash.
"""

import logging
import os
import threading
from collections.abc import Iterator

from tiercel.device.journal_format import (
    RECORD_BYTES,
    JournalReplay,
    journal_bytes,
    pack_clean,
    pack_journal_head,
    pack_record,
    replay_journal,
    unpack_record,
)
from tiercel.device.volume_format import JOURNAL_NAME, NO_KEY

_NEW_NAME = f"{JOURNAL_NAME}.new"
_PENDING_BYTES = 64 * RECORD_BYTES

log = logging.getLogger(__name__)


def read_journal(folder: int, volume_id: bytes, slots: int) -> JournalReplay | None:
    """Return the journal in an open folder, or None if there is no readable journal of this volume."""
    try:
        fd = os.open(JOURNAL_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            raw = file.read(journal_bytes(slots))
        except OSError:
            return None
    return replay_journal(raw, volume_id, slots)


def unlink_journal(folder: int) -> None:
    """Delete the journal of a folder, whether valid or not."""
    for name in (JOURNAL_NAME, _NEW_NAME):
        if name in os.listdir(folder):
            os.unlink(name, dir_fd=folder)


class VolumeJournal:
    """The last record of each slot, in memory and appended to a file. It may be used from several threads.

    A journal that cannot be written is disabled with a warning: blocks are still written, and the next opening scans.
    """

    def __init__(self, folder: int, volume_id: bytes, table: bytearray) -> None:
        self._folder = folder
        self._volume_id = volume_id
        self._table = table
        self._slots = len(table) // RECORD_BYTES
        self._bound = journal_bytes(self._slots)
        self._lock = threading.Lock()
        self._fd = -1
        self._end = 0  # position of the next record
        self._pending = bytearray()  # records to write, at the latest on a clean close
        self._records = 0  # number of records in the file
        self.is_disabled = False

    def start(self) -> None:
        """Replace the journal file by the table. The old file lacks later changes and must not be used again."""
        with self._lock:
            try:
                self._rewrite()
            except OSError as exc:
                unlink_journal(self._folder)
                self._disable(exc)

    def append(self, slot: int, key: bytes, sequence: int) -> None:
        """Record the key that a slot holds, unless a newer record of the slot exists."""
        record = pack_record(self._volume_id, slot, key, sequence)
        with self._lock:
            known, _, _ = unpack_record(self._table, slot * RECORD_BYTES)
            if known > sequence:
                return
            self._table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
            self._add(record)

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield (slot, key, sequence) of every slot that holds a block, ordered by slot."""
        for slot in range(self._slots):
            sequence, _, key = unpack_record(self._table, slot * RECORD_BYTES)
            if key != NO_KEY:
                yield slot, key, sequence

    def close(self, *, is_complete: bool) -> None:
        """Close the file. Write the clean-shutdown record if the journal is complete."""
        with self._lock:
            if is_complete and not self.is_disabled:
                try:
                    self._flush()
                    os.fdatasync(self._fd)  # the clean-shutdown record must not become durable before the others
                    self._write(pack_clean(self._volume_id, self._records))
                    os.fdatasync(self._fd)
                except OSError as exc:
                    self._disable(exc)
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _add(self, record: bytes) -> None:
        if self.is_disabled:
            return
        try:
            # Space for the clean-shutdown record is kept free.
            if self._end + len(self._pending) + 2 * RECORD_BYTES > self._bound:
                self._rewrite()
                return
            self._pending += record
            self._records += 1
            if len(self._pending) >= _PENDING_BYTES:
                self._flush()
        except OSError as exc:
            self._disable(exc)

    def _flush(self) -> None:
        self._write(bytes(self._pending))
        self._pending.clear()

    def _write(self, records: bytes) -> None:
        if os.pwrite(self._fd, records, self._end) != len(records):
            raise OSError("short write")
        self._end += len(records)

    def _rewrite(self) -> None:
        """Write the table to a new file and rename it over the old one."""
        if _NEW_NAME in os.listdir(self._folder):
            os.unlink(_NEW_NAME, dir_fd=self._folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(_NEW_NAME, flags, 0o600, dir_fd=self._folder)
        try:
            os.posix_fallocate(fd, 0, self._bound)
            content = pack_journal_head(self._volume_id, self._slots) + self._table
            if os.pwrite(fd, content, 0) != len(content):
                raise OSError("short write")
            os.fdatasync(fd)
            os.rename(_NEW_NAME, JOURNAL_NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            os.fsync(self._folder)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._end = fd, len(content)
        self._pending.clear()
        empty = bytes(RECORD_BYTES)
        self._records = sum(
            self._table[at : at + RECORD_BYTES] != empty for at in range(0, len(self._table), RECORD_BYTES)
        )

    def _disable(self, exc: OSError) -> None:
        self.is_disabled = True
        log.warning("kv journal disabled, the next start scans the volume error=%s", exc.strerror or exc)
