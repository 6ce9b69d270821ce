"""The settings of files and batches. See `settings.py`."""

from functools import partial
from typing import Annotated

from tiercel.settings.answers import AnswerSettings
from tiercel.settings.groups import FILES
from tiercel.settings.option import SIZE, Option, read_size
from tiercel.values.units import GIB, KIB, MIB

_MAX_BYTES = 1024 * 1024 * GIB

_size = partial(Option, FILES, metavar="SIZE", read=read_size, expects=SIZE, is_rare=True, within=(KIB, _MAX_BYTES))


class BatchSettings(AnswerSettings, frozen=True, kw_only=True):
    """The files that tenants upload, and the batches of requests in them."""

    files_path: Annotated[
        str | None,
        Option(FILES, "Folder for uploaded files and batches; default: none, no /v1/files.", "DIR", is_rare=True),
    ] = None
    max_file_bytes: Annotated[int, _size(help="Maximum size of an uploaded file.", name="max_file_size")] = 200 * MIB
    max_tenant_files_bytes: Annotated[
        int, _size(help="Maximum size of a tenant's files, answers included.", name="max_tenant_files_size")
    ] = 2 * GIB
    max_files_bytes: Annotated[int, _size(help="Maximum size of all files.", name="max_files_size")] = 10 * GIB
    max_tenant_files: Annotated[
        int, Option(FILES, "Maximum files of a tenant.", "N", is_rare=True, within=(1, 100_000))
    ] = 1000
    batch_concurrency: Annotated[
        int, Option(FILES, "Lines of batches that are asked at a time.", "N", is_rare=True, within=(1, 1024))
    ] = 8
