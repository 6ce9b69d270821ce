"""Reads from the disk for the prefixes of waiting sequences, and how long a sequence waits for its reads.

A fetch runs once for each wait. It ends when everything worth reading has been asked for, or at the first block that is
late, wrong, refused or gone: a block behind a hole can never be hit. From the first step that passes a sequence over
because of its fetch, the wait is limited to the time that the rates predict for its reads and `PATIENCE_S` more. Then
the sequence takes what has landed and computes the rest. A sequence does not wait for the end of another one's fetch.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain

from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.retention import want_run
from tiercel.kvcache.slot_state import SlotState
from tiercel.kvcache.step_budget import BLOCKS_PER_LOOK, MAX_BATCH, StepBudget
from tiercel.kvcache.table import BlockTable, Fetch
from tiercel.kvcache.tiers import TierSet
from tiercel.kvcache.verification import UnverifiedCopies
from tiercel.values.ids import BlockKey, SeqId, SlotId
from tiercel.values.rates import Rates
from tiercel.values.tier import Landing, Purpose, Route, Tier, Verdict

PATIENCE_S = 0.25
"""Time that a sequence waits for its fetch beyond the time that the rates predict."""

MAX_FETCHES = 128
"""Fetches under way at once. A sequence whose turn comes while there are so many computes its prefix instead."""

_QUEUE_S = 0.1  # of reads, one behind the other
_MIN_READS = 4
_LOOKS_PER_BLOCK = 4  # for a block that is looked for in every tier
_MAX_RUN = 1024  # blocks on the disk whose reads are priced at once


class FetchWork:
    """Reads ahead for the sequences that will be admitted next, within the limits of the tiers."""

    def __init__(
        self,
        tiers: TierSet,
        disk_traffic: DiskTraffic,
        unverified: UnverifiedCopies,
        block_size: int,
        rates: Callable[[], Rates],
    ) -> None:
        self.next_limit_s: float | None = None  # when the next wait reaches its limit: the loop must plan by then
        self._tiers = tiers
        self._disk_traffic = disk_traffic
        self._unverified = unverified
        self._block_size = block_size
        self._rates = rates
        self._table_by_seq: dict[SeqId, BlockTable] = {}  # of fetches under way
        self._fetch_by_transfer: dict[int, Fetch] = {}

    # ---- facts

    @property
    def can_fetch(self) -> bool:
        """Whether blocks can be brought near for waiting sequences now."""
        return self._disk_traffic.is_answering or bool(len(self._unverified))

    def needs_fetch(self, table: BlockTable) -> bool:
        """Return whether a waiting sequence's prefix may lie on the disk and has not been asked for yet."""
        return not table.fetch.is_done and self.can_fetch

    @property
    def _has_sources(self) -> bool:
        """Whether there is a disk, or are copies to verify: otherwise there are no fetches."""
        return self._tiers.disk is not None or bool(len(self._unverified))

    # ---- once a step

    def expect(self, tables: Iterable[BlockTable], budget: StepBudget) -> None:
        """Fetch for these sequences, in this order, and go on with the other fetches under way."""
        if not self._has_sources:
            return
        asked = [table for table in tables if not table.fetch.is_done]
        for table in dict.fromkeys(chain(asked, self._table_by_seq.values())):
            self._go_on(table, budget)
            if table.fetch.is_done or table.is_closed or table.slots:
                self._table_by_seq.pop(table.seq, None)
            else:
                self._table_by_seq[table.seq] = table

    def pass_over(self, tables: Iterable[BlockTable], now_s: float) -> None:
        """Limit the wait of these sequences, which a plan has put off, as far as their fetches are the cause."""
        self.next_limit_s = None
        if not self._has_sources:
            return
        for table in tables:
            fetch = table.fetch
            if fetch.is_given_up or table.slots:
                continue
            if not fetch.is_done and table.seq not in self._table_by_seq:
                if len(self._table_by_seq) >= MAX_FETCHES:
                    fetch.give_up()
                    continue
                self._table_by_seq[table.seq] = table
            if not fetch.is_hashed:
                continue
            if fetch.passed_over_s is None:
                fetch.passed_over_s = now_s
            limit_s = fetch.passed_over_s + fetch.predicted_s + PATIENCE_S
            if now_s >= limit_s:
                fetch.give_up()
            elif self.next_limit_s is None or limit_s < self.next_limit_s:
                self.next_limit_s = limit_s

    def note_landing(self, landing: Landing) -> None:
        """Note that a transfer is over, or late. If its block did not come, its fetch ends."""
        fetch = self._fetch_by_transfer.pop(landing.id, None)
        if fetch is not None and landing.verdict is not Verdict.LANDED:
            fetch.give_up()

    # ---- one fetch

    def _go_on(self, table: BlockTable, budget: StepBudget) -> None:
        """Ask for the next blocks of a prefix, and keep the blocks that are near from eviction."""
        fetch, size = table.fetch, self._block_size
        limit = table.reusable_blocks(size)
        if fetch.is_done or table.is_closed or table.slots or not table.hash_some(limit, size, budget):
            return
        fetch.is_hashed = True
        if fetch.is_queued and self.can_fetch and not self._has_read_slot():
            return  # without look-ups: very many sequences may wait for their turn at the disk
        fetch.is_queued = False
        if not self.can_fetch or self._has_hole(table, budget):
            fetch.give_up()
            return
        while fetch.cursor < limit:
            if not self._want_near(table, limit, budget) or not budget.take_looks(_LOOKS_PER_BLOCK):
                return  # the next step goes on
            if fetch.cursor == limit:
                break
            key = table.key(fetch.cursor, size)
            if key in self._unverified:
                self._unverified.verify(key, Purpose.PREFETCH)
            if self._is_here(key) or self._is_coming(key):
                self._want(table, key)
            else:
                source = self._source(table, key, limit)
                if source is None:
                    break
                if not self._has_read_slot():
                    fetch.is_queued = True
                    return  # until other reads have landed
                self._fetch_by_transfer[self._disk_traffic.read(table, key, source)] = fetch
            fetch.cursor += 1
        fetch.is_done = True

    def _want_near(self, table: BlockTable, limit: int, budget: StepBudget) -> bool:
        """Pass over the next blocks that the device tier has. Return False if the step's budget is spent."""
        tiers, fetch = self._tiers, table.fetch
        if len(self._unverified):
            return True
        links = tiers.links if tiers.host is not None else None
        max_wanted = math.ceil(tiers.limits.wanted_share * tiers.gateway.blocks)
        has_all = fetch.landed == fetch.cursor
        has_budget = want_run(table, limit, budget, tiers.device, tiers.gateway, links, max_wanted)
        if has_all:
            fetch.landed = fetch.cursor
        return has_budget

    def _has_hole(self, table: BlockTable, budget: StepBudget) -> bool:
        """Return whether the first block that was asked for and has not landed is not coming any more.

        A step looks as far as its budget goes.
        """
        fetch, tiers = table.fetch, self._tiers
        pools = [pool for pool in (tiers.device, tiers.host) if pool is not None]
        batch = 8
        while fetch.landed < fetch.cursor:
            count = min(fetch.cursor - fetch.landed, batch)
            batch = min(8 * batch, MAX_BATCH)
            if not budget.take_looks(-(-count // BLOCKS_PER_LOOK)):
                return False
            found = 0
            for pool in pools:
                first = fetch.landed + found
                found += len(pool.slot_by_key.find(table.keys(first, fetch.landed + count)))
            fetch.landed += found
            if not found:
                return not self._is_coming(table.key(fetch.landed, self._block_size))
        return False

    def _has_read_slot(self) -> bool:
        """Return whether another read may begin.

        The number of concurrent reads is limited so that a disk of the measured speed completes each long before its
        deadline. Reads that hang do not count.
        """
        one_s, transfers = self._rates().load_s(Route.PREFETCH, 1), self._tiers.transfers
        by_speed = int(_QUEUE_S / one_s) if one_s > 0 else 0
        maximum = max(_MIN_READS, min(self._tiers.limits.fetch_blocks, by_speed))
        return transfers.blocks(Route.PREFETCH, Purpose.PREFETCH) - transfers.num_late < maximum

    def _is_here(self, key: BlockKey) -> bool:
        return key in self._tiers.device.slot_by_key or self._tiers.loadable(key) is not None

    def _is_coming(self, key: BlockKey) -> bool:
        is_coming = self._tiers.transfers.is_coming
        return is_coming(Tier.DDR, key) or is_coming(Tier.HBM, key)

    def _source(self, table: BlockTable, key: BlockKey, limit: int) -> SlotId | None:
        """Return the disk slot to read a block from; None if it may not be read, or is not worth reading."""
        tiers, fetch, size = self._tiers, table.fetch, self._block_size
        disk, gateway = tiers.disk, tiers.gateway
        if disk is None or not self._disk_traffic.is_answering or tiers.transfers.is_flying(Tier.DDR, key):
            return None
        source = disk.slot_by_key.get(key)
        num_wanted = gateway.copies.num_retained(RetentionClass.WANTED)
        coming = tiers.transfers.blocks(Route.PREFETCH, Purpose.PREFETCH)
        # Free slots cost nothing; slots from which other copies must be evicted are capped.
        is_capped = not gateway.num_free and num_wanted + coming >= tiers.limits.wanted_share * gateway.blocks
        if source is None or is_capped or gateway.num_free + gateway.num_cached - num_wanted < 1:
            return None
        if tiers.quotas.left(Tier.DDR, disk.copies.owner(source)) == 0:
            return None
        if fetch.cursor < fetch.worth_until:
            return source
        run = 1
        max_run = min(limit - fetch.cursor, _MAX_RUN)
        while run < max_run and table.key(fetch.cursor + run, size) in disk.slot_by_key:
            run += 1
        rates = self._rates()
        load_s = rates.load_s(Route.PREFETCH, run)
        if not tiers.limits.always_loads and load_s >= rates.recompute_s(fetch.cursor * size, run * size):
            return None
        fetch.worth_until = fetch.cursor + run
        fetch.predicted_s += load_s
        return source

    def _want(self, table: BlockTable, key: BlockKey) -> None:
        """Keep a block's copy in the gateway from eviction for the sequence, within the limit on wanted copies."""
        gateway = self._tiers.gateway
        slot, copies = gateway.slot_by_key.get(key), gateway.copies
        if slot is None:
            return
        if copies.num_retained(RetentionClass.WANTED) >= self._tiers.limits.wanted_share * gateway.blocks:
            return
        is_ordinary = copies.retention(slot) in (RetentionClass.ONCE, RetentionClass.REUSED)
        if gateway.states[slot] == SlotState.CACHED and is_ordinary:
            copies.set_retention(slot, RetentionClass.WANTED)
            table.fetch.want(slot, gateway)
