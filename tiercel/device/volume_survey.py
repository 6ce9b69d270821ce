"""Inspect and delete a volume without a daemon. All bytes read are untrusted."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiercel.device.volume_file import FileCalls, VolumeFile, open_volume_file
from tiercel.device.volume_format import (
    ALIGN,
    FORMAT_VERSION,
    JOURNAL_NAME,
    VOLUME_NAME,
    SlotHeader,
    Superblock,
    digest_of,
    parse_header,
    round_up,
    slot_bytes,
)
from tiercel.device.volume_journal import read_journal, unlink_journal
from tiercel.device.volume_opening import read_superblock
from tiercel.system.kv_folder import lock_folder, lock_holder, open_folder
from tiercel.values.errors import ConfigError

SlotVerdict = Literal["good", "empty", "torn"]


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """The facts about one folder of a volume."""

    folder: str
    format_version: int
    fingerprint: str  # hexadecimal
    block_bytes: int
    stripe: int
    stripes: int
    slots: int  # of this folder
    used: int  # slots with a valid header
    file_bytes: int
    disk_bytes: int  # allocated by the file system, including the journal
    opens: int
    created_s: float  # wall clock
    written_s: float  # wall clock
    journal: Literal["clean", "unclean", "missing or damaged", "in the first folder"]
    holder: int | None  # pid of the daemon that uses the folder; 0: unknown; None: no daemon


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """The result of reading every slot of one folder."""

    good: int
    empty: int
    torn: tuple[int, ...]  # slot numbers of the volume


class FolderView:
    """The part of a volume in one folder, opened for reading."""

    def __init__(self, folder: Path, handle: int, file: VolumeFile, superblock: Superblock) -> None:
        self.superblock = superblock
        self._folder = folder
        self._handle = handle
        self._file = file
        self._page = memoryview(mmap.mmap(-1, ALIGN))
        self._payload = memoryview(mmap.mmap(-1, round_up(superblock.block_bytes)))

    def facts(self) -> FolderFacts:
        """Return the facts about the folder. Cost: a read of every header. Errors: OSError."""
        block = self.superblock
        file = os.fstat(self._file.fd)
        journal_blocks = 0
        if JOURNAL_NAME in os.listdir(self._handle):
            journal_blocks = os.stat(JOURNAL_NAME, dir_fd=self._handle, follow_symlinks=False).st_blocks
        return FolderFacts(
            folder=str(self._folder),
            format_version=FORMAT_VERSION,
            fingerprint=block.fingerprint.hex(),
            block_bytes=block.block_bytes,
            stripe=block.stripe,
            stripes=block.stripes,
            slots=block.slots_here,
            used=sum(self._header(index) is not None for index in range(block.slots_here)),
            file_bytes=file.st_size,
            disk_bytes=(file.st_blocks + journal_blocks) * 512,
            opens=block.opens,
            created_s=block.created_ns / 1e9,
            written_s=file.st_mtime,
            journal=self._journal(),
            holder=lock_holder(self._folder),
        )

    def check(self) -> SlotCounts:
        """Read every slot. Torn slots are read a second time at the end, because a daemon may have been writing them.

        A slot that cannot be read counts as torn. Errors: OSError.
        """
        counts = {"good": 0, "empty": 0, "torn": 0}
        torn: list[int] = []
        for index, verdict in self._verdicts(range(self.superblock.slots_here)):
            counts[verdict] += 1
            if verdict == "torn":
                torn.append(index)
        still: list[int] = []
        for index, verdict in self._verdicts(torn):
            if verdict == "torn":
                still.append(index * self.superblock.stripes + self.superblock.stripe)
            else:
                counts[verdict] += 1
        return SlotCounts(counts["good"], counts["empty"], tuple(still))

    def _verdicts(self, indices: "range | list[int]") -> Iterator[tuple[int, SlotVerdict]]:
        return ((index, self._verdict(index)) for index in indices)

    def _verdict(self, index: int) -> SlotVerdict:
        try:
            header = self._header(index)
            if header is None:
                return "torn" if any(self._page) else "empty"
            target = self._payload[: round_up(header.length)]
            if self._file.read((target,), self._at(index) + ALIGN) < header.length:
                return "torn"
        except OSError:
            return "torn"
        return "good" if digest_of(target[: header.length]) == header.digest else "torn"

    def _header(self, index: int) -> SlotHeader | None:
        """Return the header of a slot, or None if it is not valid for this slot. The page then holds its bytes."""
        block = self.superblock
        if self._file.read((self._page,), self._at(index)) != ALIGN:
            self._page[:] = b"\xff" * ALIGN  # not zeros: a slot behind the end of the file is torn, not empty
            return None
        header = parse_header(self._page)
        is_ours = (
            header is not None
            and header.volume_id == block.volume_id
            and header.slot == index * block.stripes + block.stripe
            and 0 < header.length <= block.block_bytes
        )
        return header if is_ours else None

    def _at(self, index: int) -> int:
        return ALIGN + index * slot_bytes(self.superblock.block_bytes)

    def _journal(self) -> Literal["clean", "unclean", "missing or damaged", "in the first folder"]:
        block = self.superblock
        if block.stripe:
            return "in the first folder"
        replay = read_journal(self._handle, block.volume_id, block.slots)
        if replay is None:
            return "missing or damaged"
        return "clean" if replay.is_clean else "unclean"


def view_folder(folder: Path, closing: ExitStack) -> FolderView:
    """Open the part of a volume in one folder for reading. It is closed by the stack.

    Errors: ConfigError if there is no readable volume.
    """
    handle = open_folder(folder, may_create=False)
    closing.callback(os.close, handle)
    try:
        file = open_volume_file(handle, folder / VOLUME_NAME, FileCalls(), may_write=False)
        if file is None:
            raise ConfigError("kv.no_volume", f"there is no volume in {folder}")
        closing.callback(file.close)
        superblock = read_superblock(file)
        if isinstance(superblock, str):
            raise ConfigError("kv.volume", f"{folder / VOLUME_NAME} {superblock}")
        if os.fstat(file.fd).st_size < superblock.file_bytes:
            raise ConfigError("kv.volume", f"{folder / VOLUME_NAME} is shorter than its superblock requires")
    except OSError as exc:
        raise ConfigError("kv.disk", f"cannot read the volume in {folder}: {exc.strerror}") from exc
    return FolderView(folder, handle, file, superblock)


def purge_folder(folder: Path) -> int:
    """Delete a volume's files in a folder. Return the number of bytes freed.

    Errors: ConfigError with the pid of the daemon that uses the folder.
    """
    handle = open_folder(folder, may_create=False)
    try:
        lock = lock_folder(folder)
        try:
            names = set(os.listdir(handle)) & {VOLUME_NAME, JOURNAL_NAME}
            freed = sum(os.stat(name, dir_fd=handle, follow_symlinks=False).st_blocks for name in names) * 512
            if VOLUME_NAME in names:
                os.unlink(VOLUME_NAME, dir_fd=handle)
            unlink_journal(handle)
        finally:
            os.close(lock)
    except OSError as exc:
        raise ConfigError("kv.disk", f"cannot empty {folder}: {exc.strerror}") from exc
    finally:
        os.close(handle)
    return freed
