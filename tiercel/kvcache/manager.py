"""The cache manager: block tables over the slots of the device tier, and the tiers below it."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from tiercel.kvcache.background import BackgroundWork, Scan
from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.fetch import FetchWork
from tiercel.kvcache.gauges import tier_gauges
from tiercel.kvcache.landing import LandingBook
from tiercel.kvcache.ledger import Ledger, PrefixMatch
from tiercel.kvcache.overlay import Overlay
from tiercel.kvcache.owner import OwnerBook
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.prefix import Prefix
from tiercel.kvcache.restore import RestoreBook
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_slots
from tiercel.kvcache.step_budget import StepBudget
from tiercel.kvcache.swap import SwapBook
from tiercel.kvcache.table import BlockTable, Fetch, Reuse
from tiercel.kvcache.tiers import TierLimits, TierSet
from tiercel.kvcache.transfers import check_references
from tiercel.kvcache.verification import UnverifiedCopies
from tiercel.values.block_key import child_key, namespace_key
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SeqId, SlotId, TenantId
from tiercel.values.outcome import TierGauges
from tiercel.values.plan import Plan, StepPlan, TableUpdate
from tiercel.values.rates import Rates
from tiercel.values.tenant import DEFAULT_TENANT, Tenants
from tiercel.values.tier import Landing, Route, Tier, Transfer, Verdict

_MAX_LANDED = 4096  # blocks of landings that one step books: about 2 ms
_HEADROOM = 8  # slots left free behind a fresh table, so that it grows in place


class CacheManager:
    """Block tables of all open sequences over the slots of the device tier, and the tiers below it.

    The sole writer of block tables and, through the pools, of every slot's state. One step calls `land`, `expect`,
    `ledger` (the planner draws on it), `seal`, launches, and calls `work` and then `commit`, or `end` if the step
    failed. A seal cannot be taken back: a part of a step that the device refused may have run.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        fingerprint: bytes,
        *,
        has_prefix_caching: bool = True,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        rates: Callable[[], Rates] = Rates,
        limits: TierLimits | None = None,
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.prefix_queries = 0  # tokens looked up at admission
        self.prefix_hits = 0  # tokens of these that were found in any tier
        self._pool = SlotPool(blocks)
        self._tiers = TierSet(
            self._pool,
            SlotPool(host_blocks) if host_blocks else None,
            SlotPool(disk_blocks) if disk_blocks else None,
            limits or TierLimits(),
        )
        self._rates = rates
        self._disk_traffic = DiskTraffic(self._tiers)
        self._swaps = SwapBook(self._tiers, self._disk_traffic, block_size, rates)
        self._landing_book = LandingBook(self._tiers, self._disk_traffic, self._swaps)
        self._unverified = UnverifiedCopies(self._tiers)
        self._background = BackgroundWork(self._tiers, self._disk_traffic, self._unverified, block_size, rates)
        self._fetches = FetchWork(self._tiers, self._disk_traffic, self._unverified, block_size, rates)
        memory_pools = tuple(pool for pool in (self._tiers.device, self._tiers.host) if pool is not None)
        self._owners = OwnerBook(self._tiers.quotas, memory_pools)
        self._overlay = Overlay(self._pool)
        self._budget = StepBudget()
        self._landings: deque[Landing] = deque()  # to be booked
        self._restores = RestoreBook(self._tiers, self._swaps, self._replace)
        self._table_by_seq: dict[SeqId, BlockTable] = {}
        self._fingerprint = fingerprint
        self._has_prefix_caching = has_prefix_caching
        self._claims_by_step: dict[int, set[BlockKey]] = {}
        self._updates: list[TableUpdate] = []
        self._gone: list[SeqId] = []

    # ---- sequences and tenants

    @property
    def key_space(self) -> bytes:
        """The root from which `namespace_key` derives the keys of blocks, beside a tenant's scope."""
        return self._fingerprint

    def peek(self, tokens: bytes, scope: bytes) -> int:
        """Return how many tokens of a prompt (raw uint32) lie in HBM or DDR now, as far as a step's budget goes."""
        if not self._has_prefix_caching:
            return 0
        width = 4 * self.block_size
        key, covered = namespace_key(self._fingerprint, scope), 0
        while covered + width < len(tokens) and self._budget.take_peek():
            key = child_key(key, tokens[covered : covered + width])
            if key not in self._pool.slot_by_key and self._tiers.loadable(key) is None:
                break
            covered += width
        return covered // 4

    def set_tenants(self, tenants: Tenants) -> None:
        """Set how much each tenant keeps in each tier, at least and at most."""
        self._owners.set_tenants(tenants, self._rates().block_bytes)

    def changing_tenants(self, tenants: Tenants) -> Iterator[None]:
        """Do the same in pieces of about 1 ms."""
        return self._owners.changing_tenants(tenants, self._rates().block_bytes)

    def quota_blocks(self, tenant: TenantId) -> int | None:
        """Return the tenant's quota of blocks of the device tier, for all its sequences together; None: no quota."""
        return self._owners.max_blocks(tenant)

    def set_daily_writes(self, blocks: int) -> None:
        """Set how many blocks may be written to the disk in a day; 0: no limit."""
        self._disk_traffic.budget.change(blocks)

    def open(self, seq: SeqId, tokens: "array[int]", scope: bytes, tenant: TenantId = DEFAULT_TENANT) -> None:
        """Open a sequence. `tokens` is its own growing array; sequences of one `scope` share blocks."""
        if seq in self._table_by_seq:
            raise InvariantError("cache.opened_twice", seq=seq)
        root, owner = namespace_key(self._fingerprint, scope), self._owners[tenant]
        self._table_by_seq[seq] = BlockTable(seq, root, tokens, owner, self._owners.holding(tenant))

    def limit_reuse(self, seq: SeqId, tokens: int | None) -> None:
        """Let a sequence use cached blocks of its first `tokens` tokens only; None: of all. The number never falls.

        The sequence computes its other blocks itself and publishes them. No effect on blocks that it holds.
        """
        self._table_by_seq[seq].reuse_limit = tokens

    def close(self, seq: SeqId) -> Reuse:
        """Forget a sequence and drop its references; the free of slots that a launched step touches is deferred.

        Return what lower tiers have brought the sequence.
        """
        table = self._table_by_seq.pop(seq)
        table.is_closed = True
        self._swaps.settle_retention(table)
        if table.slots or table.was_preempted:
            self._background.note_ended(table)
        if table.slots:
            self._clear(table)
            self._gone.append(seq)
            self._updates = [update for update in self._updates if update.seq != seq]
        return table.reuse(self.block_size)

    def resend(self, seq: SeqId) -> None:
        """Send the sequence's whole table with the next step, instead of any delta: the runner has forgotten it."""
        self._updates = [update for update in self._updates if update.seq != seq]
        slots = self._table_by_seq[seq].slots
        if slots:
            self._updates.append(TableUpdate(seq, 0, _for_runner(slots)))

    # ---- one step

    def ledger(self) -> Ledger:
        """Return a fresh draft to plan one step on."""
        self._budget.draw()
        in_flight = set[BlockKey]().union(*self._claims_by_step.values()) if self._claims_by_step else set[BlockKey]()
        return Ledger(
            self._tiers,
            self._disk_traffic,
            self._swaps,
            self._fetches,
            self._table_by_seq,
            self.block_size,
            in_flight,
            overlay=self._overlay,
            budget=self._budget,
            has_prefix_caching=self._has_prefix_caching,
        )

    def seal(self, plan: Plan, ledger: Ledger, step: int) -> StepPlan:
        """Carry out the draft of an accepted plan: every slot of every slice is owned afterwards.

        From now on the step touches the slots of its sequences, until it has committed or ended.
        Cost:   O(changed blocks + slices).
        Errors: InvariantError if the books disagree; never for lack of room.
        """
        pool, tables = self._pool, self._table_by_seq
        updates = [update for update in self._updates if update.seq not in ledger.released]
        gone = self._gone
        self._updates, self._gone = [], []
        transfers: list[Transfer] = []
        for seq, match in ledger.match_by_seq.items():
            self.prefix_queries += len(tables[seq].tokens)
            self.prefix_hits += match.tokens
            pool.hold_many(match.hits)
            if match.load_blocks:
                self._swaps.hold_sources(match.sources)
            self._swaps.settle_retention(tables[seq])
            tables[seq].fetch, tables[seq].prefix = Fetch(), Prefix()
        for seq, spilled in ledger.released.items():
            if spilled is not None:
                transfers += self._swaps.spill(tables[seq], spilled)
            self._clear(tables[seq])
            gone.append(seq)
        for seq in {**ledger.match_by_seq, **ledger.taken_by_seq}:
            table, match = tables[seq], ledger.match_by_seq.get(seq)
            first = len(table.slots)
            taken = self._take(table, ledger.taken_by_seq.get(seq, 0))
            if match is not None:
                self._fill(table, match, as_slots(taken))
            else:
                table.extend(taken)
            if len(table.slots) > first:
                updates.append(TableUpdate(seq, first, _for_runner(table.slots[first:])))
        if claims := ledger.claimed:
            self._claims_by_step[step] = claims
        for batch in plan.nano_batches:
            for piece in batch.slices:
                tables[piece.seq].last_step = step
        transfers += self._tiers.transfers.start()
        return StepPlan(step, plan.nano_batches, tuple(updates), tuple(gone), tuple(transfers), plan.is_speculative)

    def keep_mail(self, sealed: StepPlan) -> None:
        """Send the table updates of a sealed plan that launched nothing, or was refused, with the next plan."""
        self._updates = list(sealed.table_updates)
        self._gone = list(sealed.gone)

    def commit(self, step: int, progress: Iterable[tuple[SeqId, int]]) -> None:
        """Book a launched step that ended well. `progress` says how many tokens of each sequence are now computed.

        Effects: full blocks get their keys and can be hit; if another sequence published the same block first, the
                 table is pointed at that canonical copy. The frees that were deferred for the step are carried out.
        """
        block_size = self.block_size
        for seq, computed in progress:
            table = self._table_by_seq[seq]
            if self._has_prefix_caching and computed // block_size > table.num_published:
                self._publish(table, computed // block_size)
        self.end(step)

    def end(self, step: int) -> None:
        """Book the end of a launched step, good or not: slots that only it touched are free again."""
        self._claims_by_step.pop(step, None)
        self._pool.commit(step)

    # ---- the tiers below

    def expect(self, seqs: Iterable[SeqId]) -> None:
        """Fetch the prefixes of sequences that will be admitted soon, in this order."""
        self._budget.begin()
        if self._has_prefix_caching:
            self._fetches.expect((self._table_by_seq[seq] for seq in seqs), self._budget)

    def pass_over(self, seqs: Iterable[SeqId], now_s: float) -> None:
        """Limit from now on how long these sequences, which a plan has put off, wait for the disk."""
        self._fetches.pass_over((self._table_by_seq[seq] for seq in seqs), now_s)

    @property
    def next_limit_s(self) -> float | None:
        """When the next sequence will have waited for the disk as long as it may; None if none waits for it."""
        return self._fetches.next_limit_s

    def work(self, likely_victims: Iterable[SeqId], now_s: float, *, is_idle: bool) -> None:
        """Use idle copy time. With `is_idle` no sequence waits, and blocks seen once may go to the disk too."""
        self._background.work((self._table_by_seq[seq] for seq in likely_victims), now_s, is_idle=is_idle)

    def outgoing(self) -> list[Transfer]:
        """Return the transfers to start now: some of the prepared ones, and background work."""
        return self._tiers.transfers.start() + self._tiers.transfers.take_queued()

    def land(self, landings: Iterable[Landing]) -> list[tuple[SeqId, int]]:
        """Book landings. Return the sequences whose restore is over, with the number of tokens that they now hold.

        One step books a limited number of blocks; the rest comes first in the next step.
        """
        restored: list[tuple[SeqId, int]] = []
        self._landings.extend(landings)
        blocks = 0
        while self._landings and blocks < _MAX_LANDED:
            landing = self._landings.popleft()
            self._fetches.note_landing(landing)
            transfer = self._landing_book.land(landing)
            if transfer is None:
                continue
            blocks += len(transfer.keys)
            self._background.note_landing(transfer, landing.verdict)
            if transfer.route is Route.RESTORE:
                table = self._restores.land(transfer, is_good=landing.verdict is Verdict.LANDED)
                if table is not None:
                    restored.append((table.seq, table.num_published * self.block_size))
        return restored

    def attach(self, records: Iterable[tuple[SlotId, BlockKey]], scan: Scan | None = None) -> None:
        """Adopt what an earlier engine left in shared memory and on the disk. Each copy is verified before its use."""
        self._unverified.attach(records)
        self._background.attach_disk(scan)

    @property
    def has_more(self) -> bool:
        """Whether another step should follow at once: a budget of this step was too short, or landings are left."""
        return self._budget.is_short or bool(self._landings)

    @property
    def tiers(self) -> TierSet:
        """The pools of the tiers and the books between them, to be read."""
        return self._tiers

    @property
    def background(self) -> BackgroundWork:
        """The candidates for copies in idle time."""
        return self._background

    # ---- facts

    @property
    def blocks_used(self) -> int:
        """Blocks that a sequence holds, or that a launched step still touches. 0 when idle."""
        return self._pool.num_owned + self._pool.num_deferred

    @property
    def blocks_cached(self) -> int:
        """Blocks that hold a prefix no sequence uses now."""
        return self._pool.num_cached

    @property
    def loaded_tokens(self) -> int:
        """Tokens restored from DDR, since the start."""
        return self._restores.loaded_blocks * self.block_size

    @property
    def swapped_tokens(self) -> int:
        """Tokens that came back from another tier after a preemption, since the start."""
        return self._swaps.swapped_blocks * self.block_size

    @property
    def misses(self) -> int:
        """Copies that were not what their keys promise, since the start."""
        return self._landing_book.misses

    def tier_gauges(self) -> tuple[TierGauges, ...]:
        """Return the gauges of every tier."""
        return tier_gauges(
            self._tiers,
            self._disk_traffic,
            self._owners.holdings(),
            self.prefix_queries,
            self.prefix_hits - self.loaded_tokens,
            self.loaded_tokens,
            self._disk_traffic.read_blocks * self.block_size,
            self._rates().block_bytes,
        )

    def copied_s(self, seq: SeqId) -> float:
        """Return how many seconds copies took for the sequence, down and up, since its last preemption."""
        return self._table_by_seq[seq].copied_s

    def slots(self, seq: SeqId) -> tuple[SlotId, ...]:
        """Return the sequence's block table."""
        return tuple(SlotId(slot) for slot in self._table_by_seq[seq].slots)

    def check_integrity(self) -> None:
        """Check that references and tables agree, and all other books. Errors: InvariantError."""
        tiers = self._tiers
        tiers.quotas.check_integrity()
        for _, pool in tiers.pools():
            pool.check_integrity()
        gateway = Tier.HBM if tiers.host is None else Tier.DDR
        check_references(tiers.transfers, self._unverified.slots(), tiers.pools(), gateway)
        if tiers.links is not None:
            tiers.links.check()
        self._owners.check_integrity(self._table_by_seq.values())
        refs = array("i", self._pool.transfer_refs)
        for table in self._table_by_seq.values():
            for slot in table.slots:
                refs[slot] += 1
            if (block := table.misnamed(self._pool.key, self.block_size)) is not None:
                raise InvariantError("cache.key", seq=table.seq, block=block, slot=table.slots[block])
        if refs != self._pool.refs:
            wrong = [slot for slot in range(self.blocks + 1) if refs[slot] != self._pool.refs[slot]]
            raise InvariantError("cache.references", slots=wrong[:8])

    # ---- inside

    def _take(self, table: BlockTable, count: int) -> list[SlotId] | Slots:
        """Take slots for a table: a list of few, because most tables grow by one, or an array of many."""
        if not count:
            return []
        near = SlotId(table.slots[-1]) if table.slots else None
        if count < MIN_NUMPY_SLOTS:
            return self._pool.take_many(count, near, _HEADROOM)
        return self._pool.take_slots(count, near, _HEADROOM)

    def _fill(self, table: BlockTable, match: PrefixMatch, taken: Slots) -> None:
        """Put hits and fresh slots into an empty table in order, and start the restores."""
        num_loads = match.load_blocks
        covered = match.hit_blocks + num_loads
        if not num_loads:
            table.extend(match.hits.slots)
            table.extend(taken)
            table.num_published = table.num_saved = covered
            return
        slots: Slots = np.zeros(covered, np.intp)
        is_hit = np.ones(covered, bool)
        SlotIndex(match.loads).write(is_hit, 0)
        slots[is_hit] = match.hits.slots
        SlotIndex(match.loads).write(slots, taken[:num_loads])
        table.extend(slots)
        table.extend(taken[num_loads:])
        table.num_published = table.num_saved = int(match.loads[0])
        self._restores.begin(table, match, taken[:num_loads], covered)

    def _clear(self, table: BlockTable) -> None:
        self._background.note_released(table)
        # The tail goes first: of one chain, the end is the first to be evicted.
        self._pool.drop_many(table.held().backwards(), table.last_step)
        table.cut(0)
        table.num_published = table.num_saved = 0
        table.restore = None
        table.fetch, table.prefix = Fetch(), Prefix()
        table.was_preempted = True
        table.copied_s = 0.0

    def _publish(self, table: BlockTable, full_blocks: int) -> None:
        for block in range(table.num_published, full_blocks):
            slot = SlotId(table.slots[block])
            canonical = self._pool.publish(slot, table.key(block, self.block_size))
            if canonical != slot:
                self._replace(table, block, slot)
            else:
                self._pool.copies.set_owner(slot, table.owner)
                self._background.note_published(slot)
        table.num_published = full_blocks

    def _replace(self, table: BlockTable, block: int, slot: SlotId) -> None:
        """Point a table at the canonical copy of a block, instead of its own slot."""
        canonical = self._pool.slot_by_key[table.key(block, self.block_size)]
        self._pool.hold(canonical)
        self._pool.drop(slot, table.last_step)
        table.replace(block, canonical)
        self._updates.append(TableUpdate(table.seq, block, (canonical,)))


def _for_runner(slots: "array[int]") -> Sequence[SlotId]:
    """Return slots for the runner: many as an array, which costs nothing to make and to read."""
    return cast(Sequence[SlotId], tuple(slots) if len(slots) < MIN_NUMPY_SLOTS else slots[:])
