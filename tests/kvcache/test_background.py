"""The cost of background work for the step that does it."""

from array import array

from tiercel.kvcache.background import BackgroundWork
from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import as_slots
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tenant_holding import TenantHolding
from tiercel.kvcache.tiers import TierLimits, TierSet
from tiercel.kvcache.verification import UnverifiedCopies
from tiercel.values.ids import BlockKey, SeqId, SlotId
from tiercel.values.rates import Rates
from tiercel.values.tier import Route

SIZE, CHAINS, BLOCKS = 4, 64, 200
RATES = Rates(bytes_per_s_by_route={Route.PREFETCH: 4e9, Route.PERSIST: 4e9}, prefill_token_s=1e-3, block_bytes=64)
MAX_LOOKS = 1024


class CountingTraffic(DiskTraffic):
    """Counts the blocks that are looked up on the disk."""

    looks = 0

    def has_copy(self, key: BlockKey) -> bool:
        self.looks += 1
        return super().has_copy(key)


def test_all_chains_of_a_step_share_one_budget_of_looks() -> None:
    device, disk = SlotPool(CHAINS * BLOCKS), SlotPool(CHAINS * BLOCKS)
    tiers = TierSet(device, None, disk, TierLimits())
    traffic = CountingTraffic(tiers)
    background = BackgroundWork(tiers, traffic, UnverifiedCopies(tiers), SIZE, lambda: RATES)
    for number in range(CHAINS):  # every block is on the disk already: the look at a chain ends at its tail
        tokens = array("I", [number] * (BLOCKS * SIZE))
        table = BlockTable(SeqId(number), BlockKey(bytes(32)), tokens, 0, TenantHolding())
        table.key(BLOCKS - 1, SIZE)
        table.extend(device.take_slots(BLOCKS))
        for block, slot in enumerate(table.slots):
            device.publish(SlotId(slot), table.key(block, SIZE))
            assert disk.adopt(SlotId(number * BLOCKS + block + 1), table.key(block, SIZE))
        table.num_published = BLOCKS
        background.note_ended(table)
        device.drop_many(as_slots(table.slots), 0)
    steps = total = 0
    while background.has_unsaved:
        traffic.looks = 0
        background.work((), float(steps), is_idle=True)
        assert traffic.looks <= MAX_LOOKS
        total += traffic.looks
        steps += 1
        assert steps < 2 * CHAINS
    assert total == CHAINS * BLOCKS, "each block is looked at once"
