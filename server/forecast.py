"""When a request would get its first token, from how fast the engine has computed prompts lately."""

_WINDOW_S = 0.25  # of work with sequences waiting, for one sample of the speed
_SMOOTHING = 0.3
_SLOWER = 0.1  # the same for a lower speed: steps that were not full say less than those that were
_HALF_LIFE_S = 5.0  # of what is known of a tenant that gets no first tokens


class Forecast:
    """A moving average of the prompt tokens per second while sequences wait."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._tokens_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second under load; None before anything is known."""
        return self._tokens_per_s

    def note_step(self, prompt_tokens: int, busy_s: float) -> None:
        """A step computed so much of prompts, `busy_s` after the one before, and left sequences waiting.

        Steps after which nobody waits are not told: they may have been as small as what had come.
        """
        self._tokens += prompt_tokens
        self._busy_s += busy_s
        if self._busy_s < _WINDOW_S or not self._tokens:
            return
        speed = self._tokens / self._busy_s
        is_slower = self._tokens_per_s is not None and speed < self._tokens_per_s
        self._tokens_per_s = _follow(self._tokens_per_s, speed, _SLOWER if is_slower else _SMOOTHING)
        self._tokens = self._busy_s = 0.0

    def queue_s(self, tokens: float) -> float | None:
        """How long so many prompt tokens take; None before anything is known."""
        return None if self._tokens_per_s is None else tokens / self._tokens_per_s


class Surplus:
    """What one tenant's first tokens take beyond what the queue explains: a moving average.

    One for each tenant: how wrong the forecast was for long prompts in a long queue says nothing of short ones. It
    fades while no first token comes, or a tenant that is refused because of it would be refused for ever.
    """

    __slots__ = ("_mean_s", "_noted_s")

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._noted_s = 0.0

    def note(self, ttft_s: float, queue_s: float | None, now_s: float) -> None:
        """A first token came; `queue_s` is what the queue was to take at submission, None = it was not known."""
        if queue_s is not None:
            self._mean_s = _follow(self._mean_s, ttft_s - queue_s)
            self._noted_s = now_s

    def at_s(self, now_s: float) -> float:
        """Seconds to add to a forecast; 0 where first tokens come earlier than foretold."""
        if self._mean_s is None or self._mean_s <= 0:
            return 0.0
        return self._mean_s * 0.5 ** (max(now_s - self._noted_s, 0.0) / _HALF_LIFE_S)


def _follow(mean: float | None, sample: float, smoothing: float = _SMOOTHING) -> float:
    return sample if mean is None else mean + smoothing * (sample - mean)
