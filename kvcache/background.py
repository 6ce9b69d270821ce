"""What the tiers do in idle copy time: write back, sign, verify, persist. Nothing here is waited for."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from tiercel.ids import BlockKey, SlotId
from tiercel.kvcache.chain import Chain, ChainQueue, WrittenChains
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tiers import TierBook
from tiercel.rates import Rates
from tiercel.tier import Purpose, Route, Tier

_MAX_ADOPTED = 2048  # disk slots a step: about 2 ms
_HEADROOM = 32  # slots left free behind a chain's first copies, so that it grows in place
_MAX_LOOKS = 1024  # blocks of chains looked at in one step: about 1 ms
_KEYS_PER_BLOCK = 2  # of memory: so many keys of finished chains are kept, as their heads overlap
_LOOK_AHEAD = 64  # released slots, and chains, looked at in one step

Scan = Callable[[int], list[tuple[SlotId, BlockKey]] | None]
"""What a recovering volume has found since the last call, at most so many; None: that was all."""


class ReleasedSlots:
    """Slots of tables that were cleared, first to last, of each table the tail first; the oldest are forgotten."""

    def __init__(self, maximum: int) -> None:
        self._most = maximum
        self._parts: deque[array[int]] = deque()  # slots in the order of their blocks
        self._num_slots = 0

    def __len__(self) -> int:
        return self._num_slots

    def push(self, slots: "array[int]") -> None:
        """A table that held these slots is cleared."""
        self._parts.append(slots)
        self._num_slots += len(slots)
        while (excess := self._num_slots - self._most) > 0:
            oldest = self._parts[0]
            left = max(0, len(oldest) - excess)
            self._num_slots -= len(oldest) - left
            del oldest[left:]
            if not oldest:
                self._parts.popleft()

    def pop(self) -> SlotId:
        """Take out the first slot."""
        slot = self._parts[0].pop()
        self._num_slots -= 1
        if not self._parts[0]:
            self._parts.popleft()
        return SlotId(slot)


class _Part(Struct, frozen=True, gc=False):
    """Blocks to copy down, and where to: behind `near`, or to a run with so much room behind it."""

    pairs: list[tuple[BlockKey, SlotId]]
    near: SlotId | None = None
    headroom: int = 0


class BackgroundWork:
    """Knows what could be copied for nobody in particular, and does so much of it as the limits allow."""

    def __init__(self, tiers: TierBook, block_size: int, rates: Callable[[], Rates]) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._rates = rates
        self._released = ReleasedSlots(tiers.device.blocks)  # cached in HBM since, perhaps not below
        self._unsigned: deque[SlotId] = deque(maxlen=tiers.device.blocks)
        host = tiers.host
        max_keys = _KEYS_PER_BLOCK * (tiers.device.blocks + (host.blocks if host is not None else 0))
        self._chains = ChainQueue(max_keys, self._is_at_hand)
        self._written = WrittenChains(max_keys)  # their places on the disk are to be put in order
        self._scan: Scan | None = None
        self._is_news = False  # copies have come down, or left room for others

    @property
    def is_busy(self) -> bool:
        """There is something to do, or something flies."""
        tiers = self._tiers
        return bool(tiers.outbox or len(tiers.transfers) or tiers.unverified or self._scan) or self.has_unsaved

    @property
    def has_unsaved(self) -> bool:
        """The disk could be given something that it does not have, or is being given it."""
        transfers, tiers = self._tiers.transfers, self._tiers
        if transfers.blocks(Route.PERSIST, Purpose.BACKGROUND) or transfers.blocks(Route.PERSIST, Purpose.SPILL):
            return True
        is_coming = self._chains.num_aside and transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        return tiers.writable_blocks > 0 and bool(len(self._chains) or is_coming)

    @property
    def num_chain_keys(self) -> int:
        """Keys of finished chains that are kept."""
        return self._chains.num_keys + self._written.num_keys

    def note_published(self, slot: SlotId) -> None:
        """A block was computed and named."""
        if self._tiers.limits.has_journal:
            self._unsigned.append(slot)

    def note_released(self, table: BlockTable) -> None:
        """A table is about to be cleared; its blocks are the next ones to lose their place."""
        if self._tiers.host is not None and table.num_published:
            self._released.push(table.slots[: table.num_published])

    def offer(self, table: BlockTable) -> None:
        """A sequence has ended: its chain may be worth a place on the disk."""
        blocks = table.num_published
        if self._tiers.disk is None or not blocks:
            return
        rates, size = self._rates(), self._block_size
        saving_s = rates.recompute_s(0, blocks * size) - rates.load_s(Route.PREFETCH, blocks)
        if saving_s <= 0:
            return
        # What the disk cannot hold whole would push out its own head.
        keys = table.keys(0, min(blocks, self._tiers.disk.blocks))
        is_once = self._tiers.device.retention(SlotId(table.slots[0])) is not RetentionClass.REUSED
        self._chains.push(Chain(keys, saving_s, is_once=is_once))

    def work(self, likely_victims: Iterable[BlockTable], now_s: float, *, is_idle: bool) -> None:
        """Use idle copy time: write back, sign, verify what was found, persist."""
        self._tiers.note_time(now_s)
        self._tiers.budget.refill(now_s)
        if is_idle:  # nobody waits, so victims are not likely: what has ended goes first
            self._persist_chains(is_idle=True)
        self._write_back(likely_victims)
        self._sign()
        self._verify_some()
        self._adopt_from_disk()
        self._age_written()
        if not is_idle:
            self._persist_chains(is_idle=False)

    def _write_back(self, likely_victims: Iterable[BlockTable]) -> None:
        host = self._tiers.host
        if host is None or not self._tiers.limits.has_write_back:
            return
        flying = self._tiers.transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        shadows = host.num_retained(RetentionClass.SHADOW) + flying
        room = min(
            self._tiers.limits.background_blocks - flying,
            int(self._tiers.limits.shadow_share * host.blocks) - shadows,
            host.num_free + host.num_retained(RetentionClass.SHADOW) + host.num_retained(RetentionClass.ONCE),
        )
        if room <= 0:
            return
        picked: dict[BlockKey, SlotId] = {}
        for _ in range(min(_LOOK_AHEAD, len(self._released))):
            if len(picked) >= room:
                break
            self._pick(picked, self._released.pop())
        parts = [_Part(sorted(picked.items(), key=lambda pair: pair[1]))]  # neighbours merge
        looks = 0
        for table in likely_victims:
            first, known = table.num_saved, len(picked)
            while len(picked) < room and table.num_saved < table.num_published and looks < _MAX_LOOKS:
                looks += 1
                self._pick(picked, SlotId(table.slots[table.num_saved]))
                table.num_saved += 1
            # Behind the copies of its blocks before: what goes down in small pieces comes up in a large one.
            near = host.slot_by_key.get(table.key(first - 1, self._block_size)) if first else None
            parts.append(_Part(list(picked.items())[known:], near, _HEADROOM))
        self._copy_down(host, parts)

    def _copy_down(self, host: SlotPool, parts: Iterable["_Part"]) -> None:
        pairs: list[tuple[BlockKey, SlotId]] = []
        targets: list[SlotId] = []
        for part in parts:
            if part.pairs:
                pairs += part.pairs
                targets += host.take_many(len(part.pairs), part.near, part.headroom, by_transfer=True)
        if not pairs:
            return
        for _, slot in pairs:
            self._tiers.device.hold(slot, by_transfer=True)
        keys, sources = zip(*pairs, strict=True)
        for source, target in zip(sources, targets, strict=True):
            self._tiers.quotas.own(host, target, self._tiers.device.owner(source))
        if self._tiers.links is not None:
            for source, target in zip(sources, targets, strict=True):
                self._tiers.links.link(source, target)
        self._tiers.outbox.append(
            self._tiers.transfers.open(Route.SPILL, Purpose.BACKGROUND, keys, sources, tuple(targets))
        )

    def _bring_down(self, chain: Chain) -> bool:
        """The chain's next blocks go to DDR on their way to the disk. Copies that HBM has too make room for them.

        False when the next one may not.
        """
        host = self._tiers.host
        if host is None or not self._tiers.limits.has_write_back:
            return False
        if self._tiers.transfers.is_flying(Tier.DDR, chain[chain.cursor]):
            return True
        flying = self._tiers.transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        room = min(
            self._tiers.limits.background_blocks - flying, host.num_free + host.num_retained(RetentionClass.SHADOW)
        )
        if room > 0 and chain.brought == chain.cursor:
            return False  # they were sent and have not come: nobody tries for ever
        chain.brought = chain.cursor if room > 0 else chain.brought
        picked: dict[BlockKey, SlotId] = {}
        for key in chain.keys(chain.cursor, chain.cursor + max(0, room)):
            slot = self._tiers.device.slot_by_key.get(key)
            if slot is not None:
                self._pick(picked, slot)
        self._copy_down(host, [_Part(sorted(picked.items(), key=lambda pair: pair[1]))])
        return room <= 0 or self._tiers.transfers.is_flying(Tier.DDR, chain[chain.cursor])

    def _pick(self, picked: dict[BlockKey, SlotId], slot: SlotId) -> None:
        key, owner_of = self._tiers.device.key(slot), self._tiers.device.owner
        left = self._tiers.quotas.left(Tier.DDR, owner_of(slot))
        if left is not None and left <= sum(owner_of(other) == owner_of(slot) for other in picked.values()):
            return
        if key is not None and self._tiers.loadable(key) is None and not self._tiers.transfers.is_flying(Tier.DDR, key):
            picked[key] = slot

    def _sign(self) -> None:
        room = self._tiers.limits.background_blocks - self._tiers.transfers.blocks(Route.SIGN, Purpose.BACKGROUND)
        slots: list[SlotId] = []
        keys: list[BlockKey] = []
        while self._unsigned and len(slots) < room:
            slot = self._unsigned.popleft()
            key = self._tiers.gateway.key(slot)
            if key is not None:
                self._tiers.quotas.hold(self._tiers.gateway, slot)
                slots.append(slot)
                keys.append(key)
        if slots:
            opened = self._tiers.transfers.open(Route.SIGN, Purpose.BACKGROUND, tuple(keys), tuple(slots))
            self._tiers.outbox.append(opened)

    def _verify_some(self) -> None:
        while (
            self._tiers.unverified
            and self._tiers.transfers.blocks(Route.VERIFY, Purpose.BACKGROUND) < self._tiers.limits.fetch_blocks
        ):
            self._tiers.verify(next(iter(self._tiers.unverified)), Purpose.BACKGROUND)

    def _persist_chains(self, *, is_idle: bool) -> None:
        """Write the best chains to the disk. All chains of a step share one budget of looks."""
        tiers, chains, looks = self._tiers, self._chains, _MAX_LOOKS
        if tiers.disk is None:
            return
        if self._is_news:
            self._is_news = False
            chains.recall(_LOOK_AHEAD)
        for _ in range(_LOOK_AHEAD):
            chain = chains.first
            if chain is None or not tiers.can_write_disk or self._scan is not None:
                return
            if tiers.writable_blocks < 1 or (chain.is_once and not is_idle):
                return
            first = chain.cursor
            if not self._persist_some(chain, looks):
                return
            looks -= chain.cursor - first + 1  # the block that ended it was looked at, too
            key = chain[chain.cursor] if chain.cursor < len(chain) else None
            if key is None or not tiers.is_on_its_way_down(key):
                chains.pop()  # it is done, or gone
                self._written.push(chain)
            elif is_idle and not self._bring_down(chain):
                chains.pop()
            else:
                chains.set_aside()  # it goes through DDR

    def _is_at_hand(self, chain: Chain) -> bool:
        """The next block of a chain lies in memory, or needs no writing."""
        if chain.cursor >= len(chain):
            return False
        tiers, key = self._tiers, chain[chain.cursor]
        return key in tiers.gateway.slot_by_key or tiers.is_on_its_way_down(key) or tiers.is_on_disk(key)

    def _persist_some(self, chain: Chain, max_looks: int) -> bool:
        """Write the blocks of a chain that lie in memory, head first, up to the first one that does not or may not.

        Return False when no more may fly, be written or be looked at in this step.
        """
        tiers = self._tiers
        for _ in range(max_looks):
            if chain.cursor >= len(chain):
                return True
            key = chain[chain.cursor]
            if not tiers.is_on_disk(key):
                source = tiers.gateway.slot_by_key.get(key)
                if source is None or tiers.is_over_quota(Tier.SSD, tiers.gateway.owner(source)):
                    return True
                flying = tiers.transfers.blocks(Route.PERSIST, Purpose.BACKGROUND)
                if flying >= tiers.limits.background_blocks or tiers.writable_blocks < 1:
                    return False
                tiers.quotas.hold(tiers.gateway, source)
                tiers.outbox.append(tiers.persist(key, source, Purpose.BACKGROUND))
            chain.cursor += 1
        return False  # goes on in the next step

    def _age_written(self) -> None:
        """What was written head first would be evicted head first: of a chain the tail is to go."""
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
                disk.touch(slot)

    def attach_disk(self, scan: Scan | None) -> None:
        """Slots of the volume that hold a block, as fast as they are found; each is verified when it is read."""
        self._scan = scan

    def _adopt_from_disk(self) -> None:
        disk = self._tiers.disk
        if self._scan is None or disk is None:
            return
        found = self._scan(_MAX_ADOPTED)
        if found is None:
            self._scan = None
            return
        for slot, key in found:
            disk.adopt(slot, key)

    def note_landed(self) -> None:
        """Copies have come down, or need their room no more: chains that waited can go on."""
        self._is_news = True

    def close_disk(self, *, is_readable: bool = True) -> None:
        """The disk takes no more writes; unless it is readable, nobody waits for a read any more, either."""
        self._tiers.can_write_disk = False
        self._tiers.can_read_disk = self._tiers.can_read_disk and is_readable
        self._chains.clear()
        self._scan = None
