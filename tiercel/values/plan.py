"""Orders: what one step computes. The planner makes a `Plan`; the cache seals it into a `StepPlan`."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tiercel.values.ids import SeqId, SlotId, TenantId
from tiercel.values.tier import Transfer

PreemptionReason = Literal["band", "debt", "share", "growth"]
"""On whose behalf a sequence is preempted.

`band`: a sequence of a higher band. `debt`: a tenant that is owed service. `share`: a tenant that holds less than its
share of HBM, or a sequence that starves. `growth`: a running sequence that needs more blocks.
"""


class SwapCost(Struct, frozen=True, gc=False):
    """The predicted seconds of preempting a sequence and bringing it back, for each way to do so."""

    swap_s: float  # copy the dirty blocks to a lower tier, and copy all blocks back
    recompute_s: float  # drop the dirty blocks, and compute their tokens again


class Preemption(Struct, frozen=True, gc=False):
    """The preemption of one sequence: on whose behalf, why, by which way and at which predicted cost."""

    victim: SeqId
    beneficiary: SeqId
    reason: PreemptionReason
    is_swap: bool  # the blocks are kept in a lower tier; those that have no copy there are spilled first
    kept_tokens: int  # tokens of the victim that a lower tier holds when the spill has ended
    cost: SwapCost
    price_ms: float = 0.0  # predicted device time that the preemption wastes; 0 for the reason `growth`


class Slice(Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of one sequence, computed in one step.

    A slice with proposed tokens has its last `len(proposed)` tokens from there. A token is sampled behind each of them
    and behind the one before them; they count as far as the sampled tokens are the same.
    """

    seq: SeqId
    start: int  # tokens computed or launched before
    length: int  # tokens, >= 1
    samples: bool  # the slice ends at the last token that exists or is being sampled, so a new token is sampled
    proposed: tuple[int, ...] = ()  # tokens; only if `samples`, and length = 1 + their number

    @property
    def is_decode(self) -> bool:
        """Whether the slice has one token, apart from proposed ones."""
        return self.length == 1 or bool(self.proposed)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that are sampled."""
        return 1 + len(self.proposed) if self.samples else 0


class NanoBatch(Struct, frozen=True, gc=False):
    """Ordered slices that share one forward. Parts of a long slice may lie in several nano-batches of a step."""

    slices: tuple[Slice, ...]


def whole_slices(nano_batches: Sequence[NanoBatch]) -> tuple[Slice, ...]:
    """Return the slices of a step, one per sequence: the parts of each sequence are joined.

    The slices are ordered by their last parts, which is the order of the tokens that the step samples.
    """
    if len(nano_batches) == 1:
        return nano_batches[0].slices
    whole: dict[SeqId, Slice] = {}
    for batch in nano_batches:
        for part in batch.slices:
            before = whole.pop(part.seq, None)
            if before is not None:
                part = Slice(part.seq, before.start, before.length + part.length, part.samples)
            whole[part.seq] = part
    return tuple(whole.values())


class Plan(Struct, frozen=True, gc=False):
    """The planner's intent for one step."""

    nano_batches: tuple[NanoBatch, ...]
    admitted: tuple[SeqId, ...] = ()  # WAITING or PREEMPTED before this plan
    restores: tuple[SeqId, ...] = ()  # the admitted sequences that have no slice yet: their blocks are restored first
    preemptions: tuple[Preemption, ...] = ()
    aged: SeqId | None = None  # the sequence that has a slice or is admitted on the aging share
    deferred: tuple[SeqId, ...] = ()  # sequences that wait for a transfer, or for a prefix that another one computes
    at_quota: tuple[TenantId, ...] = ()  # tenants whose next sequence waits only because their quota is full
    next_order: tuple[SeqId, ...] = ()  # the first waiting sequences, in the order in which they will be admitted
    is_speculative: bool = False  # some slice has proposed tokens, so nothing can be planned before it has committed


class TableUpdate(Struct, frozen=True, gc=False):
    """Slots of one sequence's block table from index `first` on."""

    seq: SeqId
    first: int
    slots: Sequence[SlotId]  # a tuple, or an array of C integers for long updates


class StepPlan(Struct, frozen=True, gc=False):
    """A plan sealed by the cache: every slot that the step touches is reserved."""

    step: int  # number of the launch, rising by one
    nano_batches: tuple[NanoBatch, ...]
    table_updates: tuple[TableUpdate, ...] = ()  # since the previous step, in order
    gone: tuple[SeqId, ...] = ()  # finished, aborted or preempted since the previous step; applied before the updates
    transfers: tuple[Transfer, ...] = ()  # transfers that start with the step
    is_speculative: bool = False  # see `Plan`
