"""The space that files may take: of one file, of a tenant, of all tenants."""

from collections import Counter

from msgspec import Struct

from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId


class SpaceLimits(Struct, frozen=True, kw_only=True):
    """The limits of space and number."""

    file_bytes: int
    tenant_bytes: int
    all_bytes: int
    tenant_files: int


class SpaceBook:
    """The bytes and files that tenants have, those that are being written included."""

    def __init__(self, limits: SpaceLimits) -> None:
        self.limits = limits
        self._bytes: Counter[TenantId] = Counter()
        self._files: Counter[TenantId] = Counter()

    @property
    def held_bytes(self) -> int:
        """The bytes of all tenants."""
        return self._bytes.total()

    @property
    def num_files(self) -> int:
        """The files of all tenants."""
        return self._files.total()

    def check_file(self, tenant: TenantId) -> None:
        """Check that a tenant may have another file. Errors: AdmissionError (403)."""
        limit = self.limits.tenant_files
        if self._files[tenant] >= limit:
            raise AdmissionError(
                403,
                f"You have {self._files[tenant]} files, and the limit is {limit}. Delete files that are not needed.",
                code="storage_quota_exceeded",
                kind="permission_error",
            )

    def check(self, tenant: TenantId, more_bytes: int, file_bytes: int) -> None:
        """Check that a file of a tenant may grow to `file_bytes` by `more_bytes`. Errors: AdmissionError."""
        limits = self.limits
        if file_bytes > limits.file_bytes:
            raise AdmissionError(
                413, f"The file is larger than {limits.file_bytes} bytes.", code="file_too_large", param="file"
            )
        if self._bytes[tenant] + more_bytes > limits.tenant_bytes:
            raise AdmissionError(
                403,
                f"Your files would take more than {limits.tenant_bytes} bytes, which is the limit."
                " Delete files that are not needed.",
                code="storage_quota_exceeded",
                kind="permission_error",
                param="file",
            )
        if self.held_bytes + more_bytes > limits.all_bytes:
            raise storage_full()

    def add(self, tenant: TenantId, more_bytes: int, more_files: int = 0) -> None:
        """Count bytes and files of a tenant; negative numbers release them."""
        for counts, more in ((self._bytes, more_bytes), (self._files, more_files)):
            counts[tenant] += more
            if not counts[tenant]:
                del counts[tenant]


def storage_full() -> AdmissionError:
    """Return the refusal of a file for which there is no space on the server."""
    return AdmissionError(
        507, "The server has no space for more files.", code="storage_full", kind="server_error", param="file"
    )
