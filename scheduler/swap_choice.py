"""Swap or recompute: what a switch will cost each way, and which way is taken."""

from collections.abc import Callable

from msgspec import Struct

from tiercel.plan import SwapCost
from tiercel.rates import Rates
from tiercel.settings import PreemptionMode
from tiercel.tier import Route


class SwapDecision(Struct, frozen=True, gc=False):
    """The way that a victim takes, and the prediction for both ways."""

    swaps: bool
    cost: SwapCost

    @property
    def chosen_s(self) -> float:
        """Predicted seconds of the way that is taken."""
        return self.cost.swap_s if self.swaps else self.cost.recompute_s

    @property
    def other_s(self) -> float:
        """Predicted seconds of the way that is not taken; infinite where there is no such way."""
        return self.cost.recompute_s if self.swaps else self.cost.swap_s


class SwapChooser:
    """Chooses the cheaper way for each victim by measured rates, unless the operator fixed the mode.

    Blocks are counted in three classes: `dirty` blocks have no copy below and must go down first, `near` blocks have
    a copy in DDR, `far` blocks have their only lower copy on the SSD.

    Costs are seconds of copying and computing, summed. That copies run beside other sequences' steps is not priced.

    Source: FastSwitch (arXiv 2411.18424) section 3: only blocks without a copy below are moved down.
    """

    def __init__(self, mode: PreemptionMode, rates: Callable[[], Rates]) -> None:
        self._mode = mode
        self._rates = rates

    def cost(self, dirty: int, near: int, far: int, tokens: int) -> SwapCost:
        """Predict both ways for a victim with `tokens` computed tokens.

        Swap: the dirty blocks go down, all blocks come up, and the tokens behind them are computed again.
        Recompute: the dirty blocks are dropped; the clean ones come up, unless computing them again is cheaper.
        """
        rates = self._rates()
        has_ddr = Route.RESTORE in rates.bytes_per_s_by_route
        down, up = (Route.SPILL, Route.RESTORE) if has_ddr else (Route.PERSIST, Route.PREFETCH)
        clean_s = _move_s(rates, up, near) + _move_s(rates, Route.PREFETCH, far)
        if has_ddr:
            clean_s += _move_s(rates, Route.RESTORE, far)
        dirty_s = _move_s(rates, down, dirty) + _move_s(rates, up, dirty)
        recompute_s = rates.recompute_s(0, tokens)
        if near + far:
            recompute_s = min(recompute_s, clean_s + _rest_s(rates, near + far, tokens))
        return SwapCost(dirty_s + clean_s + _rest_s(rates, dirty + near + far, tokens), recompute_s)

    def decide(self, dirty: int, near: int, far: int, tokens: int) -> SwapDecision:
        """Choose the way of a victim: swapped blocks are kept in or moved to a lower tier, all others are dropped."""
        cost = self.cost(dirty, near, far, tokens)
        if not dirty + near + far:  # nothing that a lower tier could hold
            return SwapDecision(swaps=False, cost=SwapCost(float("inf"), cost.recompute_s))
        swaps = cost.swap_s <= cost.recompute_s if self._mode == "auto" else self._mode == "swap"
        return SwapDecision(swaps, cost)


def _move_s(rates: Rates, route: Route, blocks: int) -> float:
    """Seconds to move so many blocks; infinite on a route that does not exist, unless there is nothing to move."""
    return rates.load_s(route, blocks) if blocks else 0.0


def _rest_s(rates: Rates, blocks: int, tokens: int) -> float:
    """Seconds to compute the tokens behind the first `blocks` blocks."""
    start = blocks * rates.block_size
    return rates.recompute_s(start, max(0, tokens - start))
