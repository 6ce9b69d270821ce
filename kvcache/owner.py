"""Whose copies those are: small numbers for tenants, and how much each keeps at least and at most."""

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from tiercel.errors import InvariantError
from tiercel.ids import TenantId
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import Slots
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tenant_holding import TenantHolding
from tiercel.tenant import KvQuota, Tenants
from tiercel.tier import Tier

_MAX_OWNERS = 60_000  # told apart; the pools keep two bytes a slot
_AT_ONCE = 128  # tenants whose limits are set in one piece
_FLOOR_SHARE = 0.1  # of a memory tier that tenants keep by weight, whoever floods it


class Held(Struct, frozen=True, gc=False):
    """What the tables of tenants hold; three lists in parallel, in the order in which the tenants have come."""

    tenants: list[TenantId]
    owners: Slots  # their numbers
    blocks: Slots


class OwnerBook:
    """Numbers tenants as they come, and writes quotas and floors, in blocks, where the tiers read them."""

    def __init__(self, blocks_by_tier_and_owner: dict[tuple[Tier, int], int], pools: tuple[SlotPool, ...]) -> None:
        self._max_blocks = blocks_by_tier_and_owner
        self._pools = pools  # of the tiers in memory
        self._owner_by_tenant: dict[TenantId, int] = {}
        self._holding_by_tenant: dict[TenantId, TenantHolding] = {}
        self._tenants: list[TenantId] = []  # in the order in which they came
        self._sizes: array[int] = array("i")  # of their holdings
        self._quotas: dict[TenantId, KvQuota] = {}
        self._floors: dict[TenantId, float] = {}  # parts of a tier
        self._block_bytes = 0

    def held(self) -> Held:
        """What the tables of every tenant that has come hold. Cost: numpy's alone."""
        owners = np.minimum(np.arange(1, len(self._tenants) + 1), _MAX_OWNERS)
        return Held(self._tenants, owners, np.array(self._sizes, np.intp))

    def holding(self, tenant: TenantId) -> TenantHolding:
        """What the tables of a tenant that has come hold; each of them writes it."""
        return self._holding_by_tenant[tenant]

    def max_blocks(self, tenant: TenantId) -> int | None:
        """The tenant's quota in the device tier; None: it has none."""
        return self._most(self._quotas.get(tenant, KvQuota()).hbm)

    def __getitem__(self, tenant: TenantId) -> int:
        """The tenant's number, from 1."""
        owner = self._owner_by_tenant.get(tenant)
        if owner is None:
            owner = self._owner_by_tenant[tenant] = min(len(self._owner_by_tenant) + 1, _MAX_OWNERS)
            self._holding_by_tenant[tenant] = TenantHolding(self._sizes, len(self._tenants))
            self._tenants.append(tenant)
            self._sizes.append(0)
            self._write(tenant, owner)
        return owner

    def set_tenants(self, tenants: Tenants, block_bytes: int) -> None:
        """Set new quotas and weights for all tenants at once. A tenant alone needs no floor."""
        for _ in self.changing_tenants(tenants, block_bytes):
            pass

    def changing_tenants(self, tenants: Tenants, block_bytes: int) -> Iterator[None]:
        """Set new quotas and weights, in pieces of about 1 ms."""
        self._block_bytes = block_bytes
        weights = sum(share.weight for share in tenants.tenants)
        is_alone = len(tenants.tenants) < 2
        left = self._quotas.keys() - {share.name for share in tenants.tenants}
        yield
        for number, share in enumerate(tenants.tenants, 1):
            self._quotas[share.name] = share.kv_quota
            self._floors[share.name] = 0.0 if is_alone else _FLOOR_SHARE * share.weight / weights
            owner = self._owner_by_tenant.get(share.name)
            if owner is not None:
                self._write(share.name, owner)
            if number % _AT_ONCE == 0:
                yield
        for number, tenant in enumerate(left, 1):
            del self._quotas[tenant], self._floors[tenant]
            owner = self._owner_by_tenant.get(tenant)
            if owner is not None:
                self._write(tenant, owner)
            if number % _AT_ONCE == 0:
                yield

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Every holding is what the tables say. Errors: InvariantError."""
        counted = {holding: TenantHolding() for holding in self._holding_by_tenant.values()}
        for table in tables:
            counted[table.holding].add(table.slots)
        wrong = [tenant for tenant, holding in self._holding_by_tenant.items() if not holding.is_same(counted[holding])]
        if wrong:
            raise InvariantError("owner.holding", tenants=wrong[:8])

    def _most(self, max_bytes: int | None) -> int | None:
        """A quota in blocks; None: there is none, or nobody knows yet how large a block is."""
        return None if max_bytes is None or not self._block_bytes else max_bytes // self._block_bytes

    def _write(self, tenant: TenantId, owner: int) -> None:
        quota = self._quotas.get(tenant, KvQuota())
        self._holding_by_tenant[tenant].max_blocks = self._most(quota.hbm)
        for tier, max_bytes in ((Tier.DDR, quota.ddr), (Tier.SSD, quota.ssd)):
            maximum = self._most(max_bytes)
            if maximum is None:
                self._max_blocks.pop((tier, owner), None)
            else:
                self._max_blocks[tier, owner] = maximum
        for pool in self._pools:
            floor = int(self._floors.get(tenant, 0.0) * pool.blocks)
            if floor:
                pool.floor_by_owner[owner] = floor
            else:
                pool.floor_by_owner.pop(owner, None)
