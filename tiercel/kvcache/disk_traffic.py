"""Reads from the SSD tier and writes to it, and the limits on both."""

from tiercel.kvcache.chain import WriteBudget
from tiercel.kvcache.slot_index import Slots
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import Purpose, Route, Tier, Transfer

_STUCK_S = 2.0  # a call to the disk that takes longer hangs
_MAX_LATE = 4  # reads that are late and have not come back; with so many of them no other read begins
_MAX_LOOKED_UP = 512  # blocks of a victim; of more, the first stand for all


class DiskTraffic:
    """The blocks that are read from and written to the disk, each by a transfer of its own."""

    def __init__(self, tiers: TierSet) -> None:
        self.budget = WriteBudget(tiers.limits.daily_blocks)
        self.read_blocks = 0  # that came up from the disk since the start
        self.stuck_blocks = 0  # of the device tier, held by calls that hang
        self.is_writable = True
        self.is_readable = tiers.disk is not None
        self._tiers = tiers
        self._started_s_by_transfer: dict[int, float] = {}
        self._now_s = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether a read may begin: the disk is not off, and not too many reads are late."""
        return self.is_readable and self._tiers.transfers.num_late < _MAX_LATE

    @property
    def writable_blocks(self) -> int:
        """Blocks that the disk has room for and that the daily budget allows now."""
        disk = self._tiers.disk
        if disk is None or not self.is_writable:
            return 0
        room, allowed = disk.num_free + disk.num_cached, self.budget.blocks
        return room if allowed is None else min(room, allowed)

    def note_time(self, now_s: float) -> None:
        """Refill the write budget, and count the device slots that hanging calls hold.

        With one arena for HBM and DDR a disk call holds a slot of the device tier. A plan must not count on the slots
        of calls that hang.
        """
        self._now_s = now_s
        self.budget.refill(now_s)
        if self._tiers.host is None:
            started_s = self._started_s_by_transfer.values()
            self.stuck_blocks = sum(now_s - one_s > _STUCK_S for one_s in started_s)

    def close(self, *, is_readable: bool) -> None:
        """Take no more writes; unless `is_readable`, no sequence waits for a read any more either."""
        self.is_writable = False
        self.is_readable = self.is_readable and is_readable

    # ---- facts about blocks

    def has_copy(self, key: BlockKey) -> bool:
        """Return whether the disk holds a block, or is about to."""
        return key in self._tiers.require_disk().slot_by_key or self._tiers.transfers.is_flying(Tier.SSD, key)

    def count_copies(self, table: BlockTable, blocks: Slots) -> int:
        """Count the blocks of a table that the disk holds; of very many, the first ones stand for all."""
        disk = self._tiers.disk
        if disk is None or not len(blocks):
            return 0
        looked_up = blocks[:_MAX_LOOKED_UP]
        found = sum(key in disk.slot_by_key for key in table.keys_of(looked_up))
        return found * len(blocks) // len(looked_up)

    def is_awaited(self, table: BlockTable, key: BlockKey) -> bool:
        """Return whether a block is on its way up and the waiting sequence of this table waits for it."""
        is_coming, waits_for_reads = self._tiers.transfers.is_coming, self.is_readable and not table.fetch.is_given_up
        return is_coming(Tier.HBM, key) or is_coming(Tier.DDR, key, with_reads=waits_for_reads)

    # ---- transfers

    def read(self, table: BlockTable, key: BlockKey, source: SlotId) -> int:
        """Read a block of a waiting sequence's prefix into the gateway. Return the transfer's id."""
        tiers, disk = self._tiers, self._tiers.require_disk()
        tiers.quotas.hold(disk, source)
        (target,) = tiers.gateway.take_many(1, by_transfer=True)
        tiers.quotas.own(tiers.gateway, target, disk.copies.owner(source))
        table.fetch.reads.add(key)
        opened = tiers.transfers.open(Route.PREFETCH, Purpose.PREFETCH, (key,), (source,), (target,), table)
        self._started_s_by_transfer[opened.id] = self._now_s
        tiers.transfers.queue(opened)
        return opened.id

    def write(self, key: BlockKey, source: SlotId, purpose: Purpose, table: BlockTable | None = None) -> Transfer:
        """Write a copy of the gateway, which the caller holds for the transfer, to the disk."""
        tiers, disk = self._tiers, self._tiers.require_disk()
        (target,) = disk.take_many(1, by_transfer=True)
        tiers.quotas.own(disk, target, tiers.gateway.copies.owner(source))
        self.budget.spend()
        opened = tiers.transfers.open(Route.PERSIST, purpose, (key,), (source,), (target,), table)
        if tiers.host is None and tiers.links is not None:
            tiers.links.link(source, target)
        self._started_s_by_transfer[opened.id] = self._now_s
        return opened

    def note_landing(self, transfer: Transfer, *, is_good: bool) -> None:
        """Note that a transfer is over."""
        self._started_s_by_transfer.pop(transfer.id, None)
        if transfer.route is Route.PREFETCH:
            self.read_blocks += is_good
