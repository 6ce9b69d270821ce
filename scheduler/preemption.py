"""What becomes of a victim's KV: moved to a lower tier, or computed again."""

import logging
from collections.abc import Callable

from msgspec import Struct

from tiercel.rates import Rates
from tiercel.settings import PreemptionMode
from tiercel.tier import Route

log = logging.getLogger(__name__)


class SwapCost(Struct, frozen=True, gc=False):
    """What it would cost to take a victim away and bring it back, seconds."""

    swap_s: float  # its dirty blocks down, all its blocks up
    recompute_s: float  # its tokens again


class SwapChooser:
    """Per victim the cheaper way, from measured rates, unless the operator chose one.

    Source: FastSwitch (arXiv 2411.18424) section 3 for what is moved: only blocks that have no copy below.
    """

    def __init__(self, mode: PreemptionMode, rates: Callable[[], Rates]) -> None:
        self._mode = mode
        self._rates = rates

    def cost(self, dirty_blocks: int, clean_blocks: int, tokens: int) -> SwapCost:
        """The prediction for a victim of `tokens` computed tokens."""
        rates = self._rates()
        down = min((Route.SPILL, Route.PERSIST), key=lambda route: rates.load_s(route, 1))
        up = min((Route.RESTORE, Route.PREFETCH), key=lambda route: rates.load_s(route, 1))
        swap_s = rates.load_s(up, dirty_blocks + clean_blocks)
        if dirty_blocks:
            swap_s += rates.load_s(down, dirty_blocks)
        return SwapCost(swap_s, rates.recompute_s(0, tokens))

    def swaps(self, dirty_blocks: int, clean_blocks: int, tokens: int) -> bool:
        """Whether the victim comes back from a lower tier: its dirty blocks are spilled, the clean ones are there."""
        if self._mode == "recompute" or not dirty_blocks + clean_blocks:
            return False
        if self._mode == "swap" or not dirty_blocks:
            return True
        cost = self.cost(dirty_blocks, clean_blocks, tokens)
        log.debug(
            "victim dirty_blocks=%d clean_blocks=%d swap_ms=%.2f recompute_ms=%.2f",
            dirty_blocks,
            clean_blocks,
            1e3 * cost.swap_s,
            1e3 * cost.recompute_s,
        )
        return cost.swap_s < cost.recompute_s
