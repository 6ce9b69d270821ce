"""The cost of each preemption: predicted when the sequence is preempted, and measured when it is back."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite

from msgspec import Struct

from tiercel.scheduler.cost import StepCosts, work_by_payer
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId
from tiercel.values.outcome import SwitchGauges
from tiercel.values.plan import Slice, SwapCost

log = logging.getLogger(__name__)


class ReturnedVictim(Struct, frozen=True, gc=False):
    """A preempted sequence that has computed again all that it had lost."""

    seq: SeqId
    is_swap: bool
    tokens: int  # computed when it was preempted
    cost: SwapCost  # predicted when it was preempted
    recompute_s: float  # measured: its part of the steps that computed its tokens again


class _AwayVictim:
    """One sequence between its preemption and its return."""

    __slots__ = ("cost", "is_swap", "recompute_s", "seq", "tokens")

    def __init__(self, seq: SeqId, cost: SwapCost, tokens: int, *, is_swap: bool) -> None:
        self.seq = seq
        self.cost = cost
        self.tokens = tokens
        self.is_swap = is_swap
        self.recompute_s = 0.0


class _RepeatedPart(Struct, frozen=True, gc=False):
    """The part of one step that computes a victim's tokens again."""

    victim: _AwayVictim
    part: float
    is_last: bool


class PreemptionBook:
    """Follows victims from preemption to return. Written by the SequenceBook, read by the loop.

    A victim that is preempted again before it is back is followed anew, with the tokens that it has computed by then.
    A victim that ends before it is back is dropped.
    """

    def __init__(self) -> None:
        self._away: dict[SeqId, _AwayVictim] = {}
        self._steps: deque[list[_RepeatedPart]] = deque()  # launched and not settled
        self._returned: list[ReturnedVictim] = []
        self._count = {False: 0, True: 0}  # by `is_swap`, since start
        self._predicted_s = {False: 0.0, True: 0.0}
        self._realised_s = {False: 0.0, True: 0.0}

    def preempt(self, seq: SeqId, cost: SwapCost, tokens: int, *, is_swap: bool) -> None:
        """Begin to follow a sequence that is preempted with `tokens` computed tokens."""
        chosen_s, other_s = (cost.swap_s, cost.recompute_s) if is_swap else (cost.recompute_s, cost.swap_s)
        log.debug(
            "victim seq=%d mode=%s tokens=%d chosen_ms=%.2f other_ms=%.2f",
            seq, "swap" if is_swap else "recompute", tokens, 1e3 * chosen_s, 1e3 * other_s,
        )  # fmt: skip
        self._away[seq] = _AwayVictim(seq, cost, tokens, is_swap=is_swap)

    def drop(self, seq: SeqId) -> None:
        """Forget a sequence that has ended."""
        self._away.pop(seq, None)

    def launch(self, pieces: Sequence[tuple[SequenceProgress, Slice]], costs: StepCosts) -> None:
        """Find which part of a launched step repeats work. Cost: nothing if no victim is away."""
        parts: list[_RepeatedPart] = []
        back = [(self._away[one.id], piece) for one, piece in pieces if one.id in self._away] if self._away else ()
        if back:
            ms_by_seq = costs.share_ms(work_by_payer((one.id, piece.length, piece.start) for one, piece in pieces))
            total_ms = sum(ms_by_seq.values())
            for victim, piece in back:
                end = piece.start + piece.length
                repeated = max(0, min(end, victim.tokens) - piece.start) / piece.length
                part = ms_by_seq[victim.seq] / total_ms if total_ms > 0 else 0.0
                parts.append(_RepeatedPart(victim, repeated * part, end >= victim.tokens))
        self._steps.append(parts)

    def settle(self, measured_s: float) -> None:
        """Add the time of the oldest launched step. 0 for a void step, whose slices are launched again."""
        for repeated in self._steps.popleft():
            victim = repeated.victim
            if measured_s <= 0 or self._away.get(victim.seq) is not victim:
                continue
            victim.recompute_s += repeated.part * measured_s
            if repeated.is_last:
                del self._away[victim.seq]
                self._returned.append(
                    ReturnedVictim(victim.seq, victim.is_swap, victim.tokens, victim.cost, victim.recompute_s)
                )

    def take_returned(self) -> Iterable[ReturnedVictim]:
        """Return the victims that have come back since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def record_return(self, back: ReturnedVictim, copied_s: float) -> float:
        """Log and count a victim that is back and whose copies took `copied_s`. Return its measured cost in seconds."""
        chosen_s, other_s = back.cost.swap_s, back.cost.recompute_s
        if not back.is_swap:
            chosen_s, other_s = other_s, chosen_s
        realised_s = copied_s + back.recompute_s
        log.debug(
            "switch over seq=%d mode=%s tokens=%d predicted_ms=%.2f other_ms=%.2f realised_ms=%.2f copied_ms=%.2f",
            back.seq, "swap" if back.is_swap else "recompute", back.tokens,
            1e3 * chosen_s, 1e3 * other_s, 1e3 * realised_s, 1e3 * copied_s,
        )  # fmt: skip
        if isfinite(chosen_s):
            self._count[back.is_swap] += 1
            self._predicted_s[back.is_swap] += chosen_s
            self._realised_s[back.is_swap] += realised_s
        return realised_s

    def gauges(self) -> tuple[SwitchGauges, ...]:
        """Return the totals of both modes since the start."""
        return tuple(
            SwitchGauges(
                "swap" if is_swap else "recompute",
                self._count[is_swap],
                self._predicted_s[is_swap],
                self._realised_s[is_swap],
            )
            for is_swap in (True, False)
        )
