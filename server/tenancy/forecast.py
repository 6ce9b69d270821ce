"""When a request would get its first token, from how fast the engine has computed prompts lately."""

_WINDOW_S = 0.25  # of work with sequences waiting, for one sample of the speed
_SMOOTHING = 0.3
_SLOWER = 0.1  # the same for a lower speed: steps that were not full say less than those that were
HALF_LIFE_S = 5.0  # of what is known of a tenant that gets no first tokens
IDLE_HALF_LIFE_S = 1.0  # the same, while nothing of it waits: who is owed its share is soon tried again
_DRAIN_SLOWER = 0.5  # smoothing of a tenant's own speed when it falls: a forecast that is too early admits too many
_DRAIN_WINDOW_S = 0.5  # of time with a backlog, for one sample of how fast it drains
_SPREADS = 3.0  # mean deviations of a first token from its forecast that a goal must leave room for


class PromptThroughput:
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


class DrainRate:
    """The prompt tokens per second of one tenant that reach their first token while some of its sequences wait.

    Measured for each tenant, because where service is shared, what one tenant gets in prompt tokens depends on who else
    is served and on how many tokens the answers have.
    """

    __slots__ = ("_busy_s", "_noted_s", "_since_s", "_tokens", "_tokens_per_s")

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._noted_s = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None  # when the backlog came; None while nothing waits

    @property
    def tokens_per_s(self) -> float | None:
        """The moving average; None before anything is known."""
        return self._tokens_per_s

    def freshness(self, now_s: float) -> float:
        """Return how much the speed still says, from 1 at a first token to 0 long after it."""
        return freshness(now_s - self._noted_s)

    def begin(self, now_s: float) -> None:
        """The tenant's first sequence waits."""
        if self._since_s is None:
            self._since_s = now_s

    def note(self, tokens: float, now_s: float) -> None:
        """A sequence of so many prompt tokens got its first token."""
        self._tokens += tokens
        self._noted_s = now_s
        self._pass(now_s)
        if self._busy_s < _DRAIN_WINDOW_S or not self._tokens:
            return
        speed = self._tokens / self._busy_s
        is_slower = self._tokens_per_s is not None and speed < self._tokens_per_s
        self._tokens_per_s = _follow(self._tokens_per_s, speed, _DRAIN_SLOWER if is_slower else _SMOOTHING)
        self._tokens = self._busy_s = 0.0

    def pause(self, now_s: float) -> None:
        """No sequence of the tenant waits any more."""
        self._pass(now_s)
        self._since_s = None

    def _pass(self, now_s: float) -> None:
        if self._since_s is not None:
            self._busy_s += now_s - self._since_s
            self._since_s = now_s


class ForecastError:
    """What one tenant's first tokens take beyond the forecast: a moving average, and room for how far they scatter.

    One for each tenant: how wrong the forecast was for long prompts in a long queue says nothing of short ones. It
    fades while no first token comes, or a tenant that is refused because of it would be refused for ever.
    """

    __slots__ = ("_deviation_s", "_mean_s", "_noted_s")

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0  # mean distance from the mean
        self._noted_s = 0.0

    def note(self, ttft_s: float, queue_s: float | None, now_s: float) -> None:
        """A first token came; `queue_s` is the forecast at submission, None = there was none."""
        if queue_s is not None:
            error_s = ttft_s - queue_s
            if self._mean_s is not None:
                self._deviation_s = _follow(self._deviation_s, abs(error_s - self._mean_s), _SLOWER)
            self._mean_s = _follow(self._mean_s, error_s)
            self._noted_s = now_s

    def at_s(self, now_s: float, half_life_s: float = HALF_LIFE_S) -> float:
        """Seconds to add to a forecast; 0 where first tokens come earlier than foretold."""
        if self._mean_s is None or self._mean_s <= 0:
            return 0.0
        return self._mean_s * freshness(now_s - self._noted_s, half_life_s)

    def spread_s(self, now_s: float) -> float:
        """Seconds that most first tokens come within, beside their mean error: three mean deviations.

        Source: the retransmission timers of TCP (RFC 6298), with 3 in place of 4.
        """
        return _SPREADS * self._deviation_s * freshness(now_s - self._noted_s)


def freshness(age_s: float, half_life_s: float = HALF_LIFE_S) -> float:
    """Return how much of what was heard so long ago still counts, from 1 down to 0."""
    return 0.5 ** (max(age_s, 0.0) / half_life_s)


def _follow(mean: float | None, sample: float, smoothing: float = _SMOOTHING) -> float:
    return sample if mean is None else mean + smoothing * (sample - mean)
