"""Who gives way to whom, in which order, and when switching is not worth it."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from msgspec import Struct

from tiercel.ids import SeqId
from tiercel.scheduler.fairness import Account


class VictimCandidate(Struct, frozen=True, gc=False):
    """A running sequence as a possible victim."""

    seq: SeqId
    account: Account
    is_batch: bool  # batch class: nobody watches it
    admitted: int  # counts up with every admission and resumption
    since_resume: int  # tokens computed since then


def victims(
    holders: Iterable[VictimCandidate],
    lead: Callable[[Account], float],
    gain: Callable[[SeqId], float],
    least_tokens: int = 16,
) -> Iterator[SeqId]:
    """Who of those that may be preempted gives way, first to last, lazily.

    The lowest band first; batch before interactive; the tenant with the largest lead over its share; the largest gain
    (blocks freed per exposed millisecond), which is asked for only where all before it is equal; the newest. Never one
    with fewer than `least_tokens` since it resumed; 0 where rule 5 makes that void.
    """

    def place(holder: VictimCandidate) -> tuple[int, bool, float]:
        return (-holder.account.band, not holder.is_batch, -lead(holder.account))

    able = [one for one in holders if one.since_resume >= least_tokens]
    placed = sorted(((place(one), one) for one in able), key=lambda pair: pair[0])
    for _, group in groupby(placed, key=lambda pair: pair[0]):
        equals = [one for _, one in group]
        if len(equals) > 1:
            equals.sort(key=lambda one: (-gain(one.seq), -one.admitted))
        yield from (one.seq for one in equals)


class PreemptionLimiter:
    """At most two switches a step and no restore in a step that spilled. One per step.

    Both limits exist for speed. They are lifted while the `StarvationCounter` is starving.
    """

    def __init__(self, *, is_void: bool = False, most: int = 2) -> None:
        self.is_void = is_void
        self._most = most
        self._switches = 0
        self._has_spilled = False

    def may_preempt(self) -> bool:
        return self.is_void or self._switches < self._most

    def may_restore(self) -> bool:
        return self.is_void or (self._switches < self._most and not self._has_spilled)

    def preempt(self, *, spills: bool) -> None:
        """A sequence gives way. Writing back in the background is no spill."""
        self._switches += 1
        self._has_spilled |= spills

    def restore(self) -> None:
        """A preempted sequence comes back."""
        self._switches += 1


class StarvationCounter:
    """How many steps in a row the first in rank got no slice: from `most_steps` (G) on the brake is void.

    Whoever the first was: where two are first in turn, a count of each would never reach G.
    """

    def __init__(self, most_steps: int = 8) -> None:
        self._most_steps = most_steps
        self._steps = 0

    @property
    def is_void(self) -> bool:
        return self._steps >= self._most_steps

    def step(self, *, was_served: bool) -> None:
        """A step was planned, with or without a slice for the first in rank of all that want one."""
        self._steps = 0 if was_served else self._steps + 1
