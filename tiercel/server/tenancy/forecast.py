"""Forecast of the time to first token, from the measured throughput of prompts."""

_WINDOW_S = 0.25  # time with waiting sequences per sample of the throughput
_SMOOTHING = 0.3
_SLOWER = 0.1  # smoothing of a falling throughput: steps that were not full are a weaker measurement
HALF_LIFE_S = 5.0  # of the measurements of a tenant that gets no first tokens
IDLE_HALF_LIFE_S = 1.0  # the same while the tenant has no waiting sequence, so that it is admitted again soon
_DRAIN_SLOWER = 0.5  # smoothing of a tenant's falling drain rate; a slower one would admit too many requests
_DRAIN_WINDOW_S = 0.5  # time with a backlog per sample of the drain rate
_SPREADS = 3.0  # mean deviations of the forecast error that are subtracted from a goal


class PromptThroughput:
    """The moving average of prompt tokens computed per second while sequences wait."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._tokens_per_s: float | None = None

    def note_step(self, prompt_tokens: int, busy_s: float) -> None:
        """Record a step that computed `prompt_tokens`, `busy_s` after the previous step, and left sequences waiting.

        Steps after which no sequence waits are not recorded, because they may be small for lack of work.
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
        """Return the time for a number of prompt tokens; None before the first sample."""
        return None if self._tokens_per_s is None else tokens / self._tokens_per_s


class DrainRate:
    """The prompt tokens per second of one tenant that reach their first token while sequences of the tenant wait.

    Time without a waiting sequence does not count. Measured per tenant, because with shared service a tenant's rate
    depends on the other tenants and on the length of the answers.
    """

    __slots__ = ("_busy_s", "_noted_s", "_since_s", "_tokens", "_tokens_per_s")

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._noted_s = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None  # start of the backlog; None without one

    @property
    def tokens_per_s(self) -> float | None:
        """The moving average; None before the first sample."""
        return self._tokens_per_s

    def freshness(self, now_s: float) -> float:
        """Return the weight of the measurement, from 1 at a first token to 0 long after it."""
        return freshness(now_s - self._noted_s)

    def begin(self, now_s: float) -> None:
        """Record that the tenant has waiting sequences."""
        if self._since_s is None:
            self._since_s = now_s

    def note(self, tokens: float, now_s: float) -> None:
        """Record that a sequence with `tokens` prompt tokens got its first token."""
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
        """Record that the tenant has no waiting sequence."""
        self._pass(now_s)
        self._since_s = None

    def _pass(self, now_s: float) -> None:
        if self._since_s is not None:
            self._busy_s += now_s - self._since_s
            self._since_s = now_s


class ForecastError:
    """The error of the forecast for one tenant's first tokens: its moving average and its mean deviation.

    Kept per tenant, because the error for long prompts in a long queue does not apply to short prompts. The error
    decays while the tenant gets no first token; otherwise a tenant that is refused because of it would stay refused.
    """

    __slots__ = ("_deviation_s", "_mean_s", "_noted_s")

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0  # mean distance from the mean
        self._noted_s = 0.0

    def note(self, ttft_s: float, queue_s: float | None, now_s: float) -> None:
        """Record a first token; `queue_s` is the forecast at submission, None if there was none."""
        if queue_s is not None:
            error_s = ttft_s - queue_s
            if self._mean_s is not None:
                self._deviation_s = _follow(self._deviation_s, abs(error_s - self._mean_s), _SLOWER)
            self._mean_s = _follow(self._mean_s, error_s)
            self._noted_s = now_s

    def at_s(self, now_s: float, half_life_s: float = HALF_LIFE_S) -> float:
        """Return the seconds to add to a forecast; 0 if first tokens come earlier than forecast."""
        if self._mean_s is None or self._mean_s <= 0:
            return 0.0
        return self._mean_s * freshness(now_s - self._noted_s, half_life_s)

    def spread_s(self, now_s: float) -> float:
        """Return three mean deviations; most first tokens differ from the corrected forecast by less.

        Source: the retransmission timers of TCP (RFC 6298), with 3 in place of 4.
        """
        return _SPREADS * self._deviation_s * freshness(now_s - self._noted_s)


def freshness(age_s: float, half_life_s: float = HALF_LIFE_S) -> float:
    """Return the weight of a measurement of this age, from 1 down to 0."""
    return 0.5 ** (max(age_s, 0.0) / half_life_s)


def _follow(mean: float | None, sample: float, smoothing: float = _SMOOTHING) -> float:
    return sample if mean is None else mean + smoothing * (sample - mean)
