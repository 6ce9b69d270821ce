"""Orders: what one step computes. A `Plan` is intent; sealed by the cache it becomes a `StepPlan`."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tiercel.ids import SeqId, SlotId, TenantId
from tiercel.tier import Transfer

PreemptionReason = Literal["band", "debt", "share", "growth"]
"""For whom: a higher band, one that was owed service or room, or starved, or a running sequence that grows."""


class SwapCost(Struct, frozen=True, gc=False):
    """The predicted seconds of taking a victim away and bringing it back, each way."""

    swap_s: float  # its dirty blocks go down, all its blocks come up
    recompute_s: float  # its dirty blocks are dropped and their tokens computed again


class Slice(Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of one sequence, computed in one step."""

    seq: SeqId
    start: int  # tokens computed or launched before
    length: int  # tokens, >= 1
    samples: bool  # the last token that exists or is being sampled lies inside: a new one is drawn


class NanoBatch(Struct, frozen=True, gc=False):
    """Ordered slices that share one forward. A long slice may lie in parts in several nano-batches of its step."""

    slices: tuple[Slice, ...]


def whole_slices(nano_batches: Sequence[NanoBatch]) -> tuple[Slice, ...]:
    """A step's slices as the books see them: one a sequence, its parts joined.

    They come in the order of their last parts, which is the order of what they sample.
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
    admitted: tuple[SeqId, ...] = ()  # WAITING or PREEMPTED until now; their first slice is in this step
    victims: tuple[SeqId, ...] = ()  # preempted by this plan
    reasons: tuple[PreemptionReason, ...] = ()  # why, one a victim
    beneficiaries: tuple[SeqId, ...] = ()  # who gains by it, one a victim
    kept: tuple[int, ...] = ()  # tokens of it that come back from a lower tier, one a victim
    prices_ms: tuple[float, ...] = ()  # predicted device time that each preemption costs, one a victim
    costs: tuple[SwapCost, ...] = ()  # predicted, one a victim
    swapped: tuple[SeqId, ...] = ()  # of the victims: what no lower tier holds yet is spilled first
    restores: tuple[SeqId, ...] = ()  # of the admitted: no slice yet, their blocks come up first
    aged: SeqId | None = None  # has a slice or comes in on the share of those who starve
    deferred: tuple[SeqId, ...] = ()  # wait for something that is on its way
    at_quota: tuple[TenantId, ...] = ()  # hold all that they may: nothing but that keeps theirs waiting
    next_order: tuple[SeqId, ...] = ()  # wait, in the order in which they will be admitted; the first of them only


class TableUpdate(Struct, frozen=True, gc=False):
    """Slots of one sequence's block table from index `first` on."""

    seq: SeqId
    first: int
    slots: Sequence[SlotId]  # a tuple, or an array of C integers where there are many


class StepPlan(Struct, frozen=True, gc=False):
    """A plan sealed by the cache: every slot it touches is reserved."""

    step: int  # counts up by one a launch
    nano_batches: tuple[NanoBatch, ...]
    table_updates: tuple[TableUpdate, ...] = ()  # since the step before, in order
    gone: tuple[SeqId, ...] = ()  # finished, aborted or preempted since the step before; precede the updates
    transfers: tuple[Transfer, ...] = ()  # to start with it
