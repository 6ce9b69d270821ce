"""What each switch was predicted to cost, and what it cost by the time the victim was back."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite

from msgspec import Struct

from tiercel.ids import SeqId
from tiercel.outcome import SwitchGauges
from tiercel.plan import Slice, SwapCost
from tiercel.scheduler.cost import BilledSlice, StepCosts
from tiercel.scheduler.sequence import SequenceProgress

log = logging.getLogger(__name__)


class ReturnedVictim(Struct, frozen=True, gc=False):
    """A victim has computed all that it had lost."""

    seq: SeqId
    is_swap: bool
    tokens: int  # computed when it was preempted
    cost: SwapCost  # as predicted then
    recompute_s: float  # measured: its part of the steps that computed tokens of it once more


class _Switch:
    """One victim between its preemption and its return."""

    __slots__ = ("cost", "is_swap", "recompute_s", "seq", "tokens")

    def __init__(self, seq: SeqId, cost: SwapCost, tokens: int, *, is_swap: bool) -> None:
        self.seq = seq
        self.cost = cost
        self.tokens = tokens
        self.is_swap = is_swap
        self.recompute_s = 0.0


class _Share(Struct, frozen=True, gc=False):
    """The part of one step that computes a victim's tokens once more."""

    switch: _Switch
    share: float
    is_last: bool


class PreemptionBook:
    """Follows victims from preemption to return. Written by the SequenceBook, read out by the loop.

    A victim that is preempted again before it is back begins anew, with what it has computed by then; one that ends on
    the way leaves no trace.
    """

    def __init__(self) -> None:
        self._away: dict[SeqId, _Switch] = {}
        self._steps: deque[list[_Share]] = deque()  # launched, not settled
        self._returned: list[ReturnedVictim] = []
        self._count = {False: 0, True: 0}  # by `is_swap`, since start
        self._predicted_s = {False: 0.0, True: 0.0}
        self._realised_s = {False: 0.0, True: 0.0}

    def leave(self, seq: SeqId, cost: SwapCost, tokens: int, *, is_swap: bool) -> None:
        """A sequence is preempted with `tokens` computed tokens."""
        chosen_s, other_s = (cost.swap_s, cost.recompute_s) if is_swap else (cost.recompute_s, cost.swap_s)
        log.debug(
            "victim seq=%d mode=%s tokens=%d chosen_ms=%.2f other_ms=%.2f",
            seq, "swap" if is_swap else "recompute", tokens, 1e3 * chosen_s, 1e3 * other_s,
        )  # fmt: skip
        self._away[seq] = _Switch(seq, cost, tokens, is_swap=is_swap)

    def forget(self, seq: SeqId) -> None:
        """A sequence has ended."""
        self._away.pop(seq, None)

    def launch(self, pieces: Sequence[tuple[SequenceProgress, Slice]], costs: StepCosts) -> None:
        """A step is launched: find out which part of it repeats work. Cost: nothing where nobody is on the way back."""
        shares: list[_Share] = []
        back = [(self._away[one.id], piece) for one, piece in pieces if one.id in self._away] if self._away else ()
        if back:
            ms_by_seq = costs.share_ms(
                BilledSlice(one.id, piece.length, piece.start, piece.length == 1) for one, piece in pieces
            )
            total_ms = sum(ms_by_seq.values())
            for switch, piece in back:
                end = piece.start + piece.length
                again = max(0, min(end, switch.tokens) - piece.start) / piece.length
                part = ms_by_seq[switch.seq] / total_ms if total_ms > 0 else 0.0
                shares.append(_Share(switch, again * part, end >= switch.tokens))
        self._steps.append(shares)

    def settle(self, measured_s: float) -> None:
        """The oldest launched step took so long; 0 when it was void: then its slices are launched once more."""
        for share in self._steps.popleft():
            switch = share.switch
            if measured_s <= 0 or self._away.get(switch.seq) is not switch:
                continue
            switch.recompute_s += share.share * measured_s
            if share.is_last:
                del self._away[switch.seq]
                self._returned.append(
                    ReturnedVictim(switch.seq, switch.is_swap, switch.tokens, switch.cost, switch.recompute_s)
                )

    def take_returned(self) -> Iterable[ReturnedVictim]:
        """The victims that have returned since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def note(self, back: ReturnedVictim, copied_s: float) -> float:
        """Log and count one return whose copies took `copied_s`. Returns the realised seconds."""
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
        """Both modes in numbers, since start."""
        return tuple(
            SwitchGauges(
                "swap" if is_swap else "recompute",
                self._count[is_swap],
                self._predicted_s[is_swap],
                self._realised_s[is_swap],
            )
            for is_swap in (True, False)
        )
