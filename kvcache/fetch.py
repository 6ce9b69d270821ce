"""Prefixes of waiting sequences on their way up from the disk, and how long a sequence waits for its own.

A fetch runs once per wait. It ends when all that is worth reading has been asked for, or at the first block that is
late, wrong, refused or gone: a block behind a hole can never be hit. From the first step that passes a sequence over
because of its fetch, the wait is limited to the time that the rates predict for its reads and `PATIENCE_S` more; then
the sequence takes what has landed and computes the rest. Nobody waits for the end of another sequence's fetch.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain

from tiercel.ids import BlockKey, SeqId, SlotId
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotState
from tiercel.kvcache.retention import want_run
from tiercel.kvcache.step_budget import StepBudget
from tiercel.kvcache.table import BlockTable, Fetch
from tiercel.kvcache.tiers import TierBook
from tiercel.rates import Rates
from tiercel.tier import Landing, Purpose, Route, Tier, Verdict

PATIENCE_S = 0.25
"""A sequence waits so much longer for its fetch than the rates predict."""

MAX_FETCHES = 128
"""Fetches under way at once. A sequence whose turn comes while there are so many computes its prefix instead."""

_QUEUE_S = 0.1  # of reads, behind each other
_MIN_READS = 4
_LOOKS_OF_FETCH = 4  # that a block costs which is looked for in every tier
_BATCH = 1024  # blocks looked up at once
_BLOCKS_OF_LOOK = 4  # of a batch cost as much as one that is looked up alone
_MAX_RUN = 1024  # blocks on the disk that are priced at once


class FetchWork:
    """Reads ahead for the sequences that will be admitted next, within the limits of the tiers."""

    def __init__(self, tiers: TierBook, block_size: int, rates: Callable[[], Rates]) -> None:
        self.next_limit_s: float | None = None  # when the next wait reaches its limit: the loop must plan by then
        self._tiers = tiers
        self._block_size = block_size
        self._rates = rates
        self._table_by_seq: dict[SeqId, BlockTable] = {}  # of fetches under way
        self._fetch_by_transfer: dict[int, Fetch] = {}

    # ---- once a step

    def expect(self, tables: Iterable[BlockTable], budget: StepBudget) -> None:
        """Bring near what these sequences need, in this order, and go on with the other fetches under way."""
        if not self._tiers.has_fetches:
            return
        asked = [table for table in tables if not table.fetch.is_done]
        for table in dict.fromkeys(chain(asked, self._table_by_seq.values())):
            self._go_on(table, budget)
            if table.fetch.is_done or table.is_closed or table.slots:
                self._table_by_seq.pop(table.seq, None)
            else:
                self._table_by_seq[table.seq] = table

    def pass_over(self, tables: Iterable[BlockTable], now_s: float) -> None:
        """It was the turn of these sequences, and they wait on: limit that, as far as their fetches are the cause."""
        self.next_limit_s = None
        if not self._tiers.has_fetches:
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

    def note(self, landing: Landing) -> None:
        """A transfer is over, or late. The fetch whose block did not come ends."""
        fetch = self._fetch_by_transfer.pop(landing.id, None)
        if fetch is not None and landing.verdict is not Verdict.LANDED:
            fetch.give_up()

    # ---- one fetch

    def _go_on(self, table: BlockTable, budget: StepBudget) -> None:
        """Ask for the next blocks of a prefix, and keep those that are near from eviction."""
        fetch, size, tiers = table.fetch, self._block_size, self._tiers
        limit = (len(table.tokens) - 1) // size
        if fetch.is_done or table.is_closed or table.slots or not table.hash_some(limit, size, budget):
            return
        fetch.is_hashed = True
        if fetch.is_queued and tiers.can_fetch and not self._has_read_slot():
            return  # costs no look-ups: very many may wait for their turn at the disk
        fetch.is_queued = False
        if not tiers.can_fetch or self._has_hole(table, budget):
            fetch.give_up()
            return
        while fetch.cursor < limit:
            if not self._want_near(table, limit, budget) or not budget.take_looks(_LOOKS_OF_FETCH):
                return  # goes on in the next step
            if fetch.cursor == limit:
                break
            key = table.key(fetch.cursor, size)
            if key in tiers.unverified:
                tiers.verify(key, Purpose.PREFETCH)
            if self._is_here(key) or self._is_coming(key):
                self._want(table, key)
            else:
                source = self._source(table, key, limit)
                if source is None:
                    break
                if not self._has_read_slot():
                    fetch.is_queued = True
                    return  # goes on when some have landed
                self._fetch_by_transfer[tiers.read(table, key, source)] = fetch
            fetch.cursor += 1
        fetch.is_done = True

    def _want_near(self, table: BlockTable, limit: int, budget: StepBudget) -> bool:
        """Pass over the next blocks as long as the device tier has them. False: the budget of the step is spent."""
        tiers, fetch = self._tiers, table.fetch
        if tiers.unverified:
            return True
        links = tiers.links if tiers.host is not None else None
        maximum = math.ceil(tiers.limits.wanted_share * tiers.gateway.blocks)
        has_all = fetch.landed == fetch.cursor
        has_budget = want_run(table, limit, budget, tiers.device, tiers.gateway, links, maximum)
        if has_all:
            fetch.landed = fetch.cursor
        return has_budget

    def _has_hole(self, table: BlockTable, budget: StepBudget) -> bool:
        """The first block asked for that has not landed is not coming any more, whoever asked the disk for it.

        A step looks as far as its budget goes.
        """
        fetch, tiers = table.fetch, self._tiers
        pools = [pool for pool in (tiers.device, tiers.host) if pool is not None]
        batch = 8
        while fetch.landed < fetch.cursor:
            count = min(fetch.cursor - fetch.landed, batch)
            batch = min(8 * batch, _BATCH)
            if not budget.take_looks(-(-count // _BLOCKS_OF_LOOK)):
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
        """Fewer reads fly than a disk of this speed ends well before their deadline; those that hang do not count."""
        one_s, transfers = self._rates().load_s(Route.PREFETCH, 1), self._tiers.transfers
        maximum = max(_MIN_READS, min(self._tiers.limits.fetch_blocks, int(_QUEUE_S / one_s) if one_s > 0 else 0))
        return transfers.blocks(Route.PREFETCH, Purpose.PREFETCH) - transfers.num_late < maximum

    def _is_here(self, key: BlockKey) -> bool:
        return key in self._tiers.device.slot_by_key or self._tiers.loadable(key) is not None

    def _is_coming(self, key: BlockKey) -> bool:
        coming = self._tiers.transfers.is_coming
        return coming(Tier.DDR, key) or coming(Tier.HBM, key)

    def _source(self, table: BlockTable, key: BlockKey, limit: int) -> SlotId | None:
        """The slot of the disk that the block is read from; None when it may not be read, or is not worth it."""
        tiers, fetch, size = self._tiers, table.fetch, self._block_size
        disk, gateway = tiers.disk, tiers.gateway
        if disk is None or not tiers.is_disk_answering or tiers.transfers.is_flying(Tier.DDR, key):
            return None
        source = disk.slot_by_key.get(key)
        wanted = gateway.num_retained(RetentionClass.WANTED) + tiers.transfers.blocks(Route.PREFETCH, Purpose.PREFETCH)
        # Room that nobody uses costs nothing; what others' blocks must leave for is capped.
        if source is None or (not gateway.num_free and wanted >= tiers.limits.wanted_share * gateway.blocks):
            return None
        if gateway.num_free + gateway.num_cached - gateway.num_retained(RetentionClass.WANTED) < 1:
            return None
        if tiers.is_over_quota(Tier.DDR, disk.owner(source)):
            return None
        if fetch.cursor < fetch.worth_until:
            return source
        run = 1
        maximum = min(limit - fetch.cursor, _MAX_RUN)
        while run < maximum and table.key(fetch.cursor + run, size) in disk.slot_by_key:
            run += 1
        rates = self._rates()
        load_s = rates.load_s(Route.PREFETCH, run)
        if not tiers.limits.always_loads and load_s >= rates.recompute_s(fetch.cursor * size, run * size):
            return None
        fetch.worth_until = fetch.cursor + run
        fetch.predicted_s += load_s
        return source

    def _want(self, table: BlockTable, key: BlockKey) -> None:
        tiers, gateway = self._tiers, self._tiers.gateway
        slot = gateway.slot_by_key.get(key)
        if slot is None or gateway.num_retained(RetentionClass.WANTED) >= tiers.limits.wanted_share * gateway.blocks:
            return
        if gateway.states[slot] == SlotState.CACHED and gateway.retention(slot) in (
            RetentionClass.ONCE,
            RetentionClass.REUSED,
        ):
            gateway.set_retention(slot, RetentionClass.WANTED)
            table.fetch.want(slot, gateway)
