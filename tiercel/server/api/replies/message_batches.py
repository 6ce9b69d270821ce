"""Answers of /v1/messages/batches, in Anthropic's shape."""

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from tiercel.server.batch.records import BatchRecord
from tiercel.server.batch.service import MESSAGES_LIFETIME_S

_ENDS: dict[str, Literal["in_progress", "canceling", "ended"]] = {
    "validating": "in_progress",
    "in_progress": "in_progress",
    "finalizing": "in_progress",
    "cancelling": "canceling",
}


class MessageBatchCounts(Struct, frozen=True, kw_only=True):
    """The requests of a batch by the result that they have; all are `processing` until the batch has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int

    @classmethod
    def of(cls, record: BatchRecord) -> "MessageBatchCounts":
        """Return the counts of a batch; their sum is the number of its requests."""
        if not record.is_over:
            return cls(processing=record.total, succeeded=0, errored=0, canceled=0, expired=0)
        left = record.left
        return cls(
            processing=0,
            succeeded=record.completed,
            errored=record.failed + (left if record.status in ("completed", "failed") else 0),
            canceled=left if record.status == "cancelled" else 0,
            expired=left if record.status == "expired" else 0,
        )


class MessageBatch(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_batch"):
    """A batch. Times are in the form of RFC 3339."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: str | None  # the results are kept until then
    cancel_initiated_at: str | None
    results_url: str | None

    @classmethod
    def of(cls, record: BatchRecord, now_s: float, results_url: str) -> "MessageBatch":
        """Return the object of a batch."""
        ends = (record.completed_s, record.failed_s, record.expired_s, record.cancelled_s)
        archived_s = record.created_s + MESSAGES_LIFETIME_S
        is_archived = record.is_over and archived_s <= now_s
        return cls(
            id=record.id,
            processing_status=_ENDS.get(record.status, "ended"),
            request_counts=MessageBatchCounts.of(record),
            ended_at=next((_time(seconds) for seconds in ends if seconds is not None), None),
            created_at=_time(record.created_s),
            expires_at=_time(record.expires_s),
            archived_at=_time(archived_s) if is_archived else None,
            cancel_initiated_at=None if record.cancelling_s is None else _time(record.cancelling_s),
            results_url=results_url if record.is_over and not is_archived else None,
        )


class MessageBatchList(Struct, frozen=True, kw_only=True):
    """One page of the list of batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_batch_deleted"):
    """The confirmation that a batch was removed."""

    id: str


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
