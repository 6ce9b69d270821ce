"""The draft of one plan: slices, admissions and preemptions, over an overlay of the cache."""

from collections.abc import Callable, Collection
from typing import Final, Protocol

from tiercel.scheduler.nanobatch import capped
from tiercel.scheduler.preemption_limiter import PreemptionLimiter
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import NanoBatch, Plan, Preemption, PreemptionReason, Slice

MaxPrompt = Callable[[int, int, int], int]
"""Returns the tokens that a prompt may add to a step.

Arguments: the prompt tokens of the step so far, the sum of their tokens times context, and the context of the prompt.
"""


class CachedPrefix(Protocol):
    """The prefix of a sequence that the cache holds, so that it need not be computed."""

    @property
    def tokens(self) -> int: ...
    @property
    def hit_blocks(self) -> int: ...
    @property
    def load_blocks(self) -> int: ...


class CacheView(Protocol):
    """The part of the cache that planning needs: an overlay that changes nothing until it is sealed."""

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
    def follow(self, seq: SeqId, start: int) -> None: ...
    def computing(self, seq: SeqId, tokens: int) -> SeqId | None: ...
    def release(self, seq: SeqId, *, spills: bool = False) -> None: ...


class StepSplitter(Protocol):
    """Splits a step into nano-batches. `Splitter` is one."""

    def split(self, slices: tuple[Slice, ...], block_size: int) -> tuple[NanoBatch, ...]: ...


class Draft:
    """The slices, admissions and preemptions of one step so far."""

    def __init__(
        self,
        cache: CacheView,
        limits: StepLimits,
        limiter: PreemptionLimiter,
        chooser: SwapChooser,
        splitter: StepSplitter,
        *,
        now_s: float,
        step_tokens: int,
        max_forward_tokens: int | None,
        order: tuple[SeqId, ...],
    ) -> None:
        """Begin a draft.

        `step_tokens` limits the tokens of the step, `max_forward_tokens` those of a nano-batch if it is not None.
        `order` lists the first waiting sequences before the step.
        """
        self.cache: Final = cache
        self.limits: Final = limits
        self.limiter: Final = limiter
        self.now_s: Final = now_s
        self.step_tokens: Final = step_tokens
        self.tokens_left = step_tokens
        self.slice_by_seq: dict[SeqId, Slice] = {}
        self.preemption_by_seq: dict[SeqId, Preemption] = {}  # by victim
        self.admitted: list[SeqId] = []
        self.restores: list[SeqId] = []  # the admitted sequences that are restored first
        self.deferred: list[SeqId] = []  # sequences that wait for a transfer or for a prefix of another sequence
        self.at_quota: set[TenantId] = set()  # tenants whose next sequence would exceed their quota
        self.aged: SeqId | None = None  # the sequence that may use the aging share
        self.blocks_owed = 0  # blocks that the known tokens of the running sequences still need
        self.is_speculative = False  # some slice has proposed tokens
        self.is_short = False  # a running sequence waits for blocks, so that no sequence may be admitted
        self._prompt_tokens = 0  # computed by this step
        self._prompt_reads = 0  # sum of tokens times context over the prompts of this step
        self._max_prompt: MaxPrompt | None = None
        self._max_forward_tokens = max_forward_tokens
        self._order = order
        self._chooser = chooser
        self._splitter = splitter

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing, restores nothing and preempts nothing."""
        return not (self.slice_by_seq or self.restores or self.preemption_by_seq)

    def limit_prompts(self, max_prompt: MaxPrompt | None) -> None:
        """Limit the time of the step's prompts, so that the goals of decodes are kept."""
        self._max_prompt = max_prompt

    def add(self, sequence: SequenceProgress, start: int, length: int) -> None:
        """Add a slice of a prompt's tokens [start, start + length)."""
        samples = start + length == sequence.num_tokens
        self.slice_by_seq[sequence.id] = Slice(sequence.id, start, length, samples)
        self.tokens_left -= length
        self._prompt_tokens += length
        self._prompt_reads += length * start
        if self._max_prompt is not None:  # of a prompt without context: no other prompt may have more
            self.tokens_left = min(
                self.tokens_left, max(0, self._max_prompt(self._prompt_tokens, self._prompt_reads, 0))
            )
        self.cache.claim(sequence.id, start, start + length)

    def prompt_budget(self, start: int) -> int:
        """Return the tokens that a prompt with `start` tokens of context may have within the goals of decodes.

        The first prompt of a step gets at least a block, so that prompts make progress.
        """
        if self._max_prompt is None:
            return self.tokens_left
        most = self._max_prompt(self._prompt_tokens, self._prompt_reads, start)
        return min(self.tokens_left, max(most, 0 if self._prompt_tokens else self.cache.block_size))

    def decode(self, sequences: Collection[SequenceProgress]) -> None:
        """Add a slice of the one token that each of these decoding sequences wants."""
        for one in sequences:
            self.slice_by_seq[one.id] = Slice(one.id, one.scheduled, 1, True)
        self.tokens_left -= len(sequences)

    def propose(self, seq: SeqId, tokens: tuple[int, ...]) -> None:
        """Add proposed tokens to the slice of a decoding sequence, which has room for them."""
        piece = self.slice_by_seq[seq]
        self.slice_by_seq[seq] = Slice(seq, piece.start, 1 + len(tokens), True, tokens)
        self.tokens_left -= len(tokens)
        self.is_speculative = True

    def extend(self, sequence: SequenceProgress, length: int) -> None:
        """Replace the slice of a sequence by a longer one from the same start."""
        piece = self.slice_by_seq[sequence.id]
        self.tokens_left += piece.length
        self._prompt_tokens -= piece.length
        self._prompt_reads -= piece.length * piece.start
        self.add(sequence, piece.start, length)

    def preempt(
        self, victim: SequenceProgress, reason: PreemptionReason, beneficiary: SequenceProgress, price_ms: float = 0.0
    ) -> bool:
        """Preempt a sequence on behalf of another. Return whether blocks of the victim are spilled first."""
        piece = self.slice_by_seq.pop(victim.id, None)
        if piece is not None:
            self.tokens_left += piece.length
            if not piece.is_decode:
                self._prompt_tokens -= piece.length
                self._prompt_reads -= piece.length * piece.start
        dirty, near, far = self.cache.blocks_below(victim.id)
        decision = self._chooser.decide(dirty, near, far, victim.scheduled)
        self.cache.release(victim.id, spills=decision.swaps)
        self.preemption_by_seq[victim.id] = Preemption(
            victim=victim.id,
            beneficiary=beneficiary.id,
            reason=reason,
            is_swap=decision.swaps,
            kept_tokens=self.cache.block_size * (dirty + near + far) if decision.swaps else 0,
            cost=decision.cost,
            price_ms=price_ms,
        )
        return decision.swaps and dirty > 0

    def plan(self) -> Plan:
        """Return the plan."""
        admitted = set(self.admitted)
        return Plan(
            nano_batches=self._nano_batches(),
            admitted=tuple(self.admitted),
            restores=tuple(self.restores),
            preemptions=tuple(self.preemption_by_seq.values()),
            aged=self.aged,
            deferred=tuple(self.deferred),
            at_quota=tuple(sorted(self.at_quota)),
            next_order=tuple(seq for seq in self._order if seq not in admitted),
            is_speculative=self.is_speculative,
        )

    def _nano_batches(self) -> tuple[NanoBatch, ...]:
        slices, block_size = tuple(self.slice_by_seq.values()), self.cache.block_size
        if not slices:
            return ()
        batches = self._splitter.split(slices, block_size)
        most = self._max_forward_tokens
        return batches if most is None else capped(batches, most, block_size)
