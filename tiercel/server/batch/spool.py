"""The files of tenants on disk.

A file is `files/<id>.data` with its record `files/<id>.json`, which is written last and removed first: a file without a
record does not exist. An upload is in `partial/` until it is complete.
"""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import structlog

from tiercel.server.batch.durable import (
    NO_ROOM,
    CreationClock,
    create_file,
    make_folder,
    read_document,
    sync_folder,
    write_all,
    write_document,
)
from tiercel.server.batch.quota import SpaceBook, storage_full
from tiercel.server.batch.records import FileRecord, Purpose
from tiercel.system.file_fault import list_folder
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId

T = TypeVar("T")

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BUFFER_BYTES = 1024 * 1024  # of an upload that are written at once
MAX_UPLOADS = 4  # of a tenant at a time


class OnDisk(Protocol):
    """Runs work that waits for the disk in a thread, off the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class FileSpool:
    """The files of all tenants. `load` before use. Records are changed on the event loop only."""

    def __init__(self, folder: Path, space: SpaceBook, on_disk: OnDisk, wall_s: Callable[[], float]) -> None:
        self.space = space
        self._files = folder / "files"
        self._partial = folder / "partial"
        self._on_disk = on_disk
        self._wall_s = wall_s
        self._creations = CreationClock(wall_s)
        self._record_by_id: dict[str, FileRecord] = {}
        self._num_uploads: dict[TenantId, int] = {}
        self._log = structlog.stdlib.get_logger("server.files")

    def load(self) -> None:
        """Read the records, and remove what a crash has left: uploads, and data without a record. Errors: OSError."""
        for folder in (self._files, self._partial):
            make_folder(folder)
        for path in list_folder(self._partial):
            path.unlink()
        records: list[FileRecord] = []
        for path in list_folder(self._files, "file-*.json"):
            record = read_document(path, FileRecord)
            data = path.with_suffix(".data")
            if record is None or record.id != path.stem or not data.is_file() or data.stat().st_size != record.bytes:
                self._log.warning("file_damaged", file_id=path.stem)
                path.unlink()
                continue
            records.append(record)
        self._record_by_id = {record.id: record for record in sorted(records, key=lambda record: record.created_s)}
        for path in (*list_folder(self._files, "file-*.data"), *list_folder(self._files, ".*")):
            if path.stem not in self._record_by_id or path.name.startswith("."):
                path.unlink()
        for record in records:
            self.space.add(record.tenant, record.bytes, 1)
            self._creations.note(record.created_s)

    def of(self, tenant: TenantId) -> list[FileRecord]:
        """Return the files of a tenant, the oldest first."""
        return [record for record in self._record_by_id.values() if record.tenant == tenant]

    def find(self, tenant: TenantId, file_id: str) -> FileRecord | None:
        """Return a file of a tenant; None if the tenant has no such file."""
        record = self._record_by_id.get(file_id)
        return record if record is not None and record.tenant == tenant else None

    def expired(self) -> Iterator[FileRecord]:
        """Yield the files whose time is over."""
        now_s = self._wall_s()
        yield from [one for one in self._record_by_id.values() if one.expires_s is not None and one.expires_s <= now_s]

    def path_of(self, file_id: str) -> Path:
        """Return the path of the bytes of a file."""
        assert _FILE_ID.fullmatch(file_id)
        return self._files / f"{file_id}.data"

    @contextlib.contextmanager
    def uploading(self, tenant: TenantId) -> Generator["Upload"]:
        """Return a new upload; what it has not committed at the end of the block is removed.

        Errors: AdmissionError: 403 for the number of files, 429 for the number of uploads, 507 if the disk is full.
        """
        self.space.check_file(tenant)
        num_uploads = self._num_uploads.get(tenant, 0)
        if num_uploads >= MAX_UPLOADS:
            raise AdmissionError(
                429,
                f"{num_uploads} files are being uploaded, which is the limit. Please try again later.",
                code="rate_limit_exceeded",
                kind="rate_limit_error",
                retry_after_s=2,
            )
        self._num_uploads[tenant] = num_uploads + 1
        try:
            with Upload(self, tenant, self._partial / secrets.token_hex(16), self._on_disk) as upload:
                yield upload
        finally:
            self._num_uploads[tenant] -= 1
            if not self._num_uploads[tenant]:
                del self._num_uploads[tenant]

    async def adopt(
        self, source: Path, tenant: TenantId, file_id: str, filename: str, purpose: Purpose, lifetime_s: int | None
    ) -> FileRecord:
        """Make a file of the bytes in `source`, which the space book has counted. It is durable when this returns.

        The source gets a second name, so that nothing is lost if a crash comes before the record is written; the caller
        removes the first name. Errors: OSError; then there is no new file, and the call can be repeated.
        """
        target, created_s = self.path_of(file_id), self._creations.next_s()

        def link() -> FileRecord:
            target.unlink(missing_ok=True)
            os.link(source, target)
            record = FileRecord(
                id=file_id,
                tenant=tenant,
                purpose=purpose,
                filename=filename,
                bytes=target.stat().st_size,
                created_s=created_s,
                expires_s=None if lifetime_s is None else created_s + lifetime_s,
            )
            try:
                sync_folder(target.parent)
                write_document(target.with_suffix(".json"), record)
            except OSError:
                target.unlink()
                raise
            return record

        record = await self._on_disk(link)
        self._record_by_id[file_id] = record
        self.space.add(tenant, 0, 1)
        return record

    async def remove(self, record: FileRecord) -> None:
        """Remove a file, durably. Errors: OSError."""
        if self._record_by_id.pop(record.id, None) is None:
            return  # somebody else removes it
        self.space.add(record.tenant, -record.bytes, -1)
        data = self.path_of(record.id)

        def unlink() -> None:
            data.with_suffix(".json").unlink(missing_ok=True)
            sync_folder(data.parent)
            data.unlink(missing_ok=True)

        await self._on_disk(unlink)


class Upload:
    """A file that arrives. It is counted as it grows, and removed unless it is committed."""

    def __init__(self, spool: FileSpool, tenant: TenantId, path: Path, on_disk: OnDisk) -> None:
        self._spool = spool
        self._tenant = tenant
        self._path = path
        self._on_disk = on_disk
        self._fd: int | None = None
        self._buffer = bytearray()
        self._bytes = 0  # buffered ones included
        self._is_committed = False
        self._writing: asyncio.Future[None] | None = None

    def __enter__(self) -> "Upload":
        self._fd = _no_room(lambda: create_file(self._path))
        self._spool.space.add(self._tenant, 0, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_committed:
            self._spool.space.add(self._tenant, -self._bytes, -1)
        self._path.unlink(missing_ok=True)
        if self._writing is not None and not self._writing.done():  # the client has gone while a thread writes
            self._writing.add_done_callback(lambda _: self._close())
        else:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def write(self, data: bytes) -> None:
        """Add bytes. Errors: AdmissionError (403, 413, 507)."""
        self._spool.space.check(self._tenant, len(data), self._bytes + len(data))
        self._spool.space.add(self._tenant, len(data))
        self._bytes += len(data)
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            await self._flush(is_last=False)

    async def commit(self, filename: str, purpose: Purpose, lifetime_s: int | None) -> FileRecord:
        """Make the file durable and return its record. Errors: AdmissionError (507)."""
        await self._flush(is_last=True)
        file_id = new_file_id()
        try:
            record = await self._spool.adopt(self._path, self._tenant, file_id, filename, purpose, lifetime_s)
        except OSError as exc:
            raise _refusal(exc) from exc
        self._is_committed = True
        self._spool.space.add(self._tenant, 0, -1)  # the spool counts the file now
        return record

    async def _flush(self, *, is_last: bool) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        fd, offset = self._fd, self._bytes - len(buffer)
        assert fd is not None

        def write() -> None:
            write_all(fd, buffer, offset)
            if is_last:
                os.fsync(fd)

        self._writing = asyncio.ensure_future(self._on_disk(write))
        try:
            await asyncio.shield(self._writing)
        except OSError as exc:
            raise _refusal(exc) from exc


def new_file_id() -> str:
    """Return an id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def _refusal(error: OSError) -> AdmissionError:
    """Return the refusal of a file that the disk did not take. Errors: `error`, unless the disk is full."""
    if error.errno not in NO_ROOM:
        raise error
    return storage_full()


def _no_room(work: Callable[[], T]) -> T:
    try:
        return work()
    except OSError as exc:
        raise _refusal(exc) from exc
