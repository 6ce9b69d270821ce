"""The cache manager: sole writer of block tables and, through the pool, of every slot's state."""

from array import array
from collections.abc import Iterable

from kvcache.block import namespace_key
from kvcache.ledger import Ledger
from kvcache.pool import SlotPool, SlotState, Undo
from kvcache.table import BlockTable
from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SeqId, SlotId
from tiercel.plan import Plan, StepPlan, TableUpdate


class CacheManager:
    """Block tables of all open sequences over the slots of the device tier.

    One step goes `ledger` -> (the planner draws on it) -> `seal` -> launch -> `confirm` or `undo` -> `commit`.
    """

    def __init__(self, blocks: int, block_size: int, fingerprint: bytes, *, has_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.prefix_queries = 0  # tokens looked up at admission
        self.prefix_hits = 0  # tokens found
        self._pool = SlotPool(blocks)
        self._table_by_seq: dict[SeqId, BlockTable] = {}
        self._fingerprint = fingerprint
        self._has_prefix_caching = has_prefix_caching
        self._claims_by_step: dict[int, set[BlockKey]] = {}
        self._updates: list[TableUpdate] = []
        self._gone: list[SeqId] = []
        self._undo: list[Undo] = []

    # ---- sequences

    def open(self, seq: SeqId, tokens: "array[int]", scope: bytes) -> None:
        """Know a sequence. `tokens` is its own growing array; `scope` says whose blocks it may share."""
        if seq in self._table_by_seq:
            raise InvariantError("cache.opened_twice", seq=seq)
        self._table_by_seq[seq] = BlockTable(seq, namespace_key(self._fingerprint, scope), tokens)

    def close(self, seq: SeqId) -> None:
        """Forget a sequence and drop its references; slots that a launched step touches go through limbo."""
        table = self._table_by_seq.pop(seq)
        if table.slots:
            self._clear(table)
            self._gone.append(seq)
            self._updates = [update for update in self._updates if update.seq != seq]
        self._pool.journal.clear()

    def resend(self, seq: SeqId) -> None:
        """Send the sequence's whole table with the next step, instead of any delta: the runner has forgotten it."""
        self._updates = [update for update in self._updates if update.seq != seq]
        slots = self._table_by_seq[seq].slots
        if slots:
            self._updates.append(TableUpdate(seq, 0, tuple(SlotId(slot) for slot in slots)))

    # ---- one step

    def ledger(self) -> Ledger:
        """A fresh overlay to plan one step on."""
        in_flight = set[BlockKey]().union(*self._claims_by_step.values()) if self._claims_by_step else set[BlockKey]()
        return Ledger(
            self._pool,
            self._table_by_seq,
            self.block_size,
            in_flight,
            has_prefix_caching=self._has_prefix_caching,
        )

    def seal(self, plan: Plan, ledger: Ledger, step: int) -> StepPlan:
        """Apply the overlay of an accepted plan: every slot of every slice is owned afterwards.

        Cost:   O(changed blocks + slices). Keeps an exact undo until `confirm`.
        Errors: InvariantError when the books disagree; never for lack of room.
        """
        pool, tables = self._pool, self._table_by_seq
        mail = self._updates, self._gone
        self._undo = [lambda: self._restore_mail(*mail)]
        updates = [update for update in self._updates if update.seq not in ledger.released]
        gone = list(self._gone)
        self._updates, self._gone = [], []
        touched = {**ledger.hits_by_seq, **ledger.taken_by_seq, **ledger.released}
        self._undo += [self._saved(tables[seq]) for seq in touched]
        self._count_hits(ledger)
        for seq, hits in ledger.hits_by_seq.items():
            for slot in hits:
                pool.hold(slot)
            tables[seq].slots.extend(hits)
            tables[seq].num_published = len(hits)
            if hits:
                updates.append(TableUpdate(seq, 0, tuple(hits)))
        for seq in ledger.released:
            self._clear(tables[seq])
            gone.append(seq)
        for seq, missing in ledger.taken_by_seq.items():
            slots = tables[seq].slots
            first = len(slots)
            slots.extend([pool.take() for _ in range(missing)])
            updates.append(TableUpdate(seq, first, tuple(SlotId(slot) for slot in slots[first:])))
        if ledger.claimed:
            self._claims_by_step[step] = ledger.claimed
            self._undo.append(lambda: self._claims_by_step.pop(step))
        return StepPlan(step, plan.nano_batches, tuple(updates), tuple(gone))

    def keep_mail(self, sealed: StepPlan) -> None:
        """The sealed plan launches nothing: what it had to tell the runner goes with the next one."""
        self._updates = list(sealed.table_updates)
        self._gone = list(sealed.gone)

    def confirm(self, sealed: StepPlan) -> None:
        """The sealed step was launched: it touches the slots of its sequences until it has committed."""
        tables = self._table_by_seq
        for batch in sealed.nano_batches:
            for piece in batch.slices:
                tables[piece.seq].last_step = sealed.step
        self._undo.clear()
        self._pool.journal.clear()

    def undo(self) -> None:
        """The sealed step could not be launched: every book is as before `seal`."""
        self._pool.undo()
        while self._undo:
            self._undo.pop()()

    def commit(self, step: int, progress: Iterable[tuple[SeqId, int]]) -> None:
        """A launched step ended well. `progress` says how many tokens of each sequence are now computed.

        Effects: full blocks get their keys and can be hit; where another sequence published the same block first,
                 the table is pointed at that canonical copy. Limbo slots of the step settle.
        """
        block_size = self.block_size
        for seq, computed in progress:
            table = self._table_by_seq[seq]
            if self._has_prefix_caching and computed // block_size > table.num_published:
                self._publish(table, computed // block_size)
        self.end(step)

    def end(self, step: int) -> None:
        """A launched step ended, well or not: what only it touched is free again."""
        self._claims_by_step.pop(step, None)
        self._pool.commit(step)
        self._pool.journal.clear()

    # ---- facts

    @property
    def blocks_used(self) -> int:
        """Blocks that a sequence holds, or that a launched step still touches. 0 when idle."""
        return self._pool.num_owned + self._pool.num_limbo

    @property
    def blocks_cached(self) -> int:
        """Blocks that hold a prefix nobody uses now."""
        return self._pool.num_cached

    def slots(self, seq: SeqId) -> tuple[SlotId, ...]:
        """The sequence's block table."""
        return tuple(SlotId(slot) for slot in self._table_by_seq[seq].slots)

    def check_integrity(self) -> None:
        """Every reference is found in exactly that many tables, every book agrees. Errors: InvariantError."""
        self._pool.check_integrity()
        refs = array("i", bytes(4 * (self.blocks + 1)))
        for table in self._table_by_seq.values():
            for block, slot in enumerate(table.slots):
                refs[slot] += 1
                expected = table.key(block, self.block_size) if block < table.num_published else None
                key = self._pool.key(SlotId(slot))
                if (expected is None) != (key is None) or (expected is not None and key != expected):
                    raise InvariantError("cache.key", seq=table.seq, block=block, slot=slot)
        if refs != self._pool.refs:
            wrong = [slot for slot in range(self.blocks + 1) if refs[slot] != self._pool.refs[slot]]
            raise InvariantError("cache.references", slots=wrong[:8])

    def snapshot(self) -> object:
        """Every book in comparable form, for tests of `undo`."""
        pool = self._pool
        states = [SlotState(state).name for state in pool.states]
        tables = {seq: (list(table.slots), table.num_published) for seq, table in self._table_by_seq.items()}
        return (
            states,
            list(pool.refs),
            dict(pool.slot_by_key),
            pool.eviction_order(),
            pool.free_order(),
            tables,
            list(self._updates),
            list(self._gone),
            {step: set(claims) for step, claims in self._claims_by_step.items()},
        )

    # ---- inside

    def _clear(self, table: BlockTable) -> None:
        # The tail goes first: of one chain, the end is the first to be evicted.
        for slot in reversed(table.slots):
            self._pool.drop(SlotId(slot), table.last_step)
        table.slots = array("i")
        table.num_published = 0

    def _publish(self, table: BlockTable, full_blocks: int) -> None:
        for block in range(table.num_published, full_blocks):
            slot = SlotId(table.slots[block])
            canonical = self._pool.publish(slot, table.key(block, self.block_size))
            if canonical != slot:
                self._pool.hold(canonical)
                self._pool.drop(slot, table.last_step)
                table.slots[block] = canonical
                self._updates.append(TableUpdate(table.seq, block, (canonical,)))
        table.num_published = full_blocks

    def _count_hits(self, ledger: Ledger) -> None:
        queries, hits = self.prefix_queries, self.prefix_hits
        self._undo.append(lambda: self._restore_counts(queries, hits))
        for seq, slots in ledger.hits_by_seq.items():
            self.prefix_queries += len(self._table_by_seq[seq].tokens)
            self.prefix_hits += len(slots) * self.block_size

    def _restore_counts(self, queries: int, hits: int) -> None:
        self.prefix_queries, self.prefix_hits = queries, hits

    def _restore_mail(self, updates: list[TableUpdate], gone: list[SeqId]) -> None:
        self._updates, self._gone = updates, gone

    @staticmethod
    def _saved(table: BlockTable) -> Undo:
        slots, num_published = array("i", table.slots), table.num_published

        def restore() -> None:
            table.slots, table.num_published = slots, num_published

        return restore
