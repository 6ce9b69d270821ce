"""The planner: from the book and a cache overlay to the plan of one step."""

from dataclasses import dataclass
from typing import Protocol

from scheduler.book import SequenceBook
from scheduler.budget import chunk_length
from scheduler.preemption import SwapChooser
from scheduler.sequence import Sequence
from tiercel.ids import SeqId
from tiercel.plan import NanoBatch, Plan, Slice
from tiercel.rates import Rates


_MOST_SWITCHES = 2  # preemptions for somebody who waits, a step


class Found(Protocol):
    """The prefix of a sequence that need not be computed."""

    @property
    def tokens(self) -> int: ...
    @property
    def hit_blocks(self) -> int: ...
    @property
    def load_blocks(self) -> int: ...


class CacheView(Protocol):
    """What planning needs from the cache: an overlay that changes nothing until it is sealed."""

    block_size: int

    @property
    def available_blocks(self) -> int: ...
    @property
    def coming_blocks(self) -> int: ...
    def num_blocks(self, seq: SeqId) -> int: ...
    def match(self, seq: SeqId, *, may_load: bool = True) -> Found | None: ...
    def dirty_blocks(self, seq: SeqId) -> int: ...
    def reserve(self, seq: SeqId, tokens: int) -> bool: ...
    def claim(self, seq: SeqId, start: int, end: int) -> None: ...
    def release(self, seq: SeqId, *, spills: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs, so that every decode fits beside a prefill's first token
    long_prefill_token_threshold: int = 0  # tokens of one prompt a step; 0 = no cap


class _Draft:
    """The plan being drawn; dies with the step."""

    def __init__(self, cache: CacheView, budget: int, chooser: SwapChooser) -> None:
        self.cache = cache
        self.chooser = chooser
        self.budget = budget
        self.slice_by_seq: dict[SeqId, Slice] = {}
        self.admitted: list[SeqId] = []
        self.restores: list[SeqId] = []
        self.victims: dict[SeqId, bool] = {}  # whether it is swapped
        self.is_short = False  # somebody who runs waits for blocks: nobody may be admitted past them

    def add(self, sequence: Sequence, start: int, length: int) -> None:
        samples = start + length == sequence.num_tokens
        self.slice_by_seq[sequence.id] = Slice(sequence.id, start, length, samples)
        self.budget -= length
        if length > 1:
            self.cache.claim(sequence.id, start, start + length)

    def preempt(self, victim: Sequence) -> None:
        piece = self.slice_by_seq.pop(victim.id, None)
        if piece is not None:
            self.budget += piece.length
        dirty = self.cache.dirty_blocks(victim.id)
        spills = self.chooser.swaps(dirty, self.cache.num_blocks(victim.id), victim.computed)
        self.cache.release(victim.id, spills=spills)
        self.victims[victim.id] = spills

    def plan(self) -> Plan:
        slices = tuple(self.slice_by_seq.values())
        batches = (NanoBatch(slices),) if slices else ()
        swapped = tuple(seq for seq, spills in self.victims.items() if spills)
        return Plan(batches, tuple(self.admitted), tuple(self.victims), swapped, tuple(self.restores))


class Planner:
    """Decides who computes what next. Reads the book, draws on the cache's overlay, changes neither."""

    def __init__(self, book: SequenceBook, limits: StepLimits, chooser: SwapChooser | None = None) -> None:
        self._book = book
        self._limits = limits
        self._chooser = chooser or SwapChooser("auto", Rates)

    def plan(self, cache: CacheView) -> Plan:
        """One step: running decodes, then running prefills, then admissions, each in rank order.

        The first in rank always gets a token; it may take blocks from the last. Never fails for lack of room.
        """
        draft = _Draft(cache, self._limits.max_num_batched_tokens, self._chooser)
        if self._book.num_suspects:
            self._run_suspect(draft)
            return draft.plan()
        outstanding = self._continue_running(draft)
        self._keep_room_to_grow(draft)
        if not draft.is_short and not draft.victims:
            self._admit_waiting(draft, outstanding)
        return draft.plan()

    def _continue_running(self, draft: _Draft) -> int:
        """Slices for those that run. Returns the blocks that their known tokens still need after this step.

        Decodes inside a block go first: they need nothing. Who needs a block gets it in rank order, so that what the
        first freed by preempting is not taken by a lower one that happens to decode.
        """
        block_size = draft.cache.block_size
        decodes: list[Sequence] = []
        needy: list[Sequence] = []
        for sequence in self._book.running:
            want = sequence.want
            if want == 1 and sequence.scheduled % block_size:
                decodes.append(sequence)
            elif want:
                needy.append(sequence)
        kept_tokens = 1 if needy else 0  # in case the first in rank is among them
        for sequence in decodes:
            if draft.budget <= kept_tokens:
                break
            draft.add(sequence, sequence.scheduled, 1)
        waiting_decodes = sum(sequence.want == 1 for sequence in needy)
        for sequence in needy:
            if draft.budget <= 0:
                break
            waiting_decodes -= sequence.want == 1
            if sequence.id not in draft.victims:
                self._continue(draft, sequence, max(1, draft.budget - waiting_decodes))
        return sum(
            max(0, -(-sequence.num_tokens // block_size) - draft.cache.num_blocks(sequence.id))
            for sequence in needy
            if sequence.want > 1 and sequence.id not in draft.victims
        )

    def _continue(self, draft: _Draft, sequence: Sequence, budget: int) -> None:
        length = self._chunk(draft, sequence.scheduled, sequence.want, budget)
        if self._make_room(draft, sequence, sequence.scheduled + length):
            draft.add(sequence, sequence.scheduled, length)

    def _make_room(self, draft: _Draft, sequence: Sequence, tokens: int) -> bool:
        """Reserve blocks, preempting from the last in rank upwards. False: wait for blocks that are coming."""
        cache = draft.cache
        while not cache.reserve(sequence.id, tokens):
            missing = -(-tokens // cache.block_size) - cache.num_blocks(sequence.id)
            victim = self._victim(draft, sequence)
            if cache.available_blocks + cache.coming_blocks >= missing or victim is None:
                draft.is_short = True
                return False
            draft.preempt(victim)
        return True

    def _victim(self, draft: _Draft, beneficiary: Sequence) -> Sequence | None:
        for candidate in reversed(self._book.running):
            if candidate.rank <= beneficiary.rank:
                return None
            if candidate.id not in draft.victims:
                return candidate
        return None

    def _keep_room_to_grow(self, draft: _Draft) -> None:
        """Preempt before room runs out: a victim's blocks are free only after the steps in flight have committed."""
        cache, block_size = draft.cache, draft.cache.block_size
        if draft.victims or draft.is_short or len(self._book.running) < 2:
            return
        if cache.available_blocks + cache.coming_blocks >= len(draft.slice_by_seq):
            return  # room for everybody, whoever crosses a block boundary next
        growing = sum(  # needs a block within two steps
            -(end := piece.start + piece.length) % block_size < 2 and end + 1 < self._book[piece.seq].limit
            for piece in draft.slice_by_seq.values()
        )
        if cache.available_blocks + cache.coming_blocks < growing:
            draft.preempt(self._book.running[-1])

    def _admit_waiting(self, draft: _Draft, outstanding: int) -> None:
        cache = draft.cache
        running = len(self._book.running)
        for sequence in self._book.waiting:
            if draft.budget <= 0:
                return
            if running + len(draft.admitted) >= self._limits.max_num_seqs:
                self._take_from_lower_band(draft, sequence, 0)
                return
            found = cache.match(sequence.id)
            if found is None:
                continue  # its prefix is being computed or comes up from the disk: others need not wait with it
            missing = -(-sequence.num_tokens // cache.block_size) - found.hit_blocks
            others = running + len(draft.admitted)
            # Room for all it has to say by now, for what the others still need, and one block each to grow.
            needed = missing + outstanding + others
            if others and cache.available_blocks < needed:
                cache.release(sequence.id)
                self._take_from_lower_band(draft, sequence, needed)
                return
            if found.load_blocks:
                # All it needs and one block more, before anything starts: restores that take slots as they come
                # wait for each other for ever.
                if not cache.reserve(sequence.id, min(found.tokens + cache.block_size, sequence.limit)):
                    cache.release(sequence.id)
                    return
                draft.restores.append(sequence.id)
                end = found.tokens
            else:
                length = self._chunk(draft, found.tokens, sequence.num_tokens - found.tokens, draft.budget)
                end = found.tokens + length
                if not cache.reserve(sequence.id, end):
                    cache.release(sequence.id)
                    return
                draft.add(sequence, found.tokens, length)
            outstanding += max(0, missing + found.hit_blocks - cache.num_blocks(sequence.id))
            draft.admitted.append(sequence.id)

    def _take_from_lower_band(self, draft: _Draft, beneficiary: Sequence, needed: int) -> None:
        """Preempt for somebody who waits, from the last in rank, if its band is lower: a row, or blocks.

        At most two a step, and whoever gains waits for the next one: spills and restores must not meet in a step.
        """
        cache = draft.cache
        for victim in reversed(self._book.running):
            is_enough = draft.victims and cache.available_blocks + cache.coming_blocks >= needed
            if victim.band <= beneficiary.band or is_enough or len(draft.victims) >= _MOST_SWITCHES:
                return
            if not needed or cache.available_blocks + cache.coming_blocks < needed:
                draft.preempt(victim)

    def _run_suspect(self, draft: _Draft) -> None:
        """After a failed step its sequences run one at a time, with nothing else in flight.

        Anybody gives way to the suspect: until it is cleared or failed nobody else runs.
        """
        running, cache = self._book.running, draft.cache
        if cache.coming_blocks or any(sequence.in_flight for sequence in running):
            return
        suspect = next((one for one in (*running, *self._book.waiting) if one.is_suspect), None)
        if suspect is None:
            return  # it drains
        is_waiting = suspect not in running
        start = suspect.scheduled
        if is_waiting:
            found = cache.match(suspect.id, may_load=False)
            start = found.tokens if found else 0
        length = self._chunk(draft, start, suspect.num_tokens - start, draft.budget)
        for other in reversed([one for one in running if one is not suspect]):
            if cache.reserve(suspect.id, start + length):
                break
            draft.preempt(other)
        if not cache.reserve(suspect.id, start + length):
            return
        if is_waiting:
            draft.admitted.append(suspect.id)
        draft.add(suspect, start, length)

    def _chunk(self, draft: _Draft, start: int, want: int, budget: int) -> int:
        threshold = self._limits.long_prefill_token_threshold or want
        return chunk_length(start, want, min(budget, threshold), draft.cache.block_size)
