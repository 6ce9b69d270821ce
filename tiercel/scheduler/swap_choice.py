"""The choice between swap and recompute for a preempted sequence, by the predicted cost of both."""

from collections.abc import Callable

from msgspec import Struct

from tiercel.settings.settings import PreemptionMode
from tiercel.values.plan import SwapCost
from tiercel.values.rates import Rates
from tiercel.values.tier import Route


class SwapDecision(Struct, frozen=True, gc=False):
    """The way that is chosen for a victim, and the predicted cost of both ways."""

    swaps: bool
    cost: SwapCost

    @property
    def chosen_s(self) -> float:
        """The predicted seconds of the way that is chosen."""
        return self.cost.swap_s if self.swaps else self.cost.recompute_s


class SwapChooser:
    """Chooses the cheaper way for each victim by measured rates, unless the operator fixed the mode.

    Blocks are counted in three classes: `dirty` blocks have no copy in a lower tier and must be spilled first, `near`
    blocks have a copy in DDR, `far` blocks have their only lower copy on the SSD.

    Costs are sums of seconds of copying and computing, although copies overlap with the steps of other sequences.

    Source: FastSwitch (arXiv 2411.18424) section 3: only blocks without a lower copy are spilled.
    """

    def __init__(self, mode: PreemptionMode, rates: Callable[[], Rates]) -> None:
        self._mode = mode
        self._rates = rates

    def cost(self, dirty: int, near: int, far: int, tokens: int) -> SwapCost:
        """Predict the cost of both ways for a victim with `tokens` computed tokens.

        Swap: spill the dirty blocks, restore all blocks, and compute the tokens behind them again.
        Recompute: drop the dirty blocks, and restore the clean ones unless computing them again is cheaper.
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
        """Choose between swap and recompute. A victim without blocks that a lower tier can hold is recomputed."""
        cost = self.cost(dirty, near, far, tokens)
        if not dirty + near + far:
            return SwapDecision(swaps=False, cost=SwapCost(float("inf"), cost.recompute_s))
        swaps = cost.swap_s <= cost.recompute_s if self._mode == "auto" else self._mode == "swap"
        return SwapDecision(swaps, cost)


def _move_s(rates: Rates, route: Route, blocks: int) -> float:
    """Return the seconds to move the blocks; infinite if the route does not exist and there are blocks to move."""
    return rates.load_s(route, blocks) if blocks else 0.0


def _rest_s(rates: Rates, blocks: int, tokens: int) -> float:
    """Return the seconds to compute the tokens behind the first `blocks` blocks."""
    start = blocks * rates.block_size
    return rates.recompute_s(start, max(0, tokens - start))
