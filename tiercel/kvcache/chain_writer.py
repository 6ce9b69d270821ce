"""Writes finished chains to the disk, the most worthwhile first, and keeps their places on the disk in order."""

from collections.abc import Callable

from tiercel.kvcache.chain import Chain, ChainQueue, WrittenChains
from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tiers import TierSet
from tiercel.kvcache.write_back import WriteBack
from tiercel.values.rates import Rates
from tiercel.values.tier import Purpose, Route, Tier

_MAX_LOOKS = 1024  # blocks of chains looked at in one step: about 1 ms
_MAX_CHAINS = 64  # looked at in one step
_KEYS_PER_BLOCK = 2  # keys of finished chains that are kept for each block of memory: the chains' heads overlap


class ChainWriter:
    """Finished chains on their way to the disk. A chain goes there through the gateway."""

    def __init__(
        self,
        tiers: TierSet,
        disk_traffic: DiskTraffic,
        write_back: WriteBack,
        block_size: int,
        rates: Callable[[], Rates],
    ) -> None:
        self._tiers = tiers
        self._disk_traffic = disk_traffic
        self._write_back = write_back
        self._block_size = block_size
        self._rates = rates
        max_keys = _KEYS_PER_BLOCK * (tiers.device.blocks + (tiers.host.blocks if tiers.host is not None else 0))
        self._chains = ChainQueue(max_keys, self._is_at_hand)
        self._written = WrittenChains(max_keys)  # their places on the disk are to be put in order
        self._has_news = False  # copies have come down, or have made room for others

    @property
    def has_work(self) -> bool:
        """Whether the disk is being given a block, or could be given one that it does not have."""
        transfers = self._tiers.transfers
        if transfers.blocks(Route.PERSIST, Purpose.BACKGROUND) or transfers.blocks(Route.PERSIST, Purpose.SPILL):
            return True
        is_coming = self._chains.num_aside and transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        return self._disk_traffic.writable_blocks > 0 and bool(len(self._chains) or is_coming)

    @property
    def num_keys(self) -> int:
        """Keys of finished chains that are kept."""
        return self._chains.num_keys + self._written.num_keys

    def offer(self, table: BlockTable) -> None:
        """Queue the chain of a sequence that has ended, if the disk would load it faster than it is computed.

        The blocks of a sequence that ended while it was preempted or being restored are written as far as memory still
        has them, head first.
        """
        tiers, size = self._tiers, self._block_size
        if tiers.disk is None:
            return
        is_whole = bool(table.slots) and table.restore is None
        # A chain longer than the disk would push out its own head.
        keys = table.keys(0, min(table.num_published, tiers.disk.blocks) if is_whole else tiers.disk.blocks)
        if not keys:
            return
        rates = self._rates()
        saving_s = rates.recompute_s(0, len(keys) * size) - rates.load_s(Route.PREFETCH, len(keys))
        if saving_s <= 0:
            return
        head = tiers.device.slot_by_key.get(keys[0])
        is_once = head is None or tiers.device.copies.retention(head) is not RetentionClass.REUSED
        self._chains.push(Chain(keys, saving_s, is_once=is_once))

    def note_landed(self) -> None:
        """Note that copies have come down, or need their room no more: chains that were set aside can go on."""
        self._has_news = True

    def clear(self) -> None:
        """Forget the chains that are not written: the disk takes no more writes."""
        self._chains.clear()

    def write_some(self, *, is_idle: bool) -> None:
        """Write the best chains to the disk. All chains of a step share one budget of looks.

        With `is_idle` chains that were seen once are written too.
        """
        tiers, chains, looks = self._tiers, self._chains, _MAX_LOOKS
        if tiers.disk is None:
            return
        if self._has_news:
            self._has_news = False
            chains.recall(_MAX_CHAINS)
        for _ in range(_MAX_CHAINS):
            chain = chains.first
            if chain is None or self._disk_traffic.writable_blocks < 1 or (chain.is_once and not is_idle):
                return
            first = chain.cursor
            if not self._write_blocks(chain, looks):
                return
            looks -= chain.cursor - first + 1  # the block at which the chain stopped was looked at, too
            key = chain[chain.cursor] if chain.cursor < len(chain) else None
            if key is None or not tiers.is_coming_to_gateway(key):
                chains.pop()  # all is written, or the next block is gone
                self._written.push(chain)
            elif is_idle and not self._write_back.bring_down(chain):
                chains.pop()
            else:
                chains.set_aside()  # until the next block has come to DDR

    def order_written(self) -> None:
        """Make the tail of the oldest written chain the first of it to be evicted from the disk.

        It was written head first, and would be evicted head first.
        """
        disk, transfers = self._tiers.disk, self._tiers.transfers
        chain = self._written.first
        if disk is None or chain is None:
            return
        tail = len(chain) - self._tiers.limits.background_blocks
        if any(transfers.is_flying(Tier.SSD, key) for key in chain.keys(tail, len(chain))):
            return
        self._written.pop()
        for key in reversed(chain.keys(0, _MAX_LOOKS)):
            slot = disk.slot_by_key.get(key)
            if slot is not None:
                disk.copies.touch(slot)

    def _is_at_hand(self, chain: Chain) -> bool:
        """Return whether the next block of a chain lies in memory, or needs no writing."""
        if chain.cursor >= len(chain):
            return False
        tiers, key = self._tiers, chain[chain.cursor]
        is_in_memory = key in tiers.gateway.slot_by_key or tiers.is_coming_to_gateway(key)
        return is_in_memory or self._disk_traffic.has_copy(key)

    def _write_blocks(self, chain: Chain, max_looks: int) -> bool:
        """Write the blocks of a chain, head first, up to the first that is not in the gateway or over its quota.

        Return False if no more blocks may fly, be written or be looked at in this step.
        """
        tiers, disk_traffic = self._tiers, self._disk_traffic
        for _ in range(max_looks):
            if chain.cursor >= len(chain):
                return True
            key = chain[chain.cursor]
            if not disk_traffic.has_copy(key):
                source = tiers.gateway.slot_by_key.get(key)
                if source is None or tiers.quotas.left(Tier.SSD, tiers.gateway.copies.owner(source)) == 0:
                    return True
                flying = tiers.transfers.blocks(Route.PERSIST, Purpose.BACKGROUND)
                if flying >= tiers.limits.background_blocks or disk_traffic.writable_blocks < 1:
                    return False
                tiers.quotas.hold(tiers.gateway, source)
                tiers.transfers.queue(disk_traffic.write(key, source, Purpose.BACKGROUND))
            chain.cursor += 1
        return False  # the rest follows in the next step
