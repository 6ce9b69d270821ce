"""The bodies of /v1/files and /v1/batches."""

from typing import Annotated, Literal

from pydantic import Field

from tiercel.server.api.schemas.fields import Fields, Integer, Metadata
from tiercel.server.batch.records import UploadPurpose

MIN_LIFETIME_S = 3600
MAX_LIFETIME_S = 30 * 24 * 3600
_Lifetime = Annotated[Integer, Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)]


class FileFields(Fields):
    """The form of an upload. It is parsed piece by piece, see `server/batch/upload_form.py`."""

    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    purpose: Annotated[
        UploadPurpose, Field(description="Files for `batch` are read by batches; all others are kept and returned.")
    ]
    expires_after_anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    expires_after_seconds: Annotated[_Lifetime | None, Field(alias="expires_after[seconds]")] = None


class OutputLifetime(Fields):
    """The time after which the files of a batch are removed."""

    anchor: Literal["created_at"]
    seconds: _Lifetime


class BatchFields(Fields):
    """The body of /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputLifetime | None = None
