"""The plan being drawn; dies with the step."""

from collections.abc import Callable
from math import inf
from typing import Protocol

from tiercel.ids import SeqId, TenantId
from tiercel.plan import NanoBatch, Plan, PreemptionReason, Slice, SwapCost
from tiercel.scheduler.fairness import Account
from tiercel.scheduler.nanobatch import capped
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.scheduler.victim import PreemptionLimiter


class CachedPrefix(Protocol):
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
    @property
    def touched_blocks(self) -> int: ...
    def num_blocks(self, seq: SeqId) -> int: ...
    def quota_left(self, seq: SeqId) -> int | None: ...
    def match(self, seq: SeqId, *, may_load: bool = True) -> CachedPrefix | None: ...
    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]: ...
    def reserve(self, seq: SeqId, tokens: int) -> bool: ...
    def claim(self, seq: SeqId, start: int, end: int) -> None: ...
    def release(self, seq: SeqId, *, spills: bool = False) -> None: ...


class StepSplitter(Protocol):
    """How a step is cut into nano-batches. `Splitter` is one."""

    def split(self, slices: tuple[Slice, ...], block_size: int) -> tuple[NanoBatch, ...]: ...


class Draft:
    """Slices, admissions and victims so far, over the cache's overlay."""

    def __init__(
        self, cache: CacheView, budget: int, rows: int, now_s: float, chooser: SwapChooser, splitter: StepSplitter
    ) -> None:
        self.cache = cache
        self.step_tokens = budget  # at the most
        self.budget = budget  # tokens that are left of them
        self.rows = rows  # sequences that may run at once
        self.now_s = now_s
        self.brake = PreemptionLimiter()
        self.most_prompt: Callable[[int], int] | None = None  # tokens by prompt context that keep the goals of decodes
        self.prompt_tokens = 0  # computed by this step
        self.prompt_context = 0  # the longest before a slice of a prompt
        self.most_forward_tokens: int | None = None  # of one nano-batch
        self.order: tuple[SeqId, ...] = ()  # who waits, as of before
        self.slice_by_seq: dict[SeqId, Slice] = {}
        self.admitted: list[SeqId] = []
        self.restores: list[SeqId] = []
        self.deferred: list[SeqId] = []
        self.at_quota: set[TenantId] = set()  # whose next sequence would exceed what they may hold
        self.held: frozenset[Account] = frozenset()  # indebted: they pause while others can use the step
        self.victims: dict[SeqId, bool] = {}  # whether it is swapped
        self.reasons: list[PreemptionReason] = []  # one a victim
        self.beneficiaries: list[SeqId] = []  # one a victim
        self.kept: list[int] = []  # tokens of it that a lower tier will have, one a victim
        self.prices_ms: list[float] = []  # what the preemption costs, one a victim
        self.costs: list[SwapCost] = []  # predicted, one a victim
        self.aged: SeqId | None = None
        self.outstanding = 0  # blocks that the known tokens of those who run still need
        self.is_short = False  # somebody who runs waits for blocks: nobody may be admitted past them
        self.is_full = False  # no row is left
        self.looked_at: set[SeqId] = set()  # those whose turn has come
        self.has_misfit = False  # somebody whose turn it was did not fit: those behind it may not take room
        self.blocked: set[Account] = set()  # whose first does not fit: nobody of theirs passes it on space
        self.blocked_band: float = inf  # the first band of theirs: no band behind it passes, either
        self._chooser = chooser
        self._splitter = splitter

    @property
    def is_empty(self) -> bool:
        """Nothing is computed, and nobody is on the way in or out."""
        return not (self.slice_by_seq or self.restores or self.victims)

    def add(self, sequence: SequenceProgress, start: int, length: int) -> None:
        """The sequence computes tokens [start, start + length)."""
        samples = start + length == sequence.num_tokens
        self.slice_by_seq[sequence.id] = Slice(sequence.id, start, length, samples)
        self.budget -= length
        self.prompt_tokens += length
        self.prompt_context = max(self.prompt_context, start)
        if self.most_prompt is not None:
            self.budget = min(self.budget, max(0, self.most_prompt(self.prompt_context) - self.prompt_tokens))
        if length > 1:
            self.cache.claim(sequence.id, start, start + length)

    def prompt_budget(self, start: int) -> int:
        """Tokens that a prompt may have behind `start` others: within the goals of those that decode.

        The first of a step gets a block at least, or prompts would never get through.
        """
        if self.most_prompt is None:
            return self.budget
        most = self.most_prompt(max(self.prompt_context, start)) - self.prompt_tokens
        return min(self.budget, max(most, 0 if self.prompt_tokens else self.cache.block_size))

    def decode(self, sequence: SequenceProgress) -> None:
        """The sequence computes the one token that it wants."""
        self.slice_by_seq[sequence.id] = Slice(sequence.id, sequence.scheduled, 1, True)
        self.budget -= 1

    def extend(self, sequence: SequenceProgress, length: int) -> None:
        """A longer slice instead of the one it has. The budget gives the difference."""
        piece = self.slice_by_seq[sequence.id]
        self.budget += piece.length
        self.prompt_tokens -= piece.length
        self.add(sequence, piece.start, length)

    def preempt(
        self, victim: SequenceProgress, reason: PreemptionReason, beneficiary: SequenceProgress, price_ms: float = 0.0
    ) -> bool:
        """Preempt a sequence on behalf of another. Return True when some of its blocks are spilled first."""
        piece = self.slice_by_seq.pop(victim.id, None)
        if piece is not None:
            self.budget += piece.length
            self.prompt_tokens -= piece.length if piece.length > 1 else 0
        dirty, near, far = self.cache.blocks_below(victim.id)
        decision = self._chooser.decide(dirty, near, far, victim.scheduled)
        swaps = decision.swaps
        spills = swaps and dirty > 0
        self.cache.release(victim.id, spills=swaps)
        self.victims[victim.id] = swaps
        self.costs.append(decision.cost)
        self.reasons.append(reason)
        self.beneficiaries.append(beneficiary.id)
        self.prices_ms.append(price_ms)
        self.kept.append(self.cache.block_size * (dirty + near + far if swaps else 0))
        return spills

    def plan(self) -> Plan:
        """The frozen value."""
        come = set(self.admitted)
        return Plan(
            nano_batches=self._nano_batches(),
            admitted=tuple(self.admitted),
            victims=tuple(self.victims),
            reasons=tuple(self.reasons),
            beneficiaries=tuple(self.beneficiaries),
            kept=tuple(self.kept),
            prices_ms=tuple(self.prices_ms),
            costs=tuple(self.costs),
            swapped=tuple(seq for seq, swaps in self.victims.items() if swaps),
            restores=tuple(self.restores),
            aged=self.aged,
            deferred=tuple(self.deferred),
            at_quota=tuple(sorted(self.at_quota)),
            next_order=tuple(seq for seq in self.order if seq not in come),
        )

    def _nano_batches(self) -> tuple[NanoBatch, ...]:
        slices, block_size = tuple(self.slice_by_seq.values()), self.cache.block_size
        if not slices:
            return ()
        batches = self._splitter.split(slices, block_size)
        most = self.most_forward_tokens
        return batches if most is None else capped(batches, most, block_size)
