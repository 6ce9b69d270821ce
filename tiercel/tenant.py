"""Who is served: what the engine must know of each tenant. Keys and rate limits stay in the HTTP process."""

from typing import Literal

from msgspec import Struct

from tiercel.ids import TenantId

SloClass = Literal["interactive", "batch"]

DEFAULT_TENANT = TenantId("default")
"""Whose every request is while no tenants file is given."""

LAST_BAND = 15
"""The band that goes last; band 0 goes first."""


class Slo(Struct, frozen=True, kw_only=True):
    """What a tenant's requests aim at."""

    kind: SloClass = "interactive"
    ttft_s: float | None = None  # goal of arrival to first token; None = none
    tbt_s: float | None = None  # goal of the gap between two tokens; None = none


class KvQuota(Struct, frozen=True, kw_only=True):
    """Most bytes of KV that a tenant may hold in a tier. None = no quota."""

    hbm: int | None = None
    ddr: int | None = None
    ssd: int | None = None


class TenantShare(Struct, frozen=True, kw_only=True):
    """One tenant as the scheduler and the cache see it."""

    name: TenantId
    weight: float = 1.0  # of its share of the service, against the other tenants of a band
    band: int = 0  # the first band its requests may be in; lower goes first
    slo: Slo = Slo()
    kv_quota: KvQuota = KvQuota()
    group: str | None = None  # tenants of one group share prefixes; None = its own alone

    def band_of(self, priority: int | None) -> int:
        """The band of a request that asks for a priority (lower goes first), never before the tenant's own."""
        return min(max(self.band if priority is None else priority, self.band), LAST_BAND)


class Tenants(Struct, frozen=True):
    """Every tenant that is configured. A request of a tenant that has left since may still run."""

    version: int  # rises with every change; 1 at the start
    tenants: tuple[TenantShare, ...]
