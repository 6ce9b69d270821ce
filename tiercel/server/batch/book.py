"""The batches of all tenants, each kept on disk as a document of its current status."""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import structlog
from msgspec.structs import replace

from tiercel.server.batch.durable import CreationClock, make_folder, read_document, sync_folder, write_document
from tiercel.server.batch.records import MESSAGES_ENDPOINT, UNFINISHED, BatchRecord, BatchStatus
from tiercel.server.batch.spool import OnDisk
from tiercel.system.file_fault import list_folder
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId

COMPLETION_WINDOW_S = 24 * 3600
MAX_UNFINISHED = 100  # batches of a tenant
_KEPT_S = 30 * 24 * 3600  # after the end of a batch
_LEFT = ("*batch_*.out", "*batch_*.err", ".*")  # names that a finished batch has no more
_BATCH_ID = re.compile(r"(msg)?batch_[0-9a-f]{32}")


class BatchBook:
    """The batches. `load` before use. Records are changed on the event loop only, and one change at a time is written.

    `max_kept` is the number of batches of a tenant that are remembered, unfinished ones included.
    """

    def __init__(self, folder: Path, on_disk: OnDisk, wall_s: Callable[[], float], max_kept: int) -> None:
        self._folder = folder / "batches"
        self._on_disk = on_disk
        self._wall_s = wall_s
        self._creations = CreationClock(wall_s)
        self._max_kept = max(max_kept, MAX_UNFINISHED)
        self._record_by_id: dict[str, BatchRecord] = {}
        self._writing = asyncio.Lock()
        self._log = structlog.stdlib.get_logger("server.batches")

    def load(self) -> None:
        """Read the records; remove what belongs to no unfinished batch. Errors: OSError."""
        make_folder(self._folder)
        records: list[BatchRecord] = []
        for path in list_folder(self._folder, "*batch_*.json"):
            record = read_document(path, BatchRecord)
            if record is None or record.id != path.stem:
                self._log.warning("batch_damaged", batch_id=path.stem)
                path.unlink()
                continue
            records.append(record)
            self._creations.note(record.created_s)
        self._record_by_id = {record.id: record for record in sorted(records, key=lambda record: record.created_s)}
        for path in (path for pattern in _LEFT for path in list_folder(self._folder, pattern)):
            record = self._record_by_id.get(path.stem)
            if record is None or record.is_over:
                path.unlink()

    @property
    def num_by_status(self) -> Counter[BatchStatus]:
        """The number of batches in each status."""
        return Counter(record.status for record in self._record_by_id.values())

    def of(self, tenant: TenantId) -> list[BatchRecord]:
        """Return the batches of a tenant, the oldest first."""
        return [record for record in self._record_by_id.values() if record.tenant == tenant]

    def listed(self, tenant: TenantId, *, of_messages: bool = False) -> list[BatchRecord]:
        """Return the batches of a tenant at one of the two APIs, the oldest first."""
        return [record for record in self.of(tenant) if record.is_of_messages == of_messages]

    def find(self, tenant: TenantId, batch_id: str, *, of_messages: bool = False) -> BatchRecord | None:
        """Return a batch of a tenant at one of the two APIs; None if the tenant has no such batch there."""
        record = self._record_by_id.get(batch_id)
        is_found = record is not None and record.tenant == tenant and record.is_of_messages == of_messages
        return record if is_found else None

    def get(self, batch_id: str) -> BatchRecord:
        """Return the batch with this id, which exists."""
        return self._record_by_id[batch_id]

    def next_unfinished(self, tenant: TenantId, besides: Collection[str]) -> BatchRecord | None:
        """Return the oldest unfinished batch of a tenant that is not one of `besides`; None if there is none."""
        records = self.of(tenant)
        return next((record for record in records if not record.is_over and record.id not in besides), None)

    def tenants(self) -> Iterator[TenantId]:
        """Yield every tenant with an unfinished batch."""
        yield from dict.fromkeys(record.tenant for record in self._record_by_id.values() if not record.is_over)

    def user_of(self, file_id: str) -> BatchRecord | None:
        """Return an unfinished batch that reads the file; None if there is none."""
        records = self._record_by_id.values()
        return next((one for one in records if one.input_file_id == file_id and not one.is_over), None)

    def journal_paths(self, batch_id: str) -> tuple[Path, Path]:
        """Return the paths of the answers and of the errors of a batch."""
        assert _BATCH_ID.fullmatch(batch_id)
        return self._folder / f"{batch_id}.out", self._folder / f"{batch_id}.err"

    async def create(
        self,
        tenant: TenantId,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_lifetime_s: int | None,
        num_checked: int | None = None,
    ) -> BatchRecord:
        """Create a batch. It is durable when this returns. Errors: AdmissionError (429); OSError.

        `num_checked` is the number of lines of an input that has no faults; None if the input must be validated.
        """
        self.check_unfinished(tenant)
        now_s = self._creations.next_s()
        record = BatchRecord(
            id=f"{'msg' if endpoint == MESSAGES_ENDPOINT else ''}batch_{secrets.token_hex(16)}",
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_s=now_s,
            expires_s=now_s + COMPLETION_WINDOW_S,
            status="validating" if num_checked is None else "in_progress",
            in_progress_s=None if num_checked is None else now_s,
            total=num_checked or 0,
            metadata=metadata,
            output_lifetime_s=output_lifetime_s,
        )
        async with self._writing:
            await self._write(record)
        await self.forget(tenant)
        return record

    def check_unfinished(self, tenant: TenantId) -> None:
        """Check that a tenant may have another batch. Errors: AdmissionError (429)."""
        num_unfinished = sum(not record.is_over for record in self.of(tenant))
        if num_unfinished >= MAX_UNFINISHED:
            raise AdmissionError(
                429,
                f"You have {num_unfinished} unfinished batches, which is the limit. Please try again later.",
                code="rate_limit_exceeded",
                kind="rate_limit_error",
                retry_after_s=60,
            )

    async def remove(self, batch_id: str) -> None:
        """Remove a batch that is over, durably. Errors: OSError; then it is still there."""
        async with self._writing:
            if self._record_by_id.get(batch_id) is not None:
                await self._unlink(batch_id)

    async def change(
        self, batch_id: str, status: BatchStatus, *, only_from: Collection[BatchStatus] = UNFINISHED, **changes: object
    ) -> BatchRecord:
        """Change a batch to a status, durably, and note the time of the first change to it; return the batch.

        If its status is not one of `only_from`, it stays as it is. Errors: OSError; then it stays as it is.
        """
        async with self._writing:
            record = self._record_by_id[batch_id]
            if record.status not in only_from:
                return record
            name = f"{status}_s"
            if status != "validating" and getattr(record, name) is None:
                changes[name] = self._wall_s()
            await self._write(replace(record, status=status, **changes))
        return self._record_by_id[batch_id]

    def count(self, batch_id: str, *, completed: int, failed: int) -> None:
        """Set the counts of answered lines, which are not written: the answers are on disk."""
        record = self._record_by_id[batch_id]
        self._record_by_id[batch_id] = replace(record, completed=completed, failed=failed)

    async def forget(self, tenant: TenantId | None = None) -> None:
        """Remove batches that ended long ago, and the oldest ended ones beyond the number that is kept.

        Errors: OSError.
        """
        now_s = self._wall_s()
        tenants = (
            dict.fromkeys(record.tenant for record in self._record_by_id.values()) if tenant is None else (tenant,)
        )
        for name in tenants:
            records = self.of(name)
            surplus = len(records) - self._max_kept
            for record in records:
                if record.is_over and (surplus > 0 or now_s - record.expires_s > _KEPT_S):
                    surplus -= 1
                    await self._unlink(record.id)

    async def _unlink(self, batch_id: str) -> None:
        path = self._folder / f"{batch_id}.json"

        def unlink() -> None:
            path.unlink(missing_ok=True)
            sync_folder(path.parent)

        await self._on_disk(unlink)
        self._record_by_id.pop(batch_id, None)

    async def _write(self, record: BatchRecord) -> None:
        await self._on_disk(lambda: write_document(self._folder / f"{record.id}.json", record))
        before = self._record_by_id.get(record.id)
        if before is not None and not record.is_over:  # lines were counted meanwhile
            record = replace(record, completed=before.completed, failed=before.failed)
        self._record_by_id[record.id] = record
