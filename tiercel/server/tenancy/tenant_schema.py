"""The fields of a tenants file and their allowed values."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tiercel.server.tenancy.tenants import digest_of
from tiercel.values.tenant import LAST_BAND
from tiercel.values.units import parse_bytes

MAX_TENANTS: Final = 10_000
MAX_KEYS: Final = 64  # per tenant

NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MAX_LETTERS = 512  # of a key or a secret
_MAX_PER_MINUTE = 10**12
_MAX_BYTES = 2**60


def _unfit(expects: str) -> PydanticCustomError:
    """Return the error of a field; `expects` completes the sentence "expected ..."."""
    return PydanticCustomError("unfit", "{expects}", {"expects": expects})


def _number(low: float, high: float) -> BeforeValidator:
    def check(value: object) -> float:
        # compared before it is converted: an integer may be too long for a float, and NaN is in no range
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise _unfit(f"a number from {low:g} to {high:g}")
        return float(value)

    return BeforeValidator(check)


def check_whole(value: object, low: int, high: int) -> int:
    """Return a whole number within limits. Errors: PydanticCustomError."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _unfit(f"a whole number from {low:,} to {high:,}")
    return value


def _whole(low: int, high: int) -> BeforeValidator:
    return BeforeValidator(lambda value: check_whole(value, low, high))


def _read_size(value: object) -> int:
    size = value
    if isinstance(value, str):
        try:
            size = parse_bytes(value)
        except (ValueError, OverflowError):
            size = None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _MAX_BYTES:
        raise _unfit("a size such as 1073741824, 512M or 2GiB, below 1 EiB")
    return size


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_LETTERS:
        raise _unfit(f"text of 1 to {_MAX_LETTERS} letters (numbers in quotes)")
    return value


def _read_name(value: object) -> str:
    text = _read_text(value)
    if not NAME.fullmatch(text):
        raise _unfit("1 to 64 of a-z, 0-9, _ and -")
    return text


def _read_class(value: object) -> str:
    if value not in ("interactive", "batch"):
        raise _unfit("interactive or batch")
    return cast(str, value)


def _digest_of_key(key: object) -> bytes:
    is_text = isinstance(key, str)
    if not is_text or not 0 < len(key) <= _MAX_LETTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise _unfit(f"1 to {_MAX_LETTERS} printable ASCII letters without spaces (numbers in quotes)")
    return digest_of(key)


def _digest_of_hash(key: object) -> bytes:
    if not isinstance(key, str) or not _SHA256.fullmatch(key):
        raise _unfit("the 64 hexadecimal digits of a SHA-256")
    return bytes.fromhex(key)


def _one(read: Callable[[object], bytes]) -> BeforeValidator:
    return BeforeValidator(lambda value: (read(value),))


def _several(read: Callable[[object], bytes]) -> BeforeValidator:
    def check(value: object) -> tuple[bytes, ...]:
        keys = cast(list[object], value) if isinstance(value, list) else [value]
        if not 1 <= len(keys) <= MAX_KEYS:
            raise _unfit(f"1 to {MAX_KEYS} keys")
        return tuple(read(key) for key in keys)

    return BeforeValidator(check)


def _read_entries(value: object) -> list[object]:
    if not isinstance(value, list) or not 1 <= len(cast(list[object], value)) <= MAX_TENANTS:
        raise _unfit(f"a list of 1 to {MAX_TENANTS:,} tenants")
    return cast(list[object], value)


Digests = tuple[bytes, ...]
Size = Annotated[int | None, BeforeValidator(_read_size)]
PerMinute = Annotated[int | None, _whole(1, _MAX_PER_MINUTE)]


class StrictFields(BaseModel):
    """A mapping with known fields only. A field that is given may not be null."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SloFields(StrictFields):
    """The latency goals of a tenant."""

    kind: Annotated[Literal["interactive", "batch"], BeforeValidator(_read_class)] = Field("interactive", alias="class")
    ttft_s: Annotated[float | None, _number(0.001, 86_400)] = None
    tbt_s: Annotated[float | None, _number(0.001, 3600)] = None


class QuotaFields(StrictFields):
    """The maximum KV of a tenant in each tier."""

    hbm: Size = None
    ddr: Size = None
    ssd: Size = None


class BestEffortFields(StrictFields):
    """The permitted reductions of a tenant's service under overload."""

    max_tokens: Annotated[int | None, _whole(1, 2**31 - 1)] = None
    band: Annotated[int | None, _whole(0, LAST_BAND)] = None  # not below the tenant's own band


class TenantFields(StrictFields):
    """One tenant."""

    name: Annotated[str, BeforeValidator(_read_name)]
    key: Annotated[Digests, _one(_digest_of_key)] = ()
    keys: Annotated[Digests, _several(_digest_of_key)] = ()
    key_sha256: Annotated[Digests, _one(_digest_of_hash)] = ()
    keys_sha256: Annotated[Digests, _several(_digest_of_hash)] = ()
    group: Annotated[str | None, BeforeValidator(_read_name)] = None
    weight: Annotated[float, _number(0.01, 1000)] = 1.0
    band: Annotated[int, _whole(0, LAST_BAND)] = 0
    slo: SloFields = SloFields.model_validate({})
    kv_quota_bytes: QuotaFields = QuotaFields()
    requests_per_minute: PerMinute = None
    tokens_per_minute: PerMinute = None
    max_concurrency: Annotated[int | None, _whole(1, 1_000_000)] = None
    queue_share: Annotated[float | None, _number(0.0001, 1)] = None
    queue_timeout_s: Annotated[float | None, _number(0.001, 86_400)] = None
    best_effort: BestEffortFields = BestEffortFields()  # full service only, unless the field is given

    @property
    def digests(self) -> Digests:
        """The digests of all keys of the tenant."""
        return self.key + self.keys + self.key_sha256 + self.keys_sha256


class DocumentFields(StrictFields):
    """A tenants file; each tenant is checked separately."""

    admin_key: Annotated[Digests, _one(_digest_of_key)] = ()
    admin_key_sha256: Annotated[Digests, _one(_digest_of_hash)] = ()
    secret: Annotated[str | None, BeforeValidator(_read_text)] = None
    tenants: Annotated[list[Any], BeforeValidator(_read_entries)]  # Any: checked as `TenantFields`


FIELDS_BY_PATH: Final[Mapping[tuple[str, ...], type[StrictFields]]] = {
    (): TenantFields,
    ("slo",): SloFields,
    ("kv_quota_bytes",): QuotaFields,
    ("best_effort",): BestEffortFields,
}
"""The fields that are allowed at each path inside a tenant."""


def field_names(fields: type[StrictFields]) -> list[str]:
    """Return the names of fields as a file spells them."""
    return [field.alias or name for name, field in fields.model_fields.items()]
