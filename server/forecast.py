"""When a request would get its first token, from how fast the engine has computed prompts lately."""

_WINDOW_S = 0.25  # of work with sequences waiting, for one sample of the speed
_SMOOTHING = 0.3


class Forecast:
    """Two moving averages: prompt tokens per second while sequences wait, and what a first token takes beyond that."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._tokens_per_s: float | None = None
        self._base_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second under load; None before anything is known."""
        return self._tokens_per_s

    def note_step(self, prompt_tokens: int, busy_s: float) -> None:
        """A step computed so much of prompts, `busy_s` after the one before, while sequences were waiting."""
        self._tokens += prompt_tokens
        self._busy_s += busy_s
        if self._busy_s < _WINDOW_S or not self._tokens:
            return
        self._tokens_per_s = _follow(self._tokens_per_s, self._tokens / self._busy_s)
        self._tokens = self._busy_s = 0.0

    def note_first_token(self, ttft_s: float, queue_s: float | None) -> None:
        """A first token came; `queue_s` is what the queue was to take when the request was submitted."""
        if queue_s is not None:
            self._base_s = _follow(self._base_s, max(ttft_s - queue_s, 0.0))

    def queue_s(self, tokens: float) -> float | None:
        """How long so many prompt tokens take; None before anything is known."""
        return None if self._tokens_per_s is None else tokens / self._tokens_per_s

    def ttft_s(self, tokens: float) -> float | None:
        """Arrival to first token with so many prompt tokens to compute, its own among them."""
        queue_s = self.queue_s(tokens)
        return None if queue_s is None else queue_s + self._base_s


def _follow(mean: float | None, sample: float) -> float:
    return sample if mean is None else mean + _SMOOTHING * (sample - mean)
