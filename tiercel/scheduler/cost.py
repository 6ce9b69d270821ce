"""Predicted step times: a measured table, and a factor that follows the measured times."""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

from msgspec import Struct

from tiercel.values.errors import InvariantError
from tiercel.values.rates import EngineSpeed

Payer = TypeVar("Payer", bound=Hashable)

_SPEED_CONTEXT = 4096  # tokens before a prompt, to tell what its context costs
_ROW_CONTEXT = 512  # tokens of a usual decode
_MAX_SAMPLES = 8  # steps of a long recomputation that are predicted


class StepTimes(Struct, frozen=True, kw_only=True):
    """Measured milliseconds of whole steps, on a grid. The engine measures a table and stores it as a file.

    Context varies fastest in `ms`: index ((prefill * decodes) + decode) * contexts + context.
    """

    prefill_tokens: tuple[int, ...]  # prompt tokens that the step computes; from 0, rising
    decodes: tuple[int, ...]  # sequences that compute one token each; from 0, rising
    context_tokens: tuple[int, ...]  # KV tokens of all its sequences before the step; from 0, rising
    ms: tuple[float, ...]


BilledSlice = tuple[Payer, int, int]
"""A slice, for dividing the cost of a step: its payer, its tokens, and the KV tokens before it."""


class StepWork:
    """The work of a step, or of one payer in it. A slice of one token is a decode."""

    __slots__ = ("decode_context", "decodes", "prompts", "reads", "tokens")

    def __init__(self) -> None:
        self.decodes = 0
        self.decode_context = 0  # KV tokens before the decodes
        self.prompts = 0
        self.tokens = 0  # of the prompts
        self.reads = 0  # sum over the prompts of tokens times context

    @classmethod
    def of(cls, parts: Iterable["StepWork"]) -> "StepWork":
        """Return the work of several payers together."""
        whole = cls()
        for part in parts:
            whole.decodes += part.decodes
            whole.decode_context += part.decode_context
            whole.prompts += part.prompts
            whole.tokens += part.tokens
            whole.reads += part.reads
        return whole

    @property
    def prompt_context(self) -> float:
        """The mean context of the prompts' tokens, as `mean_context`."""
        return self.reads / self.tokens if self.tokens else 0.0


def work_by_payer(slices: Iterable[BilledSlice[Payer]]) -> dict[Payer, StepWork]:
    """Return the work of each payer. Cost: one short loop, because every step of the engine calls this."""
    found: dict[Payer, StepWork] = {}
    for payer, tokens, context in slices:
        work = found.get(payer)
        if work is None:
            work = found[payer] = StepWork()
        if tokens == 1:
            work.decodes += 1
            work.decode_context += context
        else:
            work.prompts += 1
            work.tokens += tokens
            work.reads += tokens * context
    return found


def linear_times(
    base_ms: float = 5.0, prefill_ms: float = 0.05, decode_ms: float = 0.2, context_ms: float = 0.0002
) -> StepTimes:
    """Return the table of a machine with linear step times. The defaults are optimistic: nothing is measured yet."""
    axes = ((0, 512, 2048), (0, 16, 64), (0, 8192, 65536))
    return StepTimes(
        prefill_tokens=axes[0],
        decodes=axes[1],
        context_tokens=axes[2],
        ms=tuple(
            base_ms + prefill * prefill_ms + decodes * decode_ms + context * context_ms
            for prefill in axes[0]
            for decodes in axes[1]
            for context in axes[2]
        ),
    )


def mean_context(pieces: Iterable[tuple[int, int]]) -> float:
    """Return the mean context of prompt tokens, given the tokens of each prompt and the KV tokens before them."""
    tokens = reads = 0
    for length, context in pieces:
        tokens += length
        reads += length * context
    return reads / tokens if tokens else 0.0


class StepCosts:
    """Predicts step times: the table, made monotonic along every axis, times a factor that follows measured times.

    The table is interpolated linearly, so the prediction never falls when a step grows. Beyond the end of an axis it
    rises as on the last interval of the axis, or as on the whole axis if that is steeper, at the same place on the
    other axes: context beyond the table costs decodes much less than a prompt. The factor is the same for all shapes.
    """

    def __init__(self, times: StepTimes, *, alpha: float = 0.1, max_scale: float = 64.0, margin: float = 1.1) -> None:
        """Errors: InvariantError if the table is not a grid."""
        self.scale = 1.0
        self.prompt_scale = 1.0  # the factor of steps that compute prompts only
        self._num_prompts = 0  # measurements in prompt_scale
        self._alpha = alpha  # weight of the newest measurement
        self._max_scale = max_scale
        self._margin = margin  # factor on predictions that are compared with a latency goal
        self._axes = (times.prefill_tokens, times.decodes, times.context_tokens)
        self._ms = _rising(times)
        strides = (stride for stride, _ in _strides(self._axes))
        self._grid = tuple(zip(self._axes, strides, _end_slopes(self._axes, self._ms), strict=True))

    def predict_ms(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float:
        """Return the time of one step of this shape; 0 for an empty step."""
        if not prefill_tokens and not decodes:
            return 0.0
        return self.scale * self._table_ms(prefill_tokens, decodes, context_tokens)

    def step_ms(self, prefill_tokens: int, prefill_context: float, decodes: int, decode_context: int) -> float:
        """Return the time of one step, with the context of prompts and of decodes known separately.

        In a step with prompts, the table's context is that of the prompts, where context costs the most. Attention
        costs tokens times context, and the table was measured with one prompt: `prefill_context` of several prompts is
        the mean over their tokens (`mean_context`). The context of decodes is the sum, and costs the same as in a step
        without prompts.
        """
        if not prefill_tokens and not decodes:
            return 0.0
        ms = self._table_ms(prefill_tokens, decodes, prefill_context)
        return self.scale * (ms + self._decode_context_ms(decodes, decode_context))

    def _decode_context_ms(self, decodes: int, context: int) -> float:
        return self._table_ms(0, decodes, context) - self._table_ms(0, decodes, 0) if decodes and context else 0.0

    def correct(self, predicted_ms: float, measured_ms: float) -> None:
        """Move the factor towards the ratio of measured to predicted time.

        A ratio above 4 counts as 4, so that a single pause does not spoil the factor.
        """
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        ratio = min(4.0, max(0.25, measured_ms / predicted_ms))
        scale = self.scale * (1 + self._alpha * (ratio - 1))
        self.scale = min(self._max_scale, max(1 / self._max_scale, scale))

    def prompt_ms(self, tokens: int, context: float) -> float:
        """Return the time of a step that computes `tokens` prompt tokens behind a mean context, and nothing else.

        These steps have a factor of their own: decodes are slowed by the programs beside them, so their time says
        little about prompts.
        """
        return self.prompt_scale * self._table_ms(tokens, 0, context)

    @property
    def largest_prompt(self) -> tuple[int, int]:
        """The largest (prompt tokens, context) of the table."""
        return self._axes[0][-1], self._axes[2][-1]

    def correct_prompts(self, tokens: int, context: float, measured_ms: float) -> None:
        """Move the factor of prompts towards the measured time of a step of prompts only, as `correct` does."""
        predicted_ms = self.prompt_ms(tokens, context)
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        ratio = min(4.0, max(0.25, measured_ms / predicted_ms))
        self._num_prompts += 1
        alpha = max(self._alpha, 1 / (1 + self._num_prompts))  # the mean of the first measurements and the table
        scale = self.prompt_scale * (1 + alpha * (ratio - 1))
        self.prompt_scale = min(self._max_scale, max(1 / self._max_scale, scale))

    def safe_ms(self, goal_ms: float) -> float:
        """Return the longest predicted time of a step that has to end within a goal: predictions err."""
        return goal_ms / self._margin

    def max_prefill(self, step_ms: float, prompt_context: float, decodes: int, decode_context: int) -> int:
        """Return the maximum prompt tokens of a step, beside decodes, whose predicted time is at most `step_ms`.

        `prompt_context`: the tokens before these prompt tokens. Cost: O(prefill points of the table).
        """
        goal = step_ms / self.scale - self._decode_context_ms(decodes, decode_context)
        points = self._axes[0]
        heights = [self._table_ms(point, decodes, prompt_context) for point in points]
        if heights[-1] <= goal:
            slope = self._table_ms(points[-1] + 1, decodes, prompt_context) - heights[-1]
            return points[-1] + int((goal - heights[-1]) / slope) if slope > 0 else 1 << 30
        index = bisect_right(heights, goal) - 1
        if index < 0:
            return 0
        rise = (goal - heights[index]) / (heights[index + 1] - heights[index])
        return points[index] + int(rise * (points[index + 1] - points[index]))

    def max_added(
        self, step_ms: float, tokens: int, reads: int, prompt_context: int, decodes: int, decode_context: int
    ) -> int:
        """Return the maximum tokens of one more prompt in a step whose predicted time is at most `step_ms`.

        `tokens` and `reads` are the prompt tokens of the step so far and the sum of their tokens times context. The
        result is 0 or less if the step is full. Cost: as `max_prefill`, twice if the contexts differ, and a binary
        search over predictions.
        """
        mean = reads / tokens if tokens else prompt_context
        low = self.max_prefill(step_ms, max(mean, prompt_context), decodes, decode_context) - tokens
        if mean == prompt_context:
            return low
        high = self.max_prefill(step_ms, min(mean, prompt_context), decodes, decode_context) - tokens
        low = max(0, low)
        while low < high:
            middle = (low + high + 1) // 2
            context = (reads + middle * prompt_context) / (tokens + middle)
            if self.step_ms(tokens + middle, context, decodes, decode_context) <= step_ms:
                low = middle
            else:
                high = middle - 1
        return high

    def min_prefill(self, max_tokens: int, prompt_context: int, loss: float) -> int:
        """Return the fewest prompt tokens of a step whose time per token is close to that of a full step.

        Its time per token is at most `1 + loss` times that of a step of `max_tokens` with the same context.
        Cost: O(prefill points of the table).
        """
        points = [point for point in self._axes[0] if point < max_tokens] + [max_tokens]
        heights = [self._table_ms(point, 0, prompt_context) for point in points]
        rate = (1 + loss) * heights[-1] / max_tokens
        for (low, low_ms), (high, high_ms) in pairwise(zip(points, heights, strict=True)):
            over_ms, under_ms = low_ms - rate * low, rate * high - high_ms
            if under_ms >= 0:
                return min(high, low + math.ceil((high - low) * over_ms / (over_ms + under_ms)))  # floats round up
        return max_tokens

    def recompute_ms(self, tokens: int, start: int = 0, step_tokens: int | None = None) -> float:
        """Return the time to compute `tokens` tokens behind `start` cached ones, in steps of `step_tokens`.

        The default and the maximum of `step_tokens` is the table's largest prefill. Of many steps only a sample is
        predicted. Cost: at most 2 * `_MAX_SAMPLES` predictions.
        """
        total_ms, chunk = 0.0, self._axes[0][-1] or tokens
        chunk = chunk if step_tokens is None else max(1, min(chunk, step_tokens))
        while tokens > 0:
            whole = tokens // chunk
            steps = max(1, whole // _MAX_SAMPLES)
            mean_start = start + (steps - 1) * chunk // 2
            total_ms += steps * self.predict_ms(min(tokens, chunk), 0, mean_start)
            start += steps * chunk
            tokens -= steps * chunk
        return total_ms

    def speed(self, step_tokens: int, rows: int) -> EngineSpeed:
        """Return the speed in steps of `step_tokens` prompt tokens, or of `rows` decodes."""
        prefill_ms = self.recompute_ms(step_tokens, 0, step_tokens) / step_tokens
        behind_ms = self.recompute_ms(step_tokens, _SPEED_CONTEXT, step_tokens) / step_tokens
        return EngineSpeed(
            prefill_ms=prefill_ms,
            prefill_context_ms=max(0.0, behind_ms - prefill_ms) / _SPEED_CONTEXT,
            decode_ms=self.predict_ms(0, rows, rows * _ROW_CONTEXT) / rows,
        )

    def share_ms(self, works: Mapping[Payer, StepWork]) -> dict[Payer, float]:
        """Divide the step's predicted milliseconds among the payers: see `work_by_payer`.

        The time of an empty step is divided by slices. The time that decodes add is divided by decodes and by their
        context. The time that prompts add is divided by tokens, and the part that grows with context by tokens times
        context.
        """
        whole = StepWork.of(works.values())
        decodes, tokens = whole.decodes, whole.tokens
        empty_ms, decoding_ms = self._table_ms(0, 0, 0), self._table_ms(0, decodes, 0)
        prompts_ms = self._table_ms(tokens, decodes, 0)
        context_ms = self._decode_context_ms(decodes, whole.decode_context)
        reads_ms = self._table_ms(tokens, decodes, whole.prompt_context) - prompts_ms
        return {
            payer: self.scale
            * (
                _part(empty_ms, work.decodes + work.prompts, decodes + whole.prompts)
                + _part(decoding_ms - empty_ms, work.decodes, decodes)
                + _part(context_ms, work.decode_context, whole.decode_context)
                + _part(prompts_ms - decoding_ms, work.tokens, tokens)
                + _part(reads_ms, work.reads, whole.reads)
            )
            for payer, work in works.items()
        }

    def _table_ms(self, *point: float) -> float:
        """Return the interpolated table at a point (prefill tokens, decodes, context tokens)."""
        corner = 0
        between: list[tuple[int, float]] = []  # distance to the next point of an axis, part of the way to it
        beyond: list[tuple[list[float], float]] = []  # slopes at the end of an axis, distance from the end
        for (axis, stride, slopes), value in zip(self._grid, point, strict=True):
            if value >= axis[-1]:
                corner += stride * (len(axis) - 1)
                if value > axis[-1]:
                    beyond.append((slopes, value - axis[-1]))
            elif value:
                low = bisect_right(axis, value) - 1
                corner += stride * low
                if value > axis[low]:
                    between.append((stride, (value - axis[low]) / (axis[low + 1] - axis[low])))
        corners = [corner]
        for stride, _ in between:
            corners += [index + stride for index in corners]
        ms = _interpolated(self._ms, corners, between)
        for slopes, distance in beyond:
            ms += distance * _interpolated(slopes, corners, between)
        return ms


def _interpolated(values: list[float], corners: list[int], between: list[tuple[int, float]]) -> float:
    """Return the value between the corners. `between`: the part of the way along each axis on which they differ."""
    at_corners = [values[index] for index in corners]
    for _, part in reversed(between):
        half = len(at_corners) // 2
        at_corners = [at_corners[at] + (at_corners[at + half] - at_corners[at]) * part for at in range(half)]
    return at_corners[0]


def _part(amount_ms: float, own: int, total: int) -> float:
    return amount_ms * own / total if total else 0.0


def _rising(times: StepTimes) -> list[float]:
    """Return the table made monotonic: no point is below a smaller step. Errors: InvariantError if it is not a grid."""
    axes = (times.prefill_tokens, times.decodes, times.context_tokens)
    size = len(axes[0]) * len(axes[1]) * len(axes[2])
    is_grid = all(axis and axis[0] == 0 and all(low < high for low, high in pairwise(axis)) for axis in axes)
    if not is_grid or size != len(times.ms) or not all(0 < ms < float("inf") for ms in times.ms):
        raise InvariantError("cost.grid", points=len(times.ms), wanted=size)
    return _largest_below(axes, list(times.ms))


def _largest_below(axes: tuple[tuple[int, ...], ...], values: list[float]) -> list[float]:
    """Return for each point the largest value of the points smaller or equal on every axis. Changes `values`."""
    for stride, length in _strides(axes):
        for index in range(len(values)):
            if index // stride % length:
                values[index] = max(values[index], values[index - stride])
    return values


def _end_slopes(axes: tuple[tuple[int, ...], ...], ms: list[float]) -> list[list[float]]:
    """Return for each axis the milliseconds per unit beyond its end, by point; only points at the end are used.

    A slope is that of the last interval or of the whole axis, and never below that of a smaller step.
    """
    found: list[list[float]] = []
    for axis, (stride, length) in zip(axes, _strides(axes), strict=True):
        slopes = [0.0] * len(ms)
        if length > 1:
            for end in range(len(ms)):
                if end // stride % length == length - 1:
                    last = (ms[end] - ms[end - stride]) / (axis[-1] - axis[-2])
                    whole = (ms[end] - ms[end - stride * (length - 1)]) / axis[-1]
                    slopes[end] = max(last, whole)
        found.append(_largest_below(axes, slopes))
    return found


def _strides(axes: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Return (distance between neighbours, length) of each axis in the flat table."""
    return [(len(axes[1]) * len(axes[2]), len(axes[0])), (len(axes[2]), len(axes[1])), (1, len(axes[2]))]
