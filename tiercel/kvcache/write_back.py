"""Copies from the device tier to DDR in idle copy time, before a sequence must give its blocks up."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from tiercel.kvcache.chain import Chain
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.rates import Rates
from tiercel.values.tier import Purpose, Route, Tier

_HEADROOM = 32  # slots left free behind a chain's first copies, so that the chain grows in place
_MAX_LOOKS = 1024  # blocks of likely victims looked at in one step: about 1 ms
_LOOK_AHEAD = 256  # released slots looked at in one step


class ReleasedSlots:
    """The slots of tables that were cleared, in the order of clearing, each table's tail first.

    If there are more than `maximum`, the oldest are forgotten.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._parts: deque[array[int]] = deque()  # slots in the order of their blocks
        self._num_slots = 0

    def __len__(self) -> int:
        return self._num_slots

    def push(self, slots: "array[int]") -> None:
        """Add the slots of a table that is cleared."""
        self._parts.append(slots)
        self._num_slots += len(slots)
        while (excess := self._num_slots - self._maximum) > 0:
            oldest = self._parts[0]
            left = max(0, len(oldest) - excess)
            self._num_slots -= len(oldest) - left
            del oldest[left:]
            if not oldest:
                self._parts.popleft()

    def pop(self) -> SlotId:
        """Remove and return the first slot."""
        slot = self._parts[0].pop()
        self._num_slots -= 1
        if not self._parts[0]:
            self._parts.popleft()
        return SlotId(slot)


class _Part(Struct, frozen=True, gc=False):
    """Blocks to copy down, and where to: behind `near`, or to a run with `headroom` free slots behind it."""

    pairs: list[tuple[BlockKey, SlotId]]
    near: SlotId | None = None
    headroom: int = 0


class WriteBack:
    """Chooses blocks of the device tier to copy to DDR in the background, within the limits of the tiers."""

    def __init__(self, tiers: TierSet, block_size: int, rates: Callable[[], Rates]) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._rates = rates
        self._released = ReleasedSlots(tiers.device.blocks)  # cached in HBM since, perhaps not below

    def note_released(self, table: BlockTable) -> None:
        """Note that a table is about to be cleared: its blocks are the next that may be evicted."""
        if self._tiers.host is not None and table.num_published:
            self._released.push(table.slots[: table.num_published])

    def copy_some(self, likely_victims: Iterable[BlockTable]) -> None:
        """Copy released blocks, then those of likely victims."""
        tiers, host = self._tiers, self._tiers.host
        if host is None or not tiers.limits.has_write_back:
            return
        flying = tiers.transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        num_shadows = host.copies.num_retained(RetentionClass.SHADOW)
        room = min(
            self._most_flying() - flying,
            int(tiers.limits.shadow_share * host.blocks) - num_shadows - flying,
            host.num_free + num_shadows + host.copies.num_retained(RetentionClass.ONCE),
        )
        if room <= 0:
            return
        picked: dict[BlockKey, SlotId] = {}
        by_owner: Counter[int] = Counter()
        for _ in range(min(_LOOK_AHEAD, len(self._released))):
            if len(picked) >= room:
                break
            self._pick(picked, by_owner, self._released.pop())
        parts = [_Part(sorted(picked.items(), key=lambda pair: pair[1]))]  # neighbours merge
        looks = 0
        for table in likely_victims:
            first, known = table.num_saved, len(picked)
            while len(picked) < room and table.num_saved < table.num_published and looks < _MAX_LOOKS:
                looks += 1
                self._pick(picked, by_owner, SlotId(table.slots[table.num_saved]))
                table.num_saved += 1
            # Behind the copies of its blocks before: what goes down in small pieces comes up in a large one.
            near = host.slot_by_key.get(table.key(first - 1, self._block_size)) if first else None
            parts.append(_Part(list(picked.items())[known:], near, _HEADROOM))
        self._copy_down(host, parts)

    def bring_down(self, chain: Chain) -> bool:
        """Copy a chain's next blocks to DDR on their way to the disk, over copies that HBM has too.

        Return False if the next block may not be copied.
        """
        tiers, host = self._tiers, self._tiers.host
        if host is None or not tiers.limits.has_write_back:
            return False
        if tiers.transfers.is_flying(Tier.DDR, chain[chain.cursor]):
            return True
        flying = tiers.transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        num_shadows = host.copies.num_retained(RetentionClass.SHADOW)
        room = min(self._most_flying() - flying, host.num_free + num_shadows)
        if room <= 0:
            return True
        if chain.brought == chain.cursor:
            return False  # they were sent and have not come; without this a chain would try for ever
        chain.brought = chain.cursor
        picked: dict[BlockKey, SlotId] = {}
        by_owner: Counter[int] = Counter()
        for key in chain.keys(chain.cursor, chain.cursor + room):
            slot = tiers.device.slot_by_key.get(key)
            if slot is not None:
                self._pick(picked, by_owner, slot)
        self._copy_down(host, [_Part(sorted(picked.items(), key=lambda pair: pair[1]))])
        return tiers.transfers.is_flying(Tier.DDR, chain[chain.cursor])

    def _most_flying(self) -> int:
        """Return how many blocks may fly down for no sequence: as many as the link copies in `write_back_s`.

        A landing is noticed once a step, so a step cannot write more blocks than may fly. With a constant number a
        fast link would idle for most of a step while sequences grow by more blocks than that. An urgent copy does not
        wait for all of them, because the mover interleaves copies in pieces of about a millisecond.
        """
        limits, blocks = self._tiers.limits, self._tiers.device.blocks
        if not limits.background_blocks:
            return 0
        flying = self._rates().blocks_in(Route.SPILL, limits.write_back_s)
        most = min(limits.carried_blocks, int(limits.write_back_share * blocks))
        return max(limits.background_blocks, min(flying, most))

    def _pick(self, picked: dict[BlockKey, SlotId], by_owner: Counter[int], slot: SlotId) -> None:
        """Add a slot's block to the picked ones if DDR neither has it nor gets it, and its owner's quota allows it."""
        tiers, owner = self._tiers, self._tiers.device.copies.owners[slot]
        key = tiers.device.key(slot)
        left = tiers.quotas.left(Tier.DDR, owner)
        if key is None or key in picked or (left is not None and left <= by_owner[owner]):
            return
        if tiers.loadable(key) is None and not tiers.transfers.is_flying(Tier.DDR, key):
            picked[key] = slot
            by_owner[owner] += 1

    def _copy_down(self, host: SlotPool, parts: Iterable[_Part]) -> None:
        pairs: list[tuple[BlockKey, SlotId]] = []
        targets: list[SlotId] = []
        for part in parts:
            if part.pairs:
                pairs += part.pairs
                targets += host.take_many(len(part.pairs), part.near, part.headroom, by_transfer=True)
        if not pairs:
            return
        tiers = self._tiers
        for _, slot in pairs:
            tiers.device.hold(slot, by_transfer=True)
        keys, sources = zip(*pairs, strict=True)
        for source, target in zip(sources, targets, strict=True):
            tiers.quotas.own(host, target, tiers.device.copies.owner(source))
        if tiers.links is not None:
            for source, target in zip(sources, targets, strict=True):
                tiers.links.link(source, target)
        opened = tiers.transfers.open(Route.SPILL, Purpose.BACKGROUND, keys, sources, tuple(targets))
        tiers.transfers.queue(opened)
