"""Answers of the /admin routes: tenants, settings and versions. Keys and secrets are masked."""

from typing import Any, Literal

from msgspec import Struct, field

from tiercel.server.control.configuration import Occasion


class QuotaReply(Struct, frozen=True):
    """The KV quota of a tenant by tier, in bytes; null where it has none."""

    hbm: int | None
    ddr: int | None
    ssd: int | None


class SloReply(Struct, frozen=True):
    """The service level objective of a tenant."""

    kind: Literal["interactive", "batch"] = field(name="class")
    ttft_s: float | None
    tbt_s: float | None


class BestEffortReply(Struct, frozen=True):
    """The reduced service of a tenant under overload."""

    max_tokens: int | None
    band: int | None


class TenantReply(Struct, frozen=True, kw_only=True):
    """One tenant and its limits; null where it has no such limit."""

    name: str
    keys_sha256: list[str]  # the first eight digits of each
    weight: float
    band: int
    group: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    queue_share: float | None
    queue_timeout_s: float | None
    kv_quota_bytes: QuotaReply
    slo: SloReply
    best_effort: BestEffortReply | None


class TenantsReply(Struct, frozen=True):
    """The tenants in force."""

    version: int
    source: str
    tenants: list[TenantReply]


class SettingReply(Struct, frozen=True):
    """One setting in force."""

    value: Any  # Any: a JSON value of the type of the setting
    source: str
    name: str | None  # of the flag or variable, or path of the file; null for a default
    is_live: bool  # may change while the server runs


class ConfigReply(Struct, frozen=True):
    """The settings in force."""

    version: int
    source: Occasion
    changed_at: str  # ISO 8601, UTC
    settings: dict[str, SettingReply]


class ReloadReply(Struct, frozen=True):
    """The versions in force after a reload."""

    config_version: int
    tenants_version: int
