"""Copies below the device tier: what is spilled, fetched and persisted, and when.

A copy never differs from another one of the same key, so it is dropped without a word and never written twice. What
decides is time: a block is kept, moved or computed again by whatever is cheapest at the measured rates.
"""

import functools
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct

from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.kvcache.chain import WriteBudget
from tiercel.kvcache.copy_link import CopyLinks
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool, SlotState
from tiercel.kvcache.quota import CopyQuotas, SpillRoom
from tiercel.kvcache.retention import demote, land_many, promote
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, NO_SLOTS, SlotIndex, Slots, as_index, as_slots
from tiercel.kvcache.table import NO_COPIES, BlockTable, RetainedCopies
from tiercel.kvcache.transfers import TransferBook, check_references
from tiercel.rates import Rates
from tiercel.tier import Landing, Purpose, Route, Tier, Transfer, Verdict

_STUCK_S = 2.0  # a call to the disk that takes longer hangs
_MAX_LATE = 4  # reads: while so many are late and have not come back, no other one is begun
_MAX_PERSISTS = 1024  # blocks of one victim that are written to the disk, each by a transfer of its own: about 5 ms
_MAX_FAR = 512  # blocks of a victim that are looked up on the disk, and stand for all


class TierLimits(Struct, frozen=True, kw_only=True):
    """How much the tiers may be used for what."""

    shadow_share: float = 0.25  # of DDR, for copies that also lie in HBM
    wanted_share: float = 0.5  # of the gateway, for what waiting sequences will need
    background_blocks: int = 16  # flying for nobody, each route
    fetch_blocks: int = 64  # flying up from the disk
    carried_blocks: int = 2048  # by one transfer between HBM and DDR, so that booking its landing costs about 1 ms
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
        self.transfers = TransferBook(device, host, carried_blocks=limits.carried_blocks)
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
        lower = host or disk
        tier = Tier.DDR if host is not None else Tier.SSD
        self.links = CopyLinks(device, lower, self.transfers, tier) if lower is not None else None  # to the next tier
        if host is not None and self.links is not None:
            device.on_evict = self._on_device_eviction
            device.on_evict_many = functools.partial(promote, device, host, self.links)

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
        return self.can_read_disk and self.transfers.num_late < _MAX_LATE

    def is_awaited(self, table: BlockTable, key: BlockKey) -> bool:
        """A block of a waiting sequence's prefix is on its way up, and the sequence waits for it."""
        coming, waits_for_reads = self.transfers.is_coming, self.can_read_disk and not table.fetch.is_given_up
        return coming(Tier.HBM, key) or coming(Tier.DDR, key, with_reads=waits_for_reads)

    def dirty(self, table: BlockTable) -> Slots:
        """Return the numbers of the table's full blocks that no lower tier holds or is about to hold."""
        if self.links is None or not self.has_lower_tier:
            return NO_SLOTS
        return np.flatnonzero(table.published().read(self.links.below) == 0)

    @property
    def num_spillable(self) -> int:
        """Blocks that could be spilled now. What is kept for preempted sequences is not evicted for another victim."""
        if self.host is not None:
            return self.host.num_free + self.host.num_cached - self.host.num_retained(RetentionClass.PREEMPTED)
        return min(self.writable_blocks, _MAX_PERSISTS)

    def num_spillable_of(self, sources: Slots | SlotIndex) -> int:
        """How many of these copies count as `num_spillable`: a restore that holds them leaves so much less."""
        host = self.host
        if host is None:
            return 0
        index = as_index(sources)
        is_evictable = (index.read(host.all_states) == SlotState.CACHED) & ~host.are_retained(
            index, RetentionClass.PREEMPTED
        )
        return int(np.count_nonzero(is_evictable))

    def num_clean(self, table: BlockTable) -> int:
        """Copies of the table's blocks that count as `num_spillable`: a spill of the table keeps them."""
        if self.host is None or self.links is None:
            return 0
        below = table.published().read(self.links.below)
        return self.num_spillable_of(below[below > 0].astype(np.intp))

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

    def spill(self, table: BlockTable, maximum: int) -> list[Transfer]:
        """Send a victim's dirty blocks down, at most `most`, head of the chain first, and keep its copies below.

        Return transfers to the disk; those to DDR are prepared.
        """
        slots, blocks = table.published(), self.dirty(table)
        sources = slots.pick(blocks)
        sources = sources.head(min(maximum, self.spill_room().take(sources, self.num_clean(table))))
        blocks = blocks[: len(sources)]
        self.device.hold_many(sources, by_transfer=True)
        if self.host is None or self.links is None:
            persists = [
                self.persist(key, SlotId(slot), Purpose.SPILL)
                for key, slot in zip(table.keys_of(blocks), sources.slots.tolist(), strict=True)
            ]
            self._table_by_transfer.update((one.id, table) for one in persists)
            return persists
        clean = slots.read(self.links.below)
        index = SlotIndex(clean[clean > 0].astype(np.intp))
        # Before room is made for the others, or these would be the first to go.
        self.host.set_retention_many(
            index.filter(index.read(self.host.slot_by_key.all_named) > 0), RetentionClass.PREEMPTED
        )
        if len(sources):
            targets = self.host.take_index(len(sources), by_transfer=True)
            self.quotas.own_many(self.host, targets, self.device.owners(sources))
            self.links.link_many(sources, targets)
            carried = self.transfers.prepare(Route.SPILL, Purpose.SPILL, table.keys_of, blocks, sources, targets.slots)
            self._table_by_transfer.update((number, table) for number, _ in carried)
            copies = slots.read(self.links.below)
            index = SlotIndex(copies[copies > 0].astype(np.intp))
        table.retained = RetainedCopies(index.slots, index.read(self.host.lives))
        return []

    def hold_sources(self, sources: Slots) -> None:
        """Keep DDR copies for a restore that this seal opens: what is spilled or read meanwhile evicts others."""
        self.quotas.hold_many(self._host(), sources)

    def restore(self, table: BlockTable, blocks: Slots, sources: Slots, targets: Slots) -> list[tuple[int, int]]:
        """Blocks of DDR whose copies are held go up into slots that the table holds.

        Return the transfers: `TransferBook.prepare`.
        """
        index = SlotIndex(sources)
        self.device.hold_many(targets, by_transfer=True)
        self._host().change_stamps(index)  # others that wait for these blocks learn that they are on their way
        carried = self.transfers.prepare(Route.RESTORE, Purpose.RESTORE, table.keys_of, blocks, index, targets)
        self._table_by_transfer.update((number, table) for number, _ in carried)
        return carried

    def settle_retention(self, table: BlockTable) -> None:
        """The sequence does not wait any more: what was kept for it is kept as anything that was used."""
        if len((wanted := table.fetch.wanted()).slots):
            demote(self.gateway, wanted, RetentionClass.WANTED, self.links if self.host is not None else None)
        if self.host is not None and len(table.retained.slots):
            demote(self.host, table.retained, RetentionClass.PREEMPTED, self.links)
        table.retained = NO_COPIES

    def _on_device_eviction(self, key: BlockKey, slot: SlotId) -> None:
        host, below = self._host(), self.links.lower_slot_of(slot) if self.links is not None else 0
        if below and host.retention(SlotId(below)) is RetentionClass.SHADOW and host.slot_by_key.is_named[below]:
            host.set_retention(
                SlotId(below),
                RetentionClass.REUSED if self.device.retention(slot) > RetentionClass.ONCE else RetentionClass.ONCE,
            )

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
        table = self._table_by_transfer.pop(transfer.id, None)  # for whom it flew
        if table is not None:
            table.copied_s += landing.seconds
        match transfer.route:
            case Route.RESTORE:
                self._land_restore(transfer)
            case Route.SPILL:
                self._land_copies(transfer, self.device, self._host(), RetentionClass.SHADOW, is_good=is_good)
                self._retain_landed(transfer, table)
            case Route.PERSIST:
                retention = self.gateway.retention(transfer.sources[0])
                retention = retention if retention is RetentionClass.REUSED else RetentionClass.ONCE
                self._land_copies(transfer, self.gateway, self._disk(), retention, is_good=is_good)
            case Route.PREFETCH:
                # It may have ended, or have run meanwhile and wait again: its fetch of then is over.
                is_wanted = table is not None and not table.is_closed and transfer.keys[0] in table.fetch.reads
                if table is not None and is_wanted and is_good:
                    self._note_fetched(table)
                retention = RetentionClass.WANTED if is_wanted else RetentionClass.REUSED
                self._land_copies(transfer, self._disk(), self.gateway, retention, is_good=is_good)
                self.fetched_blocks += is_good
                if table is not None and is_wanted:
                    table.fetch.reads.discard(transfer.keys[0])
                    if is_good and self.gateway.slot_by_key.get(transfer.keys[0]) == transfer.targets[0]:
                        table.fetch.want(transfer.targets[0], self.gateway)
                if landing.verdict in (Verdict.MISS, Verdict.FAILED):  # one bad sector must not be read for ever
                    self._disk().evict_key(transfer.keys[0])
            case Route.VERIFY:
                self._land_target(
                    self.gateway, transfer.keys[0], transfer.sources[0], RetentionClass.REUSED, is_good=is_good
                )
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
        host, sources = self._host(), as_slots(transfer.sources)
        index = SlotIndex(sources)
        self.quotas.drop_many(host, index)
        cached = index.filter(index.read(host.all_states) == SlotState.CACHED)
        if self.limits.has_reuse:
            host.set_retention_many(cached, RetentionClass.SHADOW)
        else:
            host.evict_many(cached.slots)

    def _retain_landed(self, transfer: Transfer, table: BlockTable | None) -> None:
        """Keep what a victim still needs: nothing when it has ended or come back, less when it gave way again."""
        if table is None or table.is_closed or not len(table.retained.slots):
            return
        host, targets = self._host(), as_slots(transfer.targets)[::-1]
        is_kept = np.isin(targets, table.retained.slots) & (SlotIndex(targets).read(host.slot_by_key.all_named) > 0)
        host.set_retention_many(targets[is_kept], RetentionClass.PREEMPTED)

    def _land_copies(
        self, transfer: Transfer, above: SlotPool, into: SlotPool, retention: RetentionClass, *, is_good: bool
    ) -> None:
        if is_good and len(transfer.keys) >= MIN_NUMPY_SLOTS:
            land_many(transfer, above, into, retention, self.quotas)
            return
        # The tail first: of a chain it is the first to be evicted.
        for key, source, target in reversed(list(zip(transfer.keys, transfer.sources, transfer.targets, strict=True))):
            self.quotas.drop(above, source)
            self._land_target(into, key, target, retention, is_good=is_good)

    def _land_target(
        self, pool: SlotPool, key: BlockKey, target: SlotId, retention: RetentionClass, *, is_good: bool
    ) -> None:
        """Name the copy that has landed. It is worthless when it failed or somebody else published the key first."""
        if is_good and pool.publish(target, key) == target:
            pool.set_retention(target, retention)
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
        table.fetch.reads.add(key)
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
        if self.host is None and self.links is not None:
            self.links.link(source, target)
        self._started_s[opened.id] = self._now_s
        return opened

    def num_on_disk(self, table: BlockTable, blocks: Slots) -> int:
        """Count the blocks of a table of which the disk has a copy; of very many the first stand for all."""
        if self.disk is None or not len(blocks):
            return 0
        looked_at = blocks[:_MAX_FAR]
        found = sum(key in self.disk.slot_by_key for key in table.keys_of(looked_at))
        return found * len(blocks) // len(looked_at)

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
        gateway = Tier.HBM if self.host is None else Tier.DDR
        check_references(self.transfers, self.unverified.values(), self.pools(), gateway)
        if self.links is not None and not self.links.check():
            raise InvariantError("tiers.links")

    def _host(self) -> SlotPool:
        if self.host is None:
            raise InvariantError("tiers.no_host")
        return self.host

    def _disk(self) -> SlotPool:
        if self.disk is None:
            raise InvariantError("tiers.no_disk")
        return self.disk
