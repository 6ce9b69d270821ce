"""Files and batches as they are kept on disk: one JSON document each."""

from typing import Literal

from msgspec import Struct

from tiercel.values.ids import TenantId

UploadPurpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
"""The purposes that a client may name. Files for batches are read by them; all others are kept and returned."""
Purpose = UploadPurpose | Literal["batch_output"]
Endpoint = str  # a path such as /v1/chat/completions
MESSAGES_ENDPOINT: Endpoint = "/v1/messages"
"""The endpoint of the batches of /v1/messages/batches; those of /v1/batches have others."""
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
STATUSES: tuple[BatchStatus, ...] = (*UNFINISHED, "completed", "failed", "expired", "cancelled")


class FileRecord(Struct, frozen=True, kw_only=True):
    """A file of a tenant. Times are Unix times."""

    id: str
    tenant: TenantId
    purpose: Purpose
    filename: str
    bytes: int
    created_s: float
    expires_s: float | None = None  # None: it is kept until it is deleted


class BatchFault(Struct, frozen=True, kw_only=True):
    """A fault of a batch: of a line of its input, or of the batch as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # the first line is 1


class BatchRecord(Struct, frozen=True, kw_only=True):
    """A batch of a tenant. Times are Unix times, None until the batch has reached the status."""

    id: str
    tenant: TenantId
    endpoint: Endpoint
    input_file_id: str
    created_s: float
    expires_s: float
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None  # of the files that it makes, from their creation
    total: int = 0  # lines
    completed: int = 0  # lines answered with status 200; counted again from the answers after a restart
    failed: int = 0  # all other answered lines
    faults: tuple[BatchFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    goal: BatchStatus | None = None  # the status after `finalizing` or `cancelling`
    in_progress_s: float | None = None
    finalizing_s: float | None = None
    completed_s: float | None = None
    failed_s: float | None = None
    expired_s: float | None = None
    cancelling_s: float | None = None
    cancelled_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the status is final."""
        return self.status not in UNFINISHED

    @property
    def is_of_messages(self) -> bool:
        """Whether it belongs to /v1/messages/batches, not to /v1/batches."""
        return self.endpoint == MESSAGES_ENDPOINT

    @property
    def left(self) -> int:
        """The number of requests without an answer."""
        return self.total - self.completed - self.failed
