"""Copies below the device tier: what is spilled, fetched and persisted, and when.

A copy never differs from another one of the same key, so it is dropped without a word and never written twice. What
decides is time: a block is kept, moved or computed again by whatever is cheapest at the measured rates.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct

from kvcache.chain import WriteBudget
from kvcache.policy import Keep
from kvcache.pool import SlotPool, SlotState
from kvcache.quota import CopyQuotas, SpillRoom
from kvcache.table import BlockTable
from kvcache.transfers import TransferBook
from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.rates import Rates
from tiercel.tier import Landing, Purpose, Route, Tier, Transfer, Verdict

_STUCK_S = 2.0  # a call to the disk that takes longer hangs
_MOST_LATE = 4  # reads: while so many are late and have not come back, no other one is begun


class TierLimits(Struct, frozen=True, kw_only=True):
    """How much the tiers may be used for what."""

    shadow_share: float = 0.25  # of DDR, for copies that also lie in HBM
    wanted_share: float = 0.5  # of the gateway, for what waiting sequences will need
    background_blocks: int = 16  # flying for nobody, each route
    fetch_blocks: int = 64  # flying up from the disk
    daily_blocks: int = 0  # written to the disk a day; 0 = no limit
    always_loads: bool = False  # never compute again what could be loaded
    has_reuse: bool = True  # False: a restored copy is dropped below, as systems without a block store do
    has_write_back: bool = True
    has_journal: bool = False  # the gateway is the device tier itself and its copies are to be signed


class TierBook:
    """DDR and SSD as the cache manager sees them, and every transfer. One arena may be HBM and DDR in one."""

    def __init__(
        self,
        device: SlotPool,
        host: SlotPool | None,
        disk: SlotPool | None,
        block_size: int,
        rates: Callable[[], Rates],
        limits: TierLimits,
    ) -> None:
        self.transfers = TransferBook()
        self.device = device
        self.host = host
        self.disk = disk
        self.gateway = host or device  # the disk reads into it and writes from it
        self.limits = limits
        self.outbox: list[Transfer] = []  # to be started
        self.fetched_blocks = 0  # that came up from the disk
        self.swapped_blocks = 0  # that came up for sequences that had given way
        self.stuck_blocks = 0  # of the device tier, held by transfers that do not come to an end
        self.misses = 0  # copies that were not what their key promises
        self.unverified: dict[BlockKey, SlotId] = {}  # copies that an earlier engine left; nobody's until verified
        lower = {Tier.DDR: host, Tier.SSD: disk}
        self.quotas = CopyQuotas({tier: pool for tier, pool in lower.items() if pool is not None})
        self.budget = WriteBudget(limits.daily_blocks)
        self.can_write_disk = True
        self.can_read_disk = disk is not None
        self._block_size = block_size
        self._rates = rates
        self._table_by_transfer: dict[int, BlockTable] = {}  # for whom it flies
        self._started_s: dict[int, float] = {}  # disk transfers, by id
        self._now_s = 0.0
        if host is not None:
            device.on_evict = self._on_device_eviction

    # ---- lookups

    @property
    def has_lower_tier(self) -> bool:
        """A victim's blocks may survive below the device tier."""
        return self.host is not None or (self.disk is not None and self.can_write_disk)

    def loadable(self, key: BlockKey) -> SlotId | None:
        """The DDR copy that could be restored, when DDR is a tier of its own."""
        return None if self.host is None else self.host.slot_by_key.get(key)

    def is_worth_loading(self, first: int, loads: int, covered: int) -> bool:
        """Whether loading `loads` blocks beats computing blocks [first, covered) again."""
        if self.limits.always_loads:
            return True
        rates, size = self._rates(), self._block_size
        return rates.load_s(Route.RESTORE, loads) < rates.recompute_s(first * size, (covered - first) * size)

    def needs_fetch(self, table: BlockTable) -> bool:
        """A waiting sequence's prefix may lie lower than it can be used from, and has not been asked for yet."""
        return not table.fetch.is_done and self.can_fetch

    @property
    def has_fetches(self) -> bool:
        """There is something to bring near for waiting sequences, or was."""
        return self.disk is not None or bool(self.unverified)

    @property
    def can_fetch(self) -> bool:
        """Something can be brought near for waiting sequences now."""
        return self.is_disk_answering or bool(self.unverified)

    @property
    def is_disk_answering(self) -> bool:
        """The disk is read: it is not off, and does not leave one read after the other without an answer."""
        return self.can_read_disk and self.transfers.num_late < _MOST_LATE

    def is_awaited(self, table: BlockTable, key: BlockKey) -> bool:
        """A block of a waiting sequence's prefix is on its way up, and the sequence waits for it."""
        coming, waits_for_reads = self.transfers.is_coming, self.can_read_disk and not table.fetch.is_given_up
        return coming(Tier.HBM, key) or coming(Tier.DDR, key, with_reads=waits_for_reads)

    def dirty(self, table: BlockTable) -> list[tuple[BlockKey, SlotId]]:
        """The table's full blocks that no lower tier holds or is about to hold. Cost: O(blocks)."""
        flying = self.transfers.is_flying
        if self.host is not None:
            lower, tier = self.host.slot_by_key, Tier.DDR
        elif self.disk is not None and self.can_write_disk:
            lower, tier = self.disk.slot_by_key, Tier.SSD
        else:
            return []
        pairs = (
            (table.key(block, self._block_size), SlotId(table.slots[block])) for block in range(table.num_published)
        )
        return [(key, slot) for key, slot in pairs if key not in lower and not flying(tier, key)]

    @property
    def num_spillable(self) -> int:
        """Blocks that could be spilled now."""
        if self.host is not None:
            return self.host.num_free + self.host.num_cached
        return self.writable_blocks

    def num_spillable_of(self, keys: Iterable[BlockKey]) -> int:
        """How many of these copies count as `num_spillable`: a restore that holds them leaves so much less."""
        host = self.host
        if host is None:
            return 0
        return sum(host.states[host.slot_by_key[key]] == SlotState.CACHED for key in keys)

    def spill_room(self) -> SpillRoom:
        """What could be spilled now, by blocks and by quotas."""
        tier = Tier.SSD if self.host is None else Tier.DDR
        return SpillRoom(self.num_spillable, tier, self.device, self.quotas)

    def is_over_quota(self, tier: Tier, owner: int) -> bool:
        """The owner may send no more copies to a lower tier."""
        return self.quotas.left(tier, owner) == 0

    def note_time(self, now_s: float) -> None:
        """Disk calls that hang hold slots of the one arena of the CPU: nobody may wait for those."""
        self._now_s = now_s
        if self.host is not None:
            return
        if not self._started_s:
            self.stuck_blocks = 0
            return
        self.stuck_blocks = sum(now_s - started_s > _STUCK_S for started_s in self._started_s.values())

    # ---- inside a seal

    def spill(self, table: BlockTable) -> list[Transfer]:
        """A victim's dirty blocks go down, as many as there is room for, head of the chain first."""
        pairs = self.spill_room().take(self.dirty(table))
        for _, slot in pairs:
            self.device.hold(slot, by_transfer=True)
        if self.host is None:
            return [self.persist(key, slot, Purpose.SPILL) for key, slot in pairs]
        opened: list[Transfer] = []
        if pairs:
            targets = self.host.take_many(len(pairs), by_transfer=True)
            keys, sources = zip(*pairs, strict=True)
            for source, target in zip(sources, targets, strict=True):
                self.quotas.own(self.host, target, self.device.owner(source))
            opened.append(self.transfers.open(Route.SPILL, Purpose.SPILL, keys, sources, tuple(targets)))
            self._table_by_transfer[opened[0].id] = table
        for block in range(table.num_published):
            slot = self.host.slot_by_key.get(table.key(block, self._block_size))
            if slot is not None:
                self.host.set_keep(slot, Keep.PREEMPTED)
        return opened

    def hold_sources(self, keys: Iterable[BlockKey]) -> None:
        """Keep DDR copies for a restore that this seal opens: what is spilled or read meanwhile evicts others."""
        host = self._host()
        for key in keys:
            self.quotas.hold(host, host.slot_by_key[key])

    def restore(self, keys: tuple[BlockKey, ...], targets: tuple[SlotId, ...]) -> Transfer:
        """Blocks of DDR whose copies are held go up into slots that a table holds."""
        host = self._host()
        sources = tuple(host.slot_by_key[key] for key in keys)
        for target in targets:
            self.device.hold(target, by_transfer=True)
        return self.transfers.open(Route.RESTORE, Purpose.RESTORE, keys, sources, targets)

    def settle_keep(self, table: BlockTable, blocks: int) -> None:
        """The sequence does not wait any more: what was kept for it is kept as anything that was used."""
        for key in table.fetch.wanted:
            self._demote(self.gateway, key, Keep.WANTED)
        if self.host is not None:
            for block in range(blocks):
                self._demote(self.host, table.key(block, self._block_size), Keep.PREEMPTED)

    def _demote(self, pool: SlotPool, key: BlockKey, keep: Keep) -> None:
        slot = pool.slot_by_key.get(key)
        if slot is not None and pool.keep(slot) is keep:
            is_shadow = pool is self.host and key in self.device.slot_by_key
            pool.set_keep(slot, Keep.SHADOW if is_shadow else Keep.REUSED)

    def _on_device_eviction(self, key: BlockKey, slot: SlotId) -> None:
        host = self._host()
        below = host.slot_by_key.get(key)
        if below is not None and host.keep(below) is Keep.SHADOW:
            host.set_keep(below, Keep.REUSED if self.device.keep(slot) > Keep.ONCE else Keep.ONCE)

    # ---- landings

    def land(self, landing: Landing) -> Transfer | None:
        """Book the news of one transfer. Returns it when it is over."""
        if landing.verdict is Verdict.LATE:
            self.transfers.abandon(landing.id)
            return None
        transfer = self.transfers.close(landing.id)
        self._started_s.pop(landing.id, None)
        is_good = landing.verdict is Verdict.LANDED
        self.misses += landing.verdict is Verdict.MISS
        match transfer.route:
            case Route.RESTORE:
                self._land_restore(transfer)
            case Route.SPILL:
                table = self._table_by_transfer.pop(transfer.id, None)
                kept = self._kept_for(table)
                self._land_copies(
                    transfer,
                    self.device,
                    self._host(),
                    lambda key: Keep.PREEMPTED if key in kept else Keep.SHADOW,
                    is_good=is_good,
                )
            case Route.PERSIST:
                keep = self.gateway.keep(transfer.sources[0])
                keep = keep if keep is Keep.REUSED else Keep.ONCE
                self._land_copies(transfer, self.gateway, self._disk(), lambda _: keep, is_good=is_good)
            case Route.PREFETCH:
                table = self._table_by_transfer.pop(transfer.id, None)
                # It may have ended, or have run meanwhile and wait again: its fetch of then is over.
                is_wanted = table is not None and not table.is_closed and transfer.keys[0] in table.fetch.wanted
                if table is not None and is_wanted and is_good:
                    self._note_fetched(table)
                keep = Keep.WANTED if is_wanted else Keep.REUSED
                self._land_copies(transfer, self._disk(), self.gateway, lambda _: keep, is_good=is_good)
                self.fetched_blocks += is_good
                if landing.verdict in (Verdict.MISS, Verdict.FAILED):  # one bad sector must not be read for ever
                    self._disk().evict_key(transfer.keys[0])
            case Route.VERIFY:
                self._land_target(self.gateway, transfer.keys[0], transfer.sources[0], Keep.REUSED, is_good=is_good)
            case Route.SIGN:
                for source in transfer.sources:
                    self.quotas.drop(self.gateway, source)
        return transfer

    def _note_fetched(self, table: BlockTable) -> None:
        """A block came up from the disk for a waiting sequence. Where DDR lies between, its restore counts."""
        if not table.has_given_way:
            table.num_fetched += 1
        elif self.host is None:
            table.num_swapped += 1
            self.swapped_blocks += 1

    def note_restored(self, table: BlockTable, blocks: int) -> None:
        """Blocks came up from DDR for an admitted sequence."""
        if not table.has_given_way:
            table.num_loaded += blocks
        else:
            table.num_swapped += blocks
            self.swapped_blocks += blocks

    def _land_restore(self, transfer: Transfer) -> None:
        host = self._host()
        for source in transfer.sources:
            self.quotas.drop(host, source)
            if host.states[source] == SlotState.CACHED:
                if not self.limits.has_reuse:
                    host.evict(source)
                else:
                    host.set_keep(source, Keep.SHADOW)

    def _kept_for(self, table: BlockTable | None) -> frozenset[BlockKey]:
        """The blocks that a victim needs kept: none when it has ended or come back, fewer when it gave way again."""
        if table is None or table.is_closed:
            return frozenset()
        return frozenset(table.key(block, self._block_size) for block in range(table.num_kept))

    def _land_copies(
        self,
        transfer: Transfer,
        above: SlotPool,
        into: SlotPool,
        keep_of: Callable[[BlockKey], Keep],
        *,
        is_good: bool,
    ) -> None:
        # The tail first: of a chain it is the first to be evicted.
        for key, source, target in reversed(list(zip(transfer.keys, transfer.sources, transfer.targets, strict=True))):
            self.quotas.drop(above, source)
            self._land_target(into, key, target, keep_of(key), is_good=is_good)

    def _land_target(self, pool: SlotPool, key: BlockKey, target: SlotId, keep: Keep, *, is_good: bool) -> None:
        """Name the copy that has landed. It is worthless when it failed or somebody else published the key first."""
        if is_good and pool.publish(target, key) == target:
            pool.set_keep(target, keep)
            self.quotas.drop(pool, target)
        else:
            self.quotas.discard(pool, target)

    # ---- background

    def read(self, table: BlockTable, key: BlockKey, source: SlotId) -> int:
        """Read a block of a waiting sequence's prefix from the disk. Returns the transfer's id."""
        disk = self._disk()
        self.quotas.hold(disk, source)
        (target,) = self.gateway.take_many(1, by_transfer=True)
        self.quotas.own(self.gateway, target, disk.owner(source))
        table.fetch.wanted.append(key)
        opened = self.transfers.open(Route.PREFETCH, Purpose.PREFETCH, (key,), (source,), (target,))
        self._table_by_transfer[opened.id] = table
        self._started_s[opened.id] = self._now_s
        self.outbox.append(opened)
        return opened.id

    def verify(self, key: BlockKey, purpose: Purpose) -> None:
        """Compare a copy that was found with its checksum."""
        slot = self.unverified.pop(key)
        if key in self.gateway.slot_by_key or self.transfers.is_flying(Tier.DDR, key):
            self.gateway.discard(slot)
        else:
            self.outbox.append(self.transfers.open(Route.VERIFY, purpose, (key,), (slot,)))

    def is_on_its_way_down(self, key: BlockKey) -> bool:
        """The block is not in the gateway yet, but will be."""
        if self.host is None:
            return False
        return key in self.device.slot_by_key or self.transfers.is_flying(Tier.DDR, key)

    def is_on_disk(self, key: BlockKey) -> bool:
        """The block has a copy on the disk, or will have one."""
        return key in self._disk().slot_by_key or self.transfers.is_flying(Tier.SSD, key)

    def persist(self, key: BlockKey, source: SlotId, purpose: Purpose) -> Transfer:
        """Write a held copy to the disk."""
        disk = self._disk()
        (target,) = disk.take_many(1, by_transfer=True)
        self.quotas.own(disk, target, self.gateway.owner(source))
        self.budget.spend()
        opened = self.transfers.open(Route.PERSIST, purpose, (key,), (source,), (target,))
        self._started_s[opened.id] = self._now_s
        return opened

    @property
    def writable_blocks(self) -> int:
        """Blocks that can and may be written to the disk now."""
        if self.disk is None or not self.can_write_disk:
            return 0
        disk, allowed = self.disk, self.budget.blocks
        room = disk.num_free + disk.num_cached
        return room if allowed is None else min(room, allowed)

    # ---- what an earlier engine left

    def attach(self, records: Iterable[tuple[SlotId, BlockKey]]) -> None:
        """Copies found in the gateway's memory: theirs until verified, in the background."""
        for slot, key in records:
            if key not in self.unverified and self.gateway.take_at(slot, by_transfer=True):
                self.unverified[key] = slot

    # ---- facts

    def pools(self) -> tuple[tuple[Tier, SlotPool], ...]:
        """Every tier that exists. An arena that is HBM and DDR in one is named by what it is: DDR memory."""
        named = ((Tier.HBM, self.device), (Tier.DDR, self.host), (Tier.SSD, self.disk))
        return tuple((tier, pool) for tier, pool in named if pool is not None)

    def check_integrity(self) -> None:
        """Every transfer reference belongs to a flying transfer and is counted. Errors: InvariantError."""
        self.quotas.check_integrity()
        refs: dict[tuple[Tier, SlotId], int] = {}
        gateway = Tier.HBM if self.host is None else Tier.DDR
        ends = {
            Route.SPILL: (Tier.HBM, Tier.DDR),
            Route.RESTORE: (Tier.DDR, Tier.HBM),
            Route.PERSIST: (gateway, Tier.SSD),
            Route.PREFETCH: (Tier.SSD, gateway),
            Route.VERIFY: (gateway, gateway),
            Route.SIGN: (gateway, gateway),
        }
        for transfer in self.transfers.flying():
            above, below = ends[transfer.route]
            for tier, slots in ((above, transfer.sources), (below, transfer.targets)):
                for slot in slots:
                    refs[tier, slot] = refs.get((tier, slot), 0) + 1
        for slot in self.unverified.values():
            refs[gateway, slot] = refs.get((gateway, slot), 0) + 1
        for tier, pool in self.pools():
            pool.check_integrity()
            counted = sum(count for (where, _), count in refs.items() if where is tier)
            wrong = [
                slot for (where, slot), count in refs.items() if where is tier and pool.transfer_refs[slot] != count
            ]
            if wrong or counted != sum(pool.transfer_refs):
                raise InvariantError("tiers.references", tier=tier.value, slots=wrong[:8])

    def _host(self) -> SlotPool:
        if self.host is None:
            raise InvariantError("tiers.no_host")
        return self.host

    def _disk(self) -> SlotPool:
        if self.disk is None:
            raise InvariantError("tiers.no_disk")
        return self.disk
