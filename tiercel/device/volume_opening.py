"""Open a volume in its folders, or create it."""

import errno
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tiercel.device.journal_format import RECORD_BYTES
from tiercel.device.volume_file import FileCalls, VolumeFile, create_volume_file, open_volume_file
from tiercel.device.volume_format import ALIGN, ID_BYTES, VOLUME_NAME, Superblock, pack_superblock, parse_superblock
from tiercel.device.volume_journal import VolumeJournal, read_journal, unlink_journal
from tiercel.device.volume_layout import VolumeLayout
from tiercel.system.kv_folder import open_folder
from tiercel.values.errors import ConfigError
from tiercel.values.units import show_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedVolume:
    """An opened volume. `is_journal_complete`: the journal lists every slot, so no scan is needed."""

    files: tuple[VolumeFile, ...]
    superblock: Superblock
    journal: VolumeJournal
    is_journal_complete: bool


class VolumeOpener:
    """Opens one volume. It holds the wanted properties and the files opened so far."""

    def __init__(
        self,
        folders: tuple[Path, ...],
        layout: VolumeLayout,
        block_bytes: int,
        fingerprint: bytes,
        calls: FileCalls,
        closing: ExitStack,
    ) -> None:
        self._folders = folders
        self._layout = layout
        self._block_bytes = block_bytes
        self._fingerprint = fingerprint
        self._calls = calls
        self._closing = closing
        self._handles: list[int] = []
        self._files: list[VolumeFile] = []

    def run(self) -> OpenedVolume:
        """Open the volume, or create it. Everything opened is closed by the stack.

        Errors: ConfigError, OSError.
        """
        for folder in self._folders:
            handle = open_folder(folder, may_create=True)
            self._closing.callback(os.close, handle)
            self._handles.append(handle)
        if len({(found.st_dev, found.st_ino) for found in map(os.fstat, self._handles)}) < len(self._handles):
            raise ConfigError("kv.same_folder", f"the same folder twice: {' and '.join(map(str, self._folders))}")
        with ExitStack() as undo:
            undo.callback(self._close_files)
            first = self._find()
            replay = read_journal(self._handles[0], first.volume_id, first.slots) if first else None
            is_complete = first is None or (replay is not None and replay.is_clean)
            if first is None:
                first = self._create()
            first = replace(first, opens=first.opens + 1)
            self._write_superblocks(first)
            table = replay.table if replay is not None and is_complete else bytearray(first.slots * RECORD_BYTES)
            journal = VolumeJournal(self._handles[0], first.volume_id, table)
            journal.start()
            undo.pop_all()
        log.info(
            "kv volume opened folders=%d slots=%d block_bytes=%d direct=%s index=%s",
            *(len(self._files), first.slots, first.block_bytes, all(file.is_direct for file in self._files)),
            "journal" if is_complete else "scan",
        )
        return OpenedVolume(tuple(self._files), first, journal, is_complete)

    def _paths(self) -> Iterator[tuple[int, Path]]:
        return ((handle, folder / VOLUME_NAME) for handle, folder in zip(self._handles, self._folders, strict=True))

    def _find(self) -> Superblock | None:
        """Return the first superblock of an existing volume if all files match; else None."""
        found: list[Superblock] = []
        for handle, path in self._paths():
            file = open_volume_file(handle, path, self._calls)
            if file is None:
                continue
            self._files.append(file)
            block = read_superblock(file)
            reason = block if isinstance(block, str) else self._mismatch(block, len(found), found)
            if isinstance(block, str) or reason:
                log.warning("kv volume replaced path=%s reason=%r", path, reason)
                break
            found.append(block)
        if len(found) == len(self._folders):
            return found[0]
        if found:
            log.warning("kv volume replaced reason='the folders or their order differ'")
        self._close_files()
        return None

    def _mismatch(self, block: Superblock, stripe: int, before: list[Superblock]) -> str:
        """Return why a file does not match, as a predicate such as "has the wrong size"; empty if it matches."""
        if block.fingerprint != self._fingerprint:
            return "belongs to another model or block layout"
        if block.block_bytes != self._block_bytes:
            return f"has blocks of {block.block_bytes} bytes, not {self._block_bytes}"
        if block.slots != self._layout.slots:
            return f"has {block.slots} slots, not {self._layout.slots}"
        if (block.stripe, block.stripes) != (stripe, len(self._folders)):
            return "belongs to another set of folders"
        if before and block.volume_id != before[0].volume_id:
            return "belongs to another volume than the first folder"
        if os.fstat(self._files[-1].fd).st_size != block.file_bytes:
            return "has the wrong size"
        return ""

    def _create(self) -> Superblock:
        """Delete existing files and create fully allocated ones."""
        for handle, _ in self._paths():
            if VOLUME_NAME in os.listdir(handle):
                os.unlink(VOLUME_NAME, dir_fd=handle)
            unlink_journal(handle)
        slots, stripes = self._layout.slots, len(self._folders)
        first = Superblock(os.urandom(ID_BYTES), self._fingerprint, self._block_bytes, slots, 0, stripes, 0, 0)
        for handle, path in self._paths():
            try:
                self._files.append(create_volume_file(handle, path, first.file_bytes, self._calls))
            except OSError as exc:
                self._unlink_files()
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                found = os.fstatvfs(handle)
                free = found.f_bavail * found.f_frsize
                missing = first.file_bytes - free
                why = f"{show_bytes(missing)} are missing" if missing > 0 else (exc.strerror or "the disk refused")
                raise ConfigError(
                    "kv.no_room",
                    f"no room for {show_bytes(first.file_bytes)} in {path.parent}: {why}",
                    missing_bytes=max(0, missing),
                ) from exc
            os.fsync(handle)
        return replace(first, created_ns=os.fstat(self._files[0].fd).st_mtime_ns)

    def _write_superblocks(self, first: Superblock) -> None:
        page = memoryview(mmap.mmap(-1, ALIGN))
        for stripe, file in enumerate(self._files):
            page[:] = pack_superblock(replace(first, stripe=stripe))
            file.write((page,), 0)
            file.sync()

    def _close_files(self) -> None:
        while self._files:
            self._files.pop().close()

    def _unlink_files(self) -> None:
        self._close_files()
        for handle, _ in self._paths():
            if VOLUME_NAME in os.listdir(handle):
                os.unlink(VOLUME_NAME, dir_fd=handle)


def read_superblock(file: VolumeFile) -> Superblock | str:
    """Return the superblock of a file, or the reason why it is invalid as a predicate. Errors: OSError."""
    page = memoryview(mmap.mmap(-1, ALIGN))
    return parse_superblock(page) if file.read((page,), 0) == ALIGN else "is too short"
