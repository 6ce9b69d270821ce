"""Files and batches of one server: its folder, from the start to the end of the process.

One process at a time uses the folder. A daemon that takes over from another one waits until that one has left it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from starlette.types import ASGIApp

from tiercel.server.batch.book import BatchBook
from tiercel.server.batch.durable import FolderLock, make_folder
from tiercel.server.batch.quota import SpaceBook, SpaceLimits
from tiercel.server.batch.records import MESSAGES_ENDPOINT, STATUSES, BatchRecord, FileRecord
from tiercel.server.batch.route_call import RouteCaller
from tiercel.server.batch.spool import FileSpool
from tiercel.server.batch.worker import BatchWorker, Conditions
from tiercel.server.tenancy.admission import shutting_down
from tiercel.settings.settings import ServerSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import AdmissionError, ConfigError, system_error
from tiercel.values.ids import TenantId

T = TypeVar("T")

_DISK_THREADS = 4
_LOCK_POLL_S = 0.2
_REOPEN_S = 10.0  # until a folder that could not be used is tried again
_SWEEP_S = 60.0

MESSAGES_LIFETIME_S = 29 * 24 * 3600
"""Seconds from the creation of a message batch to the time at which its results may be removed, as Anthropic has it."""
_MESSAGES_INPUT = "message_batch.jsonl"


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """The folder of this process."""

    spool: FileSpool
    book: BatchBook
    worker: BatchWorker


class BatchService:
    """Opens the folder, runs the worker, and removes what has expired."""

    def __init__(
        self,
        settings: ServerSettings,
        folder: Path,
        conditions: Conditions,
        clock: Clock,
        wall_s: Callable[[], float],
        *,
        reopen_s: float = _REOPEN_S,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._conditions = conditions
        self._clock = clock
        self._wall_s = wall_s
        self._reopen_s = reopen_s
        self._threads = ThreadPoolExecutor(_DISK_THREADS, "files")
        self._lock = FolderLock(folder)
        self._open: OpenFolder | None = None
        self._failure: str | None = None  # why the folder could not be opened the last time
        self._has_stopped = False
        self._keeping: asyncio.Task[None] | None = None
        self._is_busy = False  # another process has the folder
        self._opened = asyncio.Event()
        self._log = structlog.stdlib.get_logger("server.files")

    @staticmethod
    def of(
        settings: ServerSettings,
        conditions: Conditions,
        clock: Clock,
        wall_s: Callable[[], float],
        *,
        is_takeover: bool = False,
    ) -> "BatchService | None":
        """Return the service, or None without --files-path. Errors: ConfigError if there can be no such folder.

        A takeover must not end for the folder: it is tried again and again, and its routes answer 503 until then.
        """
        if settings.files_path is None:
            return None
        folder = Path(settings.files_path).expanduser().resolve()
        if is_takeover:
            return BatchService(settings, folder, conditions, clock, wall_s)
        try:
            make_folder(folder)
            lock = FolderLock(folder)
            if lock.try_lock():  # checks that files can be written
                lock.release()
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            raise ConfigError("config.files_path", f"--files-path {settings.files_path}: {reason}") from exc
        return BatchService(settings, folder, conditions, clock, wall_s)

    def start(self, app: ASGIApp) -> None:
        """Open the folder as soon as no other process has it, and go on with its batches over the routes of `app`."""
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every malformed form
        self._keeping = asyncio.create_task(self._keep(app))

    async def wait_open(self) -> None:
        """Wait until the folder has been opened for the first time."""
        await self._opened.wait()

    async def stop(self) -> None:
        """Stop the worker and leave the folder to another process. It may be called twice."""
        self._has_stopped = True
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
            self._keeping = None
        folder, self._open = self._open, None
        if folder is not None:
            await folder.worker.stop()
        self._lock.release()
        self._threads.shutdown(wait=False)

    @property
    def folder(self) -> OpenFolder:
        """The open folder.

        Errors: AdmissionError (503) if the server drains, another process has the folder, or it cannot be used.
        """
        if self._has_stopped:
            raise shutting_down()
        if self._open is None:
            if self._failure is not None:
                reason = "their folder cannot be used"
            else:
                reason = "another server process is using them" if self._is_busy else "their folder is being read"
            raise AdmissionError(
                503,
                f"The files are not available yet: {reason}. Please try again later.",
                code="files_busy" if self._failure is None else "files_unavailable",
                kind="server_error",
                retry_after_s=1,
            )
        return self._open

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run work that waits for the disk in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def create_batch(
        self,
        tenant: TenantId,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_lifetime_s: int | None,
    ) -> BatchRecord:
        """Create a batch and begin to work on it. Errors: AdmissionError (429); OSError."""
        folder = self.folder
        record = await folder.book.create(tenant, endpoint, input_file_id, metadata, output_lifetime_s)
        folder.worker.wake(tenant)
        return record

    async def create_message_batch(self, tenant: TenantId, lines: AsyncIterable[bytes], count: int) -> BatchRecord:
        """Store checked lines, create a batch of them and begin to work on it.

        Errors: AdmissionError (403, 413, 429, 507); OSError.
        """
        folder = self.folder
        folder.book.check_unfinished(tenant)
        with folder.spool.uploading(tenant) as upload:
            async for piece in lines:
                await upload.write(piece)
            file = await upload.commit(_MESSAGES_INPUT, "batch", MESSAGES_LIFETIME_S)
        try:
            record = await folder.book.create(
                tenant, MESSAGES_ENDPOINT, file.id, None, MESSAGES_LIFETIME_S, num_checked=count
            )
        except (AdmissionError, OSError):
            await folder.spool.remove(file)
            raise
        folder.worker.wake(tenant)
        return record

    async def remove_batch(self, record: BatchRecord) -> None:
        """Remove a batch that is over, and the files of its answers. Errors: OSError; it can be repeated."""
        folder = self.folder
        for file_id in (record.output_file_id, record.error_file_id):
            file = None if file_id is None else folder.spool.find(record.tenant, file_id)
            if file is not None:
                await folder.spool.remove(file)
        await folder.book.remove(record.id)

    async def remove_file(self, record: FileRecord) -> None:
        """Remove a file. Errors: AdmissionError (409) if a batch reads it; OSError."""
        folder = self.folder
        user = folder.book.user_of(record.id)
        if user is not None:
            raise AdmissionError(
                409,
                f"The batch {user.id} reads this file. Cancel the batch first.",
                code="file_in_use",
                param="file_id",
            )
        await folder.spool.remove(record)

    @property
    def num_by_status(self) -> dict[str, int]:
        """The number of batches in each status."""
        if self._open is None:
            return dict.fromkeys(STATUSES, 0)
        counts = self._open.book.num_by_status
        return {status: counts[status] for status in STATUSES}

    @property
    def num_lines(self) -> tuple[int, int]:
        """The lines answered since the start: with status 200, and all others."""
        return (0, 0) if self._open is None else (self._open.worker.num_completed, self._open.worker.num_failed)

    @property
    def held(self) -> tuple[int, int]:
        """The bytes and the number of all files."""
        return (0, 0) if self._open is None else (self._open.spool.space.held_bytes, self._open.spool.space.num_files)

    async def _keep(self, app: ASGIApp) -> None:
        folder = await self._try_open(app)
        while folder is None:
            await asyncio.sleep(self._reopen_s)
            folder = await self._try_open(app)
        folder.worker.start()
        while True:
            try:
                await self._sweep(folder)
            except OSError as exc:
                self._log.error("files_sweep_failed", reason=exc.strerror)
            await asyncio.sleep(_SWEEP_S)

    async def _try_open(self, app: ASGIApp) -> OpenFolder | None:
        """Open the folder; return None, with one line in the log for each reason, if it cannot be used."""
        try:
            folder = await self._open_folder(app)
        except OSError as exc:
            self._lock.release()
            reason = exc.strerror or type(exc).__name__
            if reason != self._failure:
                self._log.error("files_unreadable", folder=str(self._folder), reason=reason, error=system_error(exc))
            self._failure = reason
            return None
        self._failure = None
        self._opened.set()
        return folder

    async def _open_folder(self, app: ASGIApp) -> OpenFolder:
        make_folder(self._folder)
        while not self._lock.try_lock():
            if not self._is_busy:
                self._log.warning("files_busy", folder=str(self._folder))
            self._is_busy = True
            await asyncio.sleep(_LOCK_POLL_S)
        self._is_busy = False
        settings = self._settings
        space = SpaceBook(
            SpaceLimits(
                file_bytes=settings.max_file_bytes,
                tenant_bytes=settings.max_tenant_files_bytes,
                all_bytes=settings.max_files_bytes,
                tenant_files=settings.max_tenant_files,
            )
        )
        spool = FileSpool(self._folder, space, self.on_disk, self._wall_s)
        book = BatchBook(self._folder, self.on_disk, self._wall_s, settings.max_tenant_files)

        def load() -> None:
            spool.load()
            book.load()

        await self.on_disk(load)
        worker = BatchWorker(
            book, spool, RouteCaller(app), self._conditions, self.on_disk, self._clock, self._wall_s,
            concurrency=settings.batch_concurrency,
        )  # fmt: skip
        self._open = OpenFolder(spool, book, worker)
        self._log.info("files_open", files=space.num_files, bytes=space.held_bytes)
        return self._open

    async def _sweep(self, folder: OpenFolder) -> None:
        """Remove files and batches whose time is over."""
        for record in folder.spool.expired():
            if folder.book.user_of(record.id) is None:
                await folder.spool.remove(record)
        await folder.book.forget()
