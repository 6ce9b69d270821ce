"""Reading of the tenants file. An error names the file, the tenant, the field, the value and the allowed values."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tiercel.server.tenancy.operator_document import MAX_BYTES, DocumentError, read_yaml
from tiercel.server.tenancy.tenant_schema import (
    FIELDS_BY_PATH,
    NAME,
    DocumentFields,
    StrictFields,
    TenantFields,
    field_names,
)
from tiercel.server.tenancy.tenants import BestEffort, Limits, Tenant, scope_of
from tiercel.system.file_trust import check_named_file
from tiercel.values.errors import ConfigError
from tiercel.values.ids import TenantId
from tiercel.values.tenant import LAST_BAND, KvQuota, Slo, TenantShare

F = TypeVar("F", bound=StrictFields)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """The content of a tenants file."""

    tenants: tuple[Tenant, ...]
    admin_digests: tuple[bytes, ...]  # empty if the file has no admin key
    secret: bytes


def load_tenant_file(path: Path, *, others: Sequence[bytes] = ()) -> TenantConfig:
    """Read and check a tenants file; see `read_tenants`. Errors: ConfigError with one line."""
    try:
        with path.open("rb") as file:
            check_named_file(os.fstat(file.fileno()), str(path))
            text = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError("tenants.file", f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        value = read_yaml(text)
    except DocumentError as exc:
        raise ConfigError("tenants.file", f"{path}: {exc}") from exc
    return read_tenants(value, str(path), others=others)


def read_tenants(value: object, place: str, *, secret: bytes = b"", others: Sequence[bytes] = ()) -> TenantConfig:
    """Check the content of a document and return its tenants.

    `place` names the document in errors; `secret` is used if the document has none; `others` are digests of admin
    keys, which no tenant may have.
    Errors: ConfigError with one line.
    """
    try:
        document = DocumentFields.model_validate(value)
    except ValidationError as exc:
        raise _refusal(exc, f"{place}: ", place, DocumentFields) from None
    admin_digests = document.admin_key + document.admin_key_sha256
    secret = secret if document.secret is None else document.secret.encode()
    tenants: list[Tenant] = []
    names: set[str] = set()
    owner_by_digest = dict.fromkeys((*admin_digests, *others), "the admin")
    for index, entry in enumerate(document.tenants):
        tenant = _tenant(entry, place, index, secret)
        name = tenant.name
        if name in names:
            raise _wrong(f"{place}: tenant {name}: name: another tenant has it")
        names.add(name)
        for digest in tenant.digests:
            if digest in owner_by_digest:
                owner = owner_by_digest[digest]
                raise _wrong(
                    f"{place}: tenant {name}: key {digest.hex()[:8]}… (sha256): "
                    f"{'it has it twice' if owner == name else f'{owner} has it too'}"
                )
            owner_by_digest[digest] = name
        tenants.append(tenant)
    return TenantConfig(tuple(tenants), admin_digests, secret)


def _tenant(entry: object, place: str, index: int, secret: bytes) -> Tenant:
    try:
        fields = TenantFields.model_validate(entry)
    except ValidationError as exc:
        raise _refusal(exc, _tenant_place(entry, place, index), f"{place}: tenants[{index}]", TenantFields) from None
    where = f"{place}: tenant {fields.name}: "
    if not fields.digests:
        raise _wrong(f"{where}key: expected a key, or key_sha256, keys or keys_sha256")
    share = TenantShare(
        name=TenantId(fields.name),
        weight=fields.weight,
        band=fields.band,
        slo=Slo(kind=fields.slo.kind, ttft_s=fields.slo.ttft_s, tbt_s=fields.slo.tbt_s),
        kv_quota=KvQuota(**fields.kv_quota_bytes.model_dump()),
        group=fields.group,
    )
    limits = Limits(
        requests_per_minute=fields.requests_per_minute,
        tokens_per_minute=fields.tokens_per_minute,
        max_concurrency=fields.max_concurrency,
        queue_share=fields.queue_share,
        queue_timeout_s=fields.queue_timeout_s,
    )
    scope = scope_of(fields.name, fields.group, secret)
    return Tenant(share, scope, fields.digests, limits, _best_effort(fields, where))


def _best_effort(fields: TenantFields, where: str) -> BestEffort | None:
    if "best_effort" not in fields.model_fields_set:
        return None
    max_tokens, band = fields.best_effort.max_tokens, fields.best_effort.band
    if max_tokens is None and band is None:
        raise _wrong(f"{where}best_effort: expected max_tokens, band or both")
    if band is not None and band < fields.band:
        raise _wrong(f"{where}best_effort.band {band}: expected a whole number from {fields.band} to {LAST_BAND}")
    return BestEffort(max_tokens, band)


def _tenant_place(entry: object, place: str, index: int) -> str:
    """Return the start of an error message: it names the tenant, or its index if it has no valid name."""
    name = cast(dict[str, object], entry).get("name") if isinstance(entry, dict) else None
    if isinstance(name, str) and NAME.fullmatch(name):
        return f"{place}: tenant {name}: "
    return f"{place}: tenants[{index}]: "


def _refusal(error: ValidationError, where: str, whole: str, fields: type[StrictFields]) -> ConfigError:
    """Return the error for the first wrong field. `whole` names the mapping that contains the fields."""
    found = error.errors(include_url=False)[0]
    loc = tuple(str(part) for part in found["loc"])
    path, name = ".".join(loc), loc[-1] if loc else ""
    match found["type"]:
        case "extra_forbidden":
            known = field_names(FIELDS_BY_PATH[loc[:-1]] if fields is TenantFields else fields)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": expected one of {', '.join(known)}"
            return _wrong(f"{where}{path[:64]}: there is no such field{hint}")
        case "model_type" | "model_attributes_type":
            place = f"{where}{path}" if loc else whole
            return _wrong(f"{place}: expected fields such as `name: value`, found {_show(found['input'])}")
        case "missing":
            expects = "a list of 1 to 10,000 tenants" if path == "tenants" else "text of 1 to 512 letters"
            return _wrong(f"{where}{path}: expected {expects}")
        case _:
            return _wrong(f"{where}{path} {_shown_input(name, found)}: expected {found['msg']}")


def _shown_input(name: str, found: ErrorDetails) -> str:
    return "***" if "key" in name or name == "secret" else _show(found["input"])


def _show(value: object) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case bool():
            return str(value).lower()
        case _:
            text = str(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
            return text if 0 < len(text) <= 80 and text.isprintable() else f"{text[:80]!r}"


def _wrong(message: str) -> ConfigError:
    return ConfigError("tenants.value", message)
