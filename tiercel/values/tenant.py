"""Tenants: what the engine knows of each. Keys and rate limits stay in the HTTP process."""

from typing import Literal

from msgspec import Struct

from tiercel.values.ids import TenantId

PolicyName = Literal["fair", "priority", "fcfs"]
SloClass = Literal["interactive", "batch"]

DEFAULT_TENANT = TenantId("default")
"""The tenant of every request if there is no tenants file."""

LAST_BAND = 15
"""The lowest priority band. Band 0 is the highest."""


def served_band(policy: PolicyName, band: int) -> int:
    """Return the band in which a policy serves requests of a band. `fcfs` serves all of them in one.

    Nothing else decides whether bands count: the order of admission, preemptions and forecasts all ask here.
    """
    return 0 if policy == "fcfs" else band


class Slo(Struct, frozen=True, kw_only=True):
    """The latency goals of a tenant's requests."""

    kind: SloClass = "interactive"
    ttft_s: float | None = None  # goal of arrival to first token; None = none
    tbt_s: float | None = None  # goal of the gap between two tokens; None = none


class KvQuota(Struct, frozen=True, kw_only=True):
    """The maximum bytes of KV that a tenant may hold in each tier. None = no quota."""

    hbm: int | None = None
    ddr: int | None = None
    ssd: int | None = None


class TenantShare(Struct, frozen=True, kw_only=True):
    """One tenant as the scheduler and the cache see it."""

    name: TenantId
    weight: float = 1.0  # of the tenant's share of service, relative to the other tenants of its band
    band: int = 0  # the highest priority band that its requests may be in; a lower number is served first
    slo: Slo = Slo()
    kv_quota: KvQuota = KvQuota()
    group: str | None = None  # tenants of one group share cached prefixes; None = the tenant shares with no other

    def band_of(self, priority: int | None) -> int:
        """Return the band of a request with this priority: never a higher band than the tenant's own."""
        return min(max(self.band if priority is None else priority, self.band), LAST_BAND)


class Tenants(Struct, frozen=True):
    """All configured tenants. Requests of a tenant that was removed since may still run."""

    version: int  # starts at 1 and rises with every change
    tenants: tuple[TenantShare, ...]
