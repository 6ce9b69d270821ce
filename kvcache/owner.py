"""Whose copies those are: small numbers for tenants, and how much each keeps at least and at most."""

from collections.abc import Iterable

from kvcache.holding import Holding
from kvcache.pool import SlotPool
from kvcache.table import BlockTable
from tiercel.errors import InvariantError
from tiercel.ids import TenantId
from tiercel.tenant import KvQuota, Tenants
from tiercel.tier import Tier

_MOST_OWNERS = 60_000  # told apart; the pools keep two bytes a slot
_FLOOR_SHARE = 0.1  # of a memory tier that tenants keep by weight, whoever floods it


class OwnerBook:
    """Numbers tenants as they come, and writes quotas and floors, in blocks, where the tiers read them."""

    def __init__(self, blocks_by_tier_and_owner: dict[tuple[Tier, int], int], pools: tuple[SlotPool, ...]) -> None:
        self._most_blocks = blocks_by_tier_and_owner
        self._pools = pools  # of the tiers in memory
        self._owner_by_tenant: dict[TenantId, int] = {}
        self._holding_by_tenant: dict[TenantId, Holding] = {}
        self._quotas: dict[TenantId, KvQuota] = {}
        self._floors: dict[TenantId, float] = {}  # parts of a tier
        self._block_bytes = 0

    def held(self) -> dict[TenantId, tuple[int, int]]:
        """The number of every tenant that has come, and how many blocks its tables hold. Cost: O(tenants)."""
        holdings = self._holding_by_tenant
        return {tenant: (owner, len(holdings[tenant])) for tenant, owner in self._owner_by_tenant.items()}

    def holding(self, tenant: TenantId) -> Holding:
        """What the tables of a tenant that has come hold; each of them writes it."""
        return self._holding_by_tenant[tenant]

    def most_blocks(self, tenant: TenantId) -> int | None:
        """The tenant's quota in the device tier; None: it has none."""
        return self._most(self._quotas.get(tenant, KvQuota()).hbm)

    def __getitem__(self, tenant: TenantId) -> int:
        """The tenant's number, from 1."""
        owner = self._owner_by_tenant.get(tenant)
        if owner is None:
            owner = self._owner_by_tenant[tenant] = min(len(self._owner_by_tenant) + 1, _MOST_OWNERS)
            self._holding_by_tenant[tenant] = Holding()
            self._write(tenant, owner)
        return owner

    def set_tenants(self, tenants: Tenants, block_bytes: int) -> None:
        """New quotas and weights, for everybody at once. A tenant alone needs no floor."""
        self._block_bytes = block_bytes
        self._quotas = {share.name: share.kv_quota for share in tenants.tenants}
        weights = sum(share.weight for share in tenants.tenants)
        is_alone = len(tenants.tenants) < 2
        self._floors = {
            share.name: 0.0 if is_alone else _FLOOR_SHARE * share.weight / weights for share in tenants.tenants
        }
        for tenant, owner in self._owner_by_tenant.items():
            self._write(tenant, owner)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Every holding is what the tables say. Errors: InvariantError."""
        counted = {holding: Holding() for holding in self._holding_by_tenant.values()}
        for table in tables:
            counted[table.holding].add(table.slots)
        wrong = [tenant for tenant, holding in self._holding_by_tenant.items() if not holding.is_same(counted[holding])]
        if wrong:
            raise InvariantError("owner.holding", tenants=wrong[:8])

    def _most(self, most_bytes: int | None) -> int | None:
        """A quota in blocks; None: there is none, or nobody knows yet how large a block is."""
        return None if most_bytes is None or not self._block_bytes else most_bytes // self._block_bytes

    def _write(self, tenant: TenantId, owner: int) -> None:
        quota = self._quotas.get(tenant, KvQuota())
        self._holding_by_tenant[tenant].most_blocks = self._most(quota.hbm)
        for tier, most_bytes in ((Tier.DDR, quota.ddr), (Tier.SSD, quota.ssd)):
            most = self._most(most_bytes)
            if most is None:
                self._most_blocks.pop((tier, owner), None)
            else:
                self._most_blocks[tier, owner] = most
        for pool in self._pools:
            floor = int(self._floors.get(tenant, 0.0) * pool.blocks)
            if floor:
                pool.floor_by_owner[owner] = floor
            else:
                pool.floor_by_owner.pop(owner, None)
