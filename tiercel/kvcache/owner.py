"""Tenants as owners of copies: a small number for each, and how much each keeps at least and at most."""

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.quota import CopyQuotas
from tiercel.kvcache.slot_index import Slots
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tenant_holding import TenantHolding
from tiercel.values.errors import InvariantError
from tiercel.values.ids import TenantId
from tiercel.values.tenant import KvQuota, Tenants
from tiercel.values.tier import Tier

_MAX_OWNERS = 60_000  # further tenants share the last number: the pools keep two bytes for each slot
_TENANTS_PER_PIECE = 128  # whose limits are set at once
_FLOOR_SHARE = 0.1  # of a memory tier, which tenants keep by weight even if another tenant floods the tier


class TenantHoldings(Struct, frozen=True, gc=False):
    """The blocks in the tables of all tenants: three parallel lists, in the order in which the tenants came."""

    tenants: list[TenantId]
    owners: Slots  # their numbers
    blocks: Slots


class OwnerBook:
    """The number of every tenant, and its quotas and floors in blocks, which the book sets in the tiers."""

    def __init__(self, quotas: CopyQuotas, pools: tuple[SlotPool, ...]) -> None:
        """`pools` are those of the tiers in memory."""
        self._copy_quotas = quotas
        self._pools = pools
        self._owner_by_tenant: dict[TenantId, int] = {}
        self._holding_by_tenant: dict[TenantId, TenantHolding] = {}
        self._tenants: list[TenantId] = []  # in the order in which they came
        self._sizes: array[int] = array("i")  # of their holdings
        self._quota_by_tenant: dict[TenantId, KvQuota] = {}
        self._floor_by_tenant: dict[TenantId, float] = {}  # shares of a tier
        self._block_bytes = 0

    def __getitem__(self, tenant: TenantId) -> int:
        """Return the tenant's number, from 1. A new tenant gets the next one."""
        owner = self._owner_by_tenant.get(tenant)
        if owner is None:
            owner = self._owner_by_tenant[tenant] = min(len(self._owner_by_tenant) + 1, _MAX_OWNERS)
            self._holding_by_tenant[tenant] = TenantHolding(self._sizes, len(self._tenants))
            self._tenants.append(tenant)
            self._sizes.append(0)
            self._set_limits(tenant, owner)
        return owner

    def holding(self, tenant: TenantId) -> TenantHolding:
        """Return the holding of a tenant that has a number."""
        return self._holding_by_tenant[tenant]

    def holdings(self) -> TenantHoldings:
        """Return the holdings of all tenants that have a number. Cost: a few calls of numpy."""
        owners = np.minimum(np.arange(1, len(self._tenants) + 1), _MAX_OWNERS)
        return TenantHoldings(self._tenants, owners, np.array(self._sizes, np.intp))

    def max_blocks(self, tenant: TenantId) -> int | None:
        """Return the tenant's quota in the device tier; None: it has none."""
        return self._in_blocks(self._quota_by_tenant.get(tenant, KvQuota()).hbm)

    def set_tenants(self, tenants: Tenants, block_bytes: int) -> None:
        """Set new quotas and weights for all tenants. A tenant alone needs no floor."""
        for _ in self.changing_tenants(tenants, block_bytes):
            pass

    def changing_tenants(self, tenants: Tenants, block_bytes: int) -> Iterator[None]:
        """Do the same in pieces of about 1 ms."""
        self._block_bytes = block_bytes
        weights = sum(share.weight for share in tenants.tenants)
        is_alone = len(tenants.tenants) < 2
        left = self._quota_by_tenant.keys() - {share.name for share in tenants.tenants}
        yield
        for number, share in enumerate(tenants.tenants, 1):
            self._quota_by_tenant[share.name] = share.kv_quota
            self._floor_by_tenant[share.name] = 0.0 if is_alone else _FLOOR_SHARE * share.weight / weights
            owner = self._owner_by_tenant.get(share.name)
            if owner is not None:
                self._set_limits(share.name, owner)
            if number % _TENANTS_PER_PIECE == 0:
                yield
        for number, tenant in enumerate(left, 1):
            del self._quota_by_tenant[tenant], self._floor_by_tenant[tenant]
            owner = self._owner_by_tenant.get(tenant)
            if owner is not None:
                self._set_limits(tenant, owner)
            if number % _TENANTS_PER_PIECE == 0:
                yield

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Check that every holding agrees with the tables. Errors: InvariantError."""
        counted = {holding: TenantHolding() for holding in self._holding_by_tenant.values()}
        for table in tables:
            counted[table.holding].add(table.slots)
        wrong = [tenant for tenant, holding in self._holding_by_tenant.items() if not holding.is_same(counted[holding])]
        if wrong:
            raise InvariantError("owner.holding", tenants=wrong[:8])

    def _in_blocks(self, max_bytes: int | None) -> int | None:
        """Return a quota in blocks; None if there is none, or if the size of a block is not known yet."""
        return None if max_bytes is None or not self._block_bytes else max_bytes // self._block_bytes

    def _set_limits(self, tenant: TenantId, owner: int) -> None:
        quota = self._quota_by_tenant.get(tenant, KvQuota())
        self._holding_by_tenant[tenant].max_blocks = self._in_blocks(quota.hbm)
        self._copy_quotas.set_quota(Tier.DDR, owner, self._in_blocks(quota.ddr))
        self._copy_quotas.set_quota(Tier.SSD, owner, self._in_blocks(quota.ssd))
        for pool in self._pools:
            pool.victims.set_floor(owner, int(self._floor_by_tenant.get(tenant, 0.0) * pool.blocks))
