"""The volume of the SSD tier: blocks in fixed slots of preallocated files, one file in each folder.

A cache may lose a block, but must never return a wrong one. Every read checks volume, slot, key and bytes of the block;
a block that fails the check is a miss.
"""

import itertools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tiercel.device.volume_file import FileCalls, ThreadBuffers, VolumeFile, is_aligned
from tiercel.device.volume_format import (
    ALIGN,
    FINGERPRINT_BYTES,
    KEY_BYTES,
    MAX_STRIPES,
    NO_KEY,
    SlotHeader,
    digest_of,
    find_digest,
    pack_header,
    parse_header,
    round_up,
    slot_bytes,
)
from tiercel.device.volume_layout import fit_layout, total_bytes
from tiercel.device.volume_opening import OpenedVolume, VolumeOpener
from tiercel.system.kv_folder import lock_folder
from tiercel.values.errors import ConfigError, InvariantError
from tiercel.values.units import show_bytes

_OPEN_SHIFT = 40  # a sequence number is (number of openings) << 40 | writes since the opening
_SCAN_THREADS = 4
_SCAN_SLOTS = 64  # slots that one thread reads as one piece
_EMPTY = bytes(ALIGN)  # the header of a slot that was never written
_SCAN_AHEAD = 4 * _SCAN_THREADS  # pieces in progress

log = logging.getLogger(__name__)


class Volume:
    """An open volume: blocks by slot. Every method may be called from any thread and blocks.

    A slot is written and read as a whole. `payload` and `into` are used in place if they are writable memory and their
    address and length are multiples of 4096; otherwise the bytes pass through a buffer of the calling thread.
    """

    def __init__(self, opened: OpenedVolume, closing: ExitStack) -> None:
        superblock = opened.superblock
        self.slots = superblock.slots
        self.block_bytes = superblock.block_bytes
        self.total_bytes = total_bytes(self.slots, len(opened.files), self.block_bytes)  # maximum on disk
        self.is_direct = all(file.is_direct for file in opened.files)
        self._files = opened.files
        self._volume_id = superblock.volume_id
        self._slot_bytes = slot_bytes(self.block_bytes)
        self._journal = opened.journal
        self._is_journal_complete = opened.is_journal_complete  # a clean shutdown is possible
        self._is_sound = True  # no sync has failed
        self._closing = closing
        self._touched = bytearray(self.slots)  # changed since opening; recovery skips them
        self._sequences = itertools.count(superblock.opens << _OPEN_SHIFT)
        self._scratch = ThreadBuffers(self.block_bytes)

    def write(self, slot: int, key: bytes, payload: memoryview) -> bytes:
        """Write a block into a slot and return the xxh3-128 digest of its bytes. The content of the slot is replaced.

        Errors: OSError; the slot then holds no readable block.
        """
        self._check(slot, key, payload)
        digest = digest_of(payload)
        sequence = next(self._sequences)
        scratch = self._scratch
        scratch.header[:] = pack_header(self._volume_id, slot, sequence, payload.nbytes, key, digest)
        file, at = self._place(slot)
        self._touched[slot] = 1
        file.write((scratch.header, self._aligned(file, payload)), at)
        self._journal.append(slot, key, sequence)
        return digest

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        """Read the block of this key and length into `into`, and check all its bytes.

        Return False if the slot does not hold that block; the content of `into` is then undefined.
        Errors: OSError.
        """
        self._check(slot, key, into)
        file, at = self._place(slot)
        scratch = self._scratch
        is_in_place = not file.is_direct or is_aligned(into)
        target = into if is_in_place else scratch.payload[: round_up(into.nbytes)]
        wanted = ALIGN + into.nbytes
        if file.read((scratch.header, target), at) < wanted:
            return False
        digest = find_digest(scratch.header, self._volume_id, slot, into.nbytes, key)
        if digest is None or digest != digest_of(target[: into.nbytes]):
            return False
        if not is_in_place:
            into[:] = target[: into.nbytes]
        return True

    def sync(self) -> None:
        """Make all writes durable. Errors: OSError; the volume must then not be used any more."""
        try:
            for file in self._files:
                file.sync()
        except OSError:
            self._is_sound = False
            raise

    def check_files(self) -> None:
        """Check that the files were not deleted. Errors: OSError; the volume must then not be used any more."""
        try:
            for file in self._files:
                file.check_name()
        except OSError:
            self._is_sound = False
            raise

    def recover(self) -> Iterator[tuple[int, bytes]]:
        """Yield (slot, key) of the blocks that the volume held at opening, ordered by slot.

        The source is the journal after a clean shutdown, otherwise a scan of the headers. One thread may iterate while
        others read and write blocks; slots changed since opening are skipped. If a key occurs twice, its newest copy
        comes last. Only `read` checks keys against blocks. Headers that cannot be read are skipped and logged.
        """
        found = self._journal.entries() if self._is_journal_complete else self._scan()
        newest: dict[bytes, int] = {}
        for slot, key, sequence in found:
            if self._touched[slot] or newest.get(key, -1) > sequence:
                continue
            newest[key] = sequence
            yield slot, key

    def close(self) -> None:
        """Sync, write the clean-shutdown record if the journal is complete, and close descriptors and locks.

        No other call may be in progress. Disk errors are logged, not raised: a volume that is not closed cleanly is
        scanned at the next opening.
        """
        if self._is_sound:
            try:
                self.sync()
            except OSError as exc:
                log.warning("kv volume not closed cleanly error=%s", exc.strerror)
        self._journal.close(is_complete=self._is_journal_complete and self._is_sound)
        for file in self._files:
            file.close()
        self._closing.close()

    def __enter__(self) -> "Volume":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scan(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield (slot, key, sequence) of every header, and append them to the journal for the next clean shutdown."""
        pieces = [range(first, min(first + _SCAN_SLOTS, self.slots)) for first in range(0, self.slots, _SCAN_SLOTS)]
        lost: list[int] = []
        damaged: list[int] = []
        with ThreadPoolExecutor(_SCAN_THREADS, "kv-scan") as pool:
            for first in range(0, len(pieces), _SCAN_AHEAD):
                for found, unread, wrong in pool.map(self._read_headers, pieces[first : first + _SCAN_AHEAD]):
                    lost += unread
                    damaged += wrong
                    for header in found:
                        if not self._touched[header.slot]:
                            self._journal.append(header.slot, header.key, header.sequence)
                            yield header.slot, header.key, header.sequence
        for slots, what in ((lost, "cannot be read"), (damaged, "are damaged")):
            if slots:
                log.warning("kv volume has headers that %s slots=%d first_slot=%d", what, len(slots), slots[0])
        self._is_journal_complete = True

    def _read_headers(self, slots: range) -> tuple[list[SlotHeader], list[int], list[int]]:
        """Return the valid headers of a piece, the slots whose headers cannot be read, and those with damaged ones."""
        raw = self._scratch.header
        found: list[SlotHeader] = []
        unread: list[int] = []
        damaged: list[int] = []
        for slot in slots:
            file, at = self._place(slot)
            try:
                header = parse_header(raw) if file.read((raw,), at) == ALIGN else None
            except OSError:
                unread.append(slot)
                continue
            if header is not None and header.volume_id == self._volume_id and header.slot == slot:
                found.append(header)
            elif bytes(raw) != _EMPTY and not self._touched[slot]:
                damaged.append(slot)
        return found, unread, damaged

    def _place(self, slot: int) -> tuple[VolumeFile, int]:
        count = len(self._files)
        return self._files[slot % count], ALIGN + slot // count * self._slot_bytes

    def _aligned(self, file: VolumeFile, payload: memoryview) -> memoryview:
        if not file.is_direct or is_aligned(payload):
            return payload
        size = round_up(payload.nbytes)
        buffer = self._scratch.payload[:size]
        buffer[: payload.nbytes] = payload
        buffer[payload.nbytes :] = bytes(size - payload.nbytes)
        return buffer

    def _check(self, slot: int, key: bytes, payload: memoryview) -> None:
        self._check_slot(slot)
        if len(key) != KEY_BYTES or key == NO_KEY:
            raise InvariantError("volume.key", slot=slot, key_bytes=len(key))
        if not 0 < payload.nbytes <= self.block_bytes or payload.format != "B" or not payload.c_contiguous:
            raise InvariantError("volume.payload", slot=slot, got=payload.nbytes, limit=self.block_bytes)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise InvariantError("volume.slot", slot=slot, slots=self.slots)


def open_volume(
    folders: tuple[Path, ...],
    capacity_bytes: int,
    block_bytes: int,
    fingerprint: bytes,
    *,
    lock: bool = False,
    calls: FileCalls | None = None,
) -> Volume:
    """Open the volume in these folders, or create it. A volume that does not match is replaced, with a warning.

    The files in all folders together take at most `capacity_bytes`. With `lock` the folders are locked until the
    volume is closed; otherwise the caller must have locked them (`lock_folder`).
    Effects: missing folders are created with mode 0700. Only superblocks and the journal are read.
    Errors:  ConfigError with a message for the operator.
    """
    if not 1 <= len(folders) <= MAX_STRIPES:
        raise ConfigError("kv.folders", f"a volume has 1 to {MAX_STRIPES} folders, not {len(folders)}")
    if block_bytes < 1 or not 0 < len(fingerprint) <= FINGERPRINT_BYTES:
        raise InvariantError("volume.kind", block_bytes=block_bytes, fingerprint_bytes=len(fingerprint))
    layout = fit_layout(capacity_bytes, len(folders), block_bytes)
    if layout is None:
        least = total_bytes(len(folders), len(folders), block_bytes)
        raise ConfigError(
            "kv.too_small",
            f"{show_bytes(capacity_bytes)} on disk is less than one block per folder needs "
            f"({show_bytes(least)} for {len(folders)} of {show_bytes(block_bytes)})",
        )
    with ExitStack() as closing:
        if lock:
            for folder in folders:
                closing.callback(os.close, lock_folder(folder))
        opener = VolumeOpener(folders, layout, block_bytes, fingerprint, calls or FileCalls(), closing)
        try:
            opened = opener.run()
        except OSError as exc:
            names = " and ".join(map(str, folders))
            raise ConfigError("kv.disk", f"cannot open the volume in {names}: {exc.strerror or exc}") from exc
        return Volume(opened, closing.pop_all())
