"""Answers of /v1/files and /v1/batches."""

from typing import Literal

from msgspec import Struct

from tiercel.server.batch.records import BatchFault, BatchRecord, BatchStatus, FileRecord, Purpose


class FileObject(Struct, frozen=True, kw_only=True):
    """A file. Times are Unix times in whole seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, record: FileRecord) -> "FileObject":
        """Return the object of a file."""
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=int(record.created_s),
            expires_at=_whole(record.expires_s),
            filename=record.filename,
            purpose=record.purpose,
        )


class FileList(Struct, frozen=True, kw_only=True):
    """One page of the list of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, kw_only=True):
    """The confirmation that a file was removed."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class RequestCounts(Struct, frozen=True):
    """The lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchErrors(Struct, frozen=True, kw_only=True):
    """The faults of a batch."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchObject(Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix times in whole seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> "BatchObject":
        """Return the object of a batch. Its files are named once they exist."""
        return cls(
            id=record.id,
            endpoint=record.endpoint,
            errors=BatchErrors(data=list(record.faults)) if record.faults else None,
            input_file_id=record.input_file_id,
            status=record.status,
            output_file_id=record.output_file_id if record.is_over else None,
            error_file_id=record.error_file_id if record.is_over else None,
            created_at=int(record.created_s),
            in_progress_at=_whole(record.in_progress_s),
            expires_at=int(record.expires_s),
            finalizing_at=_whole(record.finalizing_s),
            completed_at=_whole(record.completed_s),
            failed_at=_whole(record.failed_s),
            expired_at=_whole(record.expired_s),
            cancelling_at=_whole(record.cancelling_s),
            cancelled_at=_whole(record.cancelled_s),
            request_counts=RequestCounts(record.total, record.completed, record.failed),
            metadata=record.metadata,
        )


class BatchList(Struct, frozen=True, kw_only=True):
    """One page of the list of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
