"""The tenants file, checked field by field. A wrong one is told by file, tenant, field, value and what is allowed."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tiercel.errors import ConfigError
from tiercel.ids import TenantId
from tiercel.server.tenancy.document import MAX_BYTES, DocumentError, read_yaml
from tiercel.server.tenancy.tenants import BestEffort, Limits, Tenant, digest_of, scope_of
from tiercel.tenant import LAST_BAND, KvQuota, Slo, TenantShare
from tiercel.units import parse_bytes

MAX_TENANTS = 10_000
MAX_KEYS = 64  # of one tenant
_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MAX_LETTERS = 512  # of a key or a secret
_MOST = 10**12  # of what is counted by the minute
_MOST_BYTES = 2**60
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What a tenants file says."""

    tenants: tuple[Tenant, ...]
    admin_digests: tuple[bytes, ...]  # empty where it says nothing of them
    secret: bytes


def load_tenant_file(path: Path, *, others: Sequence[bytes] = ()) -> TenantConfig:
    """Read and check a tenants file; see `read_tenants`. Errors: ConfigError with one line."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError("tenants.file", f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        value = read_yaml(text)
    except DocumentError as exc:
        raise ConfigError("tenants.file", f"{path}: {exc}") from exc
    return read_tenants(value, str(path), others=others)


def read_tenants(value: object, place: str, *, secret: bytes = b"", others: Sequence[bytes] = ()) -> TenantConfig:
    """Check what a document says.

    `place` is named in errors; `secret` stands where the document has none; `others` are digests of admin keys that
    no tenant may have.
    Errors: ConfigError with one line.
    """
    top = _Fields(value, place)
    admin_digests = top.keys("admin_key", "admin_key_sha256")
    own_secret = top.text("secret")
    secret = secret if own_secret is None else own_secret.encode()
    entries = top.entries("tenants")
    top.end()
    tenants: list[Tenant] = []
    names: set[str] = set()
    owner_by_digest = dict.fromkeys((*admin_digests, *others), "the admin")
    for index, entry in enumerate(entries):
        tenant = _tenant(entry, place, index, secret)
        name = tenant.name
        if name in names:
            raise _wrong(f"{place}: tenant {name}: name: another tenant has it")
        names.add(name)
        for digest in tenant.digests:
            if digest in owner_by_digest:
                who = owner_by_digest[digest]
                raise _wrong(
                    f"{place}: tenant {name}: key {digest.hex()[:8]}… (sha256): "
                    f"{'it has it twice' if who == name else f'{who} has it too'}"
                )
            owner_by_digest[digest] = name
        tenants.append(tenant)
    return TenantConfig(tuple(tenants), admin_digests, secret)


def _tenant(entry: object, place: str, index: int, secret: bytes) -> Tenant:
    where = f"{place}: tenants[{index}]"
    name = _Fields(entry, where).text("name", needed=True) or ""
    if not _NAME.fullmatch(name):
        raise _wrong(f"{where}: name {_show(name)}: expected 1 to 64 of a-z, 0-9, _ and -")
    fields = _Fields(entry, f"{place}: tenant {name}")
    fields.text("name")
    digests = fields.keys("key", "keys", "key_sha256", "keys_sha256")
    if not digests:
        raise _wrong(f"{fields.place}: key: expected a key, or key_sha256, keys or keys_sha256")
    group = fields.text("group")
    if group is not None and not _NAME.fullmatch(group):
        raise _wrong(f"{fields.place}: group {_show(group)}: expected 1 to 64 of a-z, 0-9, _ and -")
    weight = fields.number("weight", 0.01, 1000)
    share = TenantShare(
        name=TenantId(name),
        weight=1.0 if weight is None else weight,
        band=fields.whole("band", 0, LAST_BAND) or 0,
        slo=_slo(fields.part("slo")),
        kv_quota=_quota(fields.part("kv_quota_bytes")),
        group=group,
    )
    limits = Limits(
        requests_per_minute=fields.whole("requests_per_minute", 1, _MOST),
        tokens_per_minute=fields.whole("tokens_per_minute", 1, _MOST),
        max_concurrency=fields.whole("max_concurrency", 1, 1_000_000),
        queue_share=fields.number("queue_share", 0.0001, 1),
    )
    best_effort = _best_effort(fields.part("best_effort"), share.band)
    fields.end()
    return Tenant(share, scope_of(name, group, secret), digests, limits, best_effort)


def _slo(fields: "_Fields | None") -> Slo:
    if fields is None:
        return Slo()
    kind = fields.text("class")
    if kind not in (None, "interactive", "batch"):
        raise _wrong(f"{fields.place}.class {_show(kind)}: expected interactive or batch")
    slo = Slo(
        kind=kind or "interactive",
        ttft_s=fields.number("ttft_s", 0.001, 86_400),
        tbt_s=fields.number("tbt_s", 0.001, 3600),
    )
    fields.end()
    return slo


def _quota(fields: "_Fields | None") -> KvQuota:
    if fields is None:
        return KvQuota()
    quota = KvQuota(hbm=fields.size("hbm"), ddr=fields.size("ddr"), ssd=fields.size("ssd"))
    fields.end()
    return quota


def _best_effort(fields: "_Fields | None", own_band: int) -> BestEffort | None:
    if fields is None:
        return None
    best_effort = BestEffort(fields.whole("max_tokens", 1, 2**31 - 1), fields.whole("band", own_band, LAST_BAND))
    fields.end()
    if best_effort == BestEffort():
        raise _wrong(f"{fields.place}: expected max_tokens, band or both")
    return best_effort


class _Fields:
    """The fields of one mapping. Those that were asked for are known; `end` refuses the others."""

    def __init__(self, value: object, place: str, joint: str = ": ") -> None:
        self.place = place
        self._joint = joint
        if not isinstance(value, dict):
            raise _wrong(f"{place}: expected fields such as `name: value`, found {_show(value)}")
        self._value_by_name = cast(Mapping[str, object], value)
        self._known: list[str] = []

    def text(self, name: str, *, needed: bool = False) -> str | None:
        value = self._take(name)
        if value is _ABSENT and not needed:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_LETTERS:
            raise self._unfit(name, value, f"text of 1 to {_MAX_LETTERS} letters (numbers in quotes)")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self._take(name)
        if value is _ABSENT:
            return None
        # compared before anything else is asked: an integer may be too long for a float; NaN is in no range
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self._unfit(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        value = self._take(name)
        if value is _ABSENT:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._unfit(name, value, f"a whole number from {least:,} to {most:,}")
        return value

    def size(self, name: str) -> int | None:
        value = self._take(name)
        if value is _ABSENT:
            return None
        wrong = self._unfit(name, value, "a size such as 1073741824, 512M or 2GiB, below 1 EiB")
        size = value
        if isinstance(value, str):
            try:
                size = parse_bytes(value)
            except (ValueError, OverflowError):
                raise wrong from None
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _MOST_BYTES:
            raise wrong
        return size

    def part(self, name: str) -> "_Fields | None":
        value = self._take(name)
        return None if value is _ABSENT else _Fields(value, self._path(name), ".")

    def entries(self, name: str) -> list[object]:
        value = self._take(name)
        entries = _list(value)
        if entries is None or not 1 <= len(entries) <= MAX_TENANTS:
            raise self._unfit(name, value, f"a list of 1 to {MAX_TENANTS:,} tenants")
        return entries

    def keys(self, *names: str) -> tuple[bytes, ...]:
        """The digests of keys that stand under any of these names, in the clear or hashed."""
        digests: list[bytes] = []
        for name in names:
            value = self._take(name)
            if value is _ABSENT:
                continue
            keys = (_list(value) if name.startswith("keys") else None) or [value]
            if not 1 <= len(keys) <= MAX_KEYS:
                raise _wrong(f"{self._path(name)}: expected 1 to {MAX_KEYS} keys")
            digests += [self._digest(name, key) for key in keys]
        return tuple(digests)

    def end(self) -> None:
        for name in self._value_by_name:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f": expected one of {', '.join(self._known)}"
                raise _wrong(f"{self._path(name[:64])}: there is no such field{hint}")

    def _take(self, name: str) -> object:
        self._known.append(name)
        return self._value_by_name.get(name, _ABSENT)

    def _digest(self, name: str, key: object) -> bytes:
        """The messages show nothing of a key."""
        is_text = isinstance(key, str)
        if name.endswith("_sha256"):
            if not is_text or not _SHA256.fullmatch(key):
                raise _wrong(f"{self._path(name)} ***: expected the 64 hexadecimal digits of a SHA-256")
            return bytes.fromhex(key)
        if not is_text or not 0 < len(key) <= _MAX_LETTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise _wrong(
                f"{self._path(name)} ***: expected 1 to {_MAX_LETTERS} printable ASCII letters without spaces"
                " (numbers in quotes)"
            )
        return digest_of(key)

    def _unfit(self, name: str, value: object, expected: str) -> ConfigError:
        shown = "" if value is _ABSENT else f" {'***' if name == 'secret' else _show(value)}"
        return _wrong(f"{self._path(name)}{shown}: expected {expected}")

    def _path(self, name: str) -> str:
        return f"{self.place}{self._joint}{name}"


def _list(value: object) -> list[object] | None:
    return cast(list[object], value) if isinstance(value, list) else None


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
