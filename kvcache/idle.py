"""What the tiers do in idle copy time: write back, sign, verify, persist. Nothing here is waited for."""

from collections import deque
from collections.abc import Callable, Iterable

from kvcache.chain import Chain, ChainQueue
from kvcache.policy import Keep
from kvcache.pool import SlotState
from kvcache.table import BlockTable
from kvcache.tiers import TierBook
from tiercel.ids import BlockKey, SlotId
from tiercel.rates import Rates
from tiercel.tier import Purpose, Route, Tier

_MOST_ADOPTED = 2048  # disk slots a step: about 2 ms
_LOOK_AHEAD = 64  # released slots looked at in one step

Scan = Callable[[int], list[tuple[SlotId, BlockKey]] | None]
"""What a recovering volume has found since the last call, at most so many; None: that was all."""


class IdleWork:
    """Knows what could be copied for nobody in particular, and does so much of it as the limits allow."""

    def __init__(self, tiers: TierBook, block_size: int, rates: Callable[[], Rates]) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._rates = rates
        self._released: deque[SlotId] = deque(maxlen=tiers.device.blocks)  # cached in HBM since, perhaps not below
        self._unsigned: deque[SlotId] = deque(maxlen=tiers.device.blocks)
        self._chains = ChainQueue()
        self._scan: Scan | None = None

    @property
    def is_busy(self) -> bool:
        """There is something to do, or something flies."""
        tiers = self._tiers
        return bool(tiers.outbox or len(tiers.transfers) or len(self._chains) or tiers.unverified or self._scan)

    def note_published(self, slot: SlotId) -> None:
        """A block was computed and named."""
        if self._tiers.limits.has_journal:
            self._unsigned.append(slot)

    def note_released(self, table: BlockTable) -> None:
        """A table is about to be cleared; its blocks are the next ones to lose their place."""
        if self._tiers.host is not None:
            self._released.extend(SlotId(slot) for slot in reversed(table.slots[: table.num_published]))

    def offer(self, table: BlockTable) -> None:
        """A sequence has ended: its chain may be worth a place on the disk."""
        blocks = table.num_published
        if self._tiers.disk is None or not blocks:
            return
        rates, size = self._rates(), self._block_size
        saving_s = rates.recompute_s(0, blocks * size) - rates.load_s(Route.PREFETCH, blocks)
        if saving_s <= 0:
            return
        keys = tuple(table.key(block, size) for block in range(blocks))
        is_once = self._tiers.device.keep(SlotId(table.slots[0])) is not Keep.REUSED
        self._chains.push(Chain(keys, saving_s, is_once=is_once))

    def work(self, likely_victims: Iterable[BlockTable], now_s: float, *, is_idle: bool) -> None:
        """Use idle copy time: write back, sign, verify what was found, persist."""
        self._write_back(likely_victims)
        self._sign()
        self._verify_some()
        self._adopt_from_disk()
        self._tiers.budget.refill(now_s)
        if self._tiers.disk is not None:
            self._persist_chains(is_idle=is_idle)

    def _write_back(self, likely_victims: Iterable[BlockTable]) -> None:
        host, device = self._tiers.host, self._tiers.device
        if host is None or not self._tiers.limits.has_write_back:
            return
        flying = self._tiers.transfers.blocks(Route.SPILL, Purpose.BACKGROUND)
        shadows = host.num_kept(Keep.SHADOW) + flying
        room = min(
            self._tiers.limits.background_blocks - flying,
            int(self._tiers.limits.shadow_share * host.blocks) - shadows,
            host.num_free + host.num_kept(Keep.SHADOW) + host.num_kept(Keep.ONCE),
        )
        if room <= 0:
            return
        picked: dict[BlockKey, SlotId] = {}
        for _ in range(min(_LOOK_AHEAD, len(self._released))):
            if len(picked) >= room:
                break
            slot = self._released.popleft()
            if device.states[slot] == SlotState.CACHED:
                self._pick(picked, slot)
        for table in likely_victims:
            while len(picked) < room and table.num_saved < table.num_published:
                self._pick(picked, SlotId(table.slots[table.num_saved]))
                table.num_saved += 1
        if not picked:
            return
        pairs = sorted(picked.items(), key=lambda pair: pair[1])  # neighbours merge
        for _, slot in pairs:
            device.hold(slot, by_transfer=True)
        targets = host.take_many(len(pairs), by_transfer=True)
        keys, sources = zip(*pairs, strict=True)
        self._tiers.outbox.append(
            self._tiers.transfers.open(Route.SPILL, Purpose.BACKGROUND, keys, sources, tuple(targets))
        )

    def _pick(self, picked: dict[BlockKey, SlotId], slot: SlotId) -> None:
        key = self._tiers.device.key(slot)
        if self._tiers.is_over_quota(Tier.DDR, self._tiers.device.owner(slot)):
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
                self._tiers.gateway.hold(slot, by_transfer=True)
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
        while (chain := self._chains.first) is not None and self._tiers.can_write_disk and self._scan is None:
            if self._tiers.transfers.blocks(Route.PERSIST, Purpose.BACKGROUND) >= self._tiers.limits.background_blocks:
                return
            if self._tiers.writable_blocks < 1 or (chain.is_once and not is_idle):
                return
            while chain.cursor < len(chain.keys) and self._tiers.is_on_disk(chain.keys[chain.cursor]):
                chain.cursor += 1
            if chain.cursor == len(chain.keys):
                self._chains.pop()
                continue
            key = chain.keys[chain.cursor]
            source = self._tiers.gateway.slot_by_key.get(key)
            if source is not None and self._tiers.is_over_quota(Tier.SSD, self._tiers.gateway.owner(source)):
                self._chains.pop()
            elif source is not None:
                self._tiers.gateway.hold(source, by_transfer=True)
                self._tiers.outbox.append(self._tiers.persist(key, source, Purpose.BACKGROUND))
                chain.cursor += 1
            elif self._tiers.is_on_its_way_down(key):
                self._chains.set_aside()  # it goes through DDR
            else:
                self._chains.pop()

    def attach_disk(self, scan: Scan | None) -> None:
        """Slots of the volume that hold a block, as fast as they are found; each is verified when it is read."""
        self._scan = scan

    def _adopt_from_disk(self) -> None:
        disk = self._tiers.disk
        if self._scan is None or disk is None:
            return
        found = self._scan(_MOST_ADOPTED)
        if found is None:
            self._scan = None
            return
        for slot, key in found:
            disk.adopt(slot, key)

    def note_landed(self) -> None:
        """Copies have come down: chains that waited for theirs can go on."""
        self._chains.recall()

    def close_disk(self) -> None:
        """The disk takes no more writes."""
        self._tiers.can_write_disk = False
        self._chains.clear()
        self._scan = None
