"""Measured speeds, which decide between loading a block and computing it again, and between engines."""

from msgspec import Struct

from tiercel.values.tier import Route


class Rates(Struct, frozen=True, kw_only=True):
    """The current speeds, measured at the start and corrected while running. A route of rate 0 is not used."""

    bytes_per_s_by_route: dict[Route, float] = {}
    prefill_token_s: float = 1e-3  # of one token at context 0
    prefill_context_s: float = 0.0  # additional time of one token for each token of its context
    block_bytes: int = 0
    block_size: int = 16  # tokens

    def recompute_s(self, start: int, tokens: int) -> float:
        """Return the time to compute tokens [start, start + tokens)."""
        mean_context = start + tokens / 2
        return tokens * (self.prefill_token_s + self.prefill_context_s * mean_context)

    def load_s(self, route: Route, blocks: int) -> float:
        """Return the time to copy this number of blocks on an idle route; infinite if the route does not exist."""
        rate = self.bytes_per_s_by_route.get(route, 0.0)
        return blocks * self.block_bytes / rate if rate > 0 else float("inf")

    def blocks_in(self, route: Route, seconds: float) -> int:
        """Return how many whole blocks an idle route copies in this time; 0 if it does not exist."""
        return int(seconds * self.bytes_per_s_by_route.get(route, 0.0) / self.block_bytes) if self.block_bytes else 0


class EngineSpeed(Struct, frozen=True, kw_only=True):
    """The predicted times of an engine, in milliseconds of its device."""

    prefill_ms: float = 0.1  # of one prompt token at context 0
    prefill_context_ms: float = 0.0  # additional time of a prompt token for each token of its context
    decode_ms: float = 0.5  # of one output token, among the usual number of others

    def prompt_ms(self, start: int, end: int) -> float:
        """Return the time to compute prompt tokens [start, end)."""
        tokens = end - start
        return tokens * (self.prefill_ms + self.prefill_context_ms * (start + tokens / 2))
