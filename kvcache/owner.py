"""Whose copies those are: small numbers for tenants, and how much each may keep below the device tier."""

from collections.abc import Mapping

from tiercel.ids import TenantId
from tiercel.tenant import KvQuota
from tiercel.tier import Tier

_MOST_OWNERS = 60_000  # told apart; the pools keep two bytes a slot


class OwnerBook:
    """Numbers tenants as they come, and writes their quotas, in blocks, for the tiers to read."""

    def __init__(self, blocks_by_tier_and_owner: dict[tuple[Tier, int], int]) -> None:
        self._most_blocks = blocks_by_tier_and_owner
        self._owner_by_tenant: dict[TenantId, int] = {}
        self._quotas: dict[TenantId, KvQuota] = {}
        self._block_bytes = 0

    def __getitem__(self, tenant: TenantId) -> int:
        """The tenant's number, from 1."""
        owner = self._owner_by_tenant.get(tenant)
        if owner is None:
            owner = self._owner_by_tenant[tenant] = min(len(self._owner_by_tenant) + 1, _MOST_OWNERS)
            self._write(tenant, owner)
        return owner

    def set_quotas(self, quotas: Mapping[TenantId, KvQuota], block_bytes: int) -> None:
        """New quotas, for everybody at once."""
        self._quotas, self._block_bytes = dict(quotas), block_bytes
        for tenant, owner in self._owner_by_tenant.items():
            self._write(tenant, owner)

    def _write(self, tenant: TenantId, owner: int) -> None:
        quota = self._quotas.get(tenant, KvQuota())
        for tier, most_bytes in ((Tier.DDR, quota.ddr), (Tier.SSD, quota.ssd)):
            if most_bytes is None or not self._block_bytes:
                self._most_blocks.pop((tier, owner), None)
            else:
                self._most_blocks[tier, owner] = most_bytes // self._block_bytes
