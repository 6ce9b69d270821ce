"""Measured speed: what decides between loading a block and computing it again."""

from msgspec import Struct

from tiercel.tier import Route


class Rates(Struct, frozen=True, kw_only=True):
    """Speeds as of now. Calibrated at start, corrected by measurement; 0 = not known, hence not used."""

    bytes_per_s_by_route: dict[Route, float] = {}
    prefill_token_s: float = 1e-3  # one token at context 0
    prefill_context_s: float = 0.0  # one token, for each token of context before it
    block_bytes: int = 0
    block_size: int = 16  # tokens

    def recompute_s(self, start: int, tokens: int) -> float:
        """Time to compute tokens [start, start + tokens) behind their context."""
        mean_context = start + tokens / 2
        return tokens * (self.prefill_token_s + self.prefill_context_s * mean_context)

    def load_s(self, route: Route, blocks: int) -> float:
        """Time to move so many blocks on an idle route; infinite on one that does not exist."""
        rate = self.bytes_per_s_by_route.get(route, 0.0)
        return blocks * self.block_bytes / rate if rate > 0 else float("inf")
