"""Copies that an earlier engine left in memory. Each is compared with its checksum before it is used."""

from collections.abc import Iterable

from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import Purpose, Route, Tier


class UnverifiedCopies:
    """The copies of the gateway that no check has proven yet. Their slots are held; no sequence can hit them."""

    def __init__(self, tiers: TierSet) -> None:
        self._tiers = tiers
        self._slot_by_key: dict[BlockKey, SlotId] = {}

    def __len__(self) -> int:
        return len(self._slot_by_key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slot_by_key

    def attach(self, records: Iterable[tuple[SlotId, BlockKey]]) -> None:
        """Hold the slots of these copies until they are verified. A key that comes twice counts once."""
        for slot, key in records:
            if key not in self._slot_by_key and self._tiers.gateway.take_at(slot, by_transfer=True):
                self._slot_by_key[key] = slot

    def verify(self, key: BlockKey, purpose: Purpose) -> None:
        """Compare a copy with its checksum, unless the block has come from elsewhere meanwhile."""
        tiers, slot = self._tiers, self._slot_by_key.pop(key)
        if key in tiers.gateway.slot_by_key or tiers.transfers.is_flying(Tier.DDR, key):
            tiers.gateway.discard(slot)
        else:
            tiers.transfers.queue(tiers.transfers.open(Route.VERIFY, purpose, (key,), (slot,)))

    def verify_some(self) -> None:
        """Verify copies in the background, as many as the limits allow."""
        transfers, limits = self._tiers.transfers, self._tiers.limits
        while self._slot_by_key and transfers.blocks(Route.VERIFY, Purpose.BACKGROUND) < limits.fetch_blocks:
            self.verify(next(iter(self._slot_by_key)), Purpose.BACKGROUND)

    def slots(self) -> Iterable[SlotId]:
        """Return the slots that are held, for checks."""
        return self._slot_by_key.values()
