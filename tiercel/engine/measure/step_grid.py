"""The grid of step shapes: which shapes to measure, and a full table of times from the measured ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product, starmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercel.scheduler.cost import StepTimes
from tiercel.values.facts import Facts

_FIRST_PREFILL = 16  # tokens
_FIRST_CONTEXT = 1024  # tokens
FAR_CONTEXT = 65_536  # tokens; beyond this and beyond the longest sequence, time is linear in the context
_RATIO = 4  # of two neighbouring points of an axis
_UNKNOWN = np.array((1.0, 1.0, 1.0, 1024.0, 16_384.0, 1024.0))  # smaller parts cost little with any model
_MIN_MS = 1e-3
_PRIOR = np.array((16.0, 1.0, 1.0, 1 / 128, 1 / 2000, 1 / 128))  # assumed proportions of the parts' costs
_PRIOR_WEIGHT = 0.05  # of the assumed proportions, relative to a measurement


class StepShape(NamedTuple):
    """The shape of a step: the three axes of the table."""

    prefill_tokens: int
    decodes: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class GridLimits:
    """The ends of the axes."""

    max_num_seqs: int
    step_tokens: int  # token budget of a step
    max_model_len: int
    kv_tokens: int  # capacity of the device tier

    @property
    def facts(self) -> Facts:
        """The limits by names of their own, for the identity of measurements."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "step_tokens": self.step_tokens,
            "max_model_len": self.max_model_len,
            "kv_tokens": self.kv_tokens,
        }


@dataclass(frozen=True, slots=True)
class Slices:
    """The sequences of a step: each computes `lengths` tokens after `starts` cached tokens. Prefills come first."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    def parts(self) -> NDArray[np.float64]:
        """Return the parts of the step's cost.

        Shapes: returns [6]: 1 for the step, tokens, decodes, KV tokens read by decodes, query-key pairs of prefills,
                KV tokens gathered by prefills.
        """
        decodes = [start for length, start in zip(self.lengths, self.starts, strict=True) if length == 1]
        pieces = [piece for piece in zip(self.lengths, self.starts, strict=True) if piece[0] > 1]
        pairs = sum(length * start for length, start in pieces)
        return np.array((1, sum(self.lengths), len(decodes), sum(decodes), pairs, sum(start for _, start in pieces)))


class StepGrid:
    """The grid under the table of step times."""

    def __init__(self, limits: GridLimits) -> None:
        most_context = max(1, min(limits.kv_tokens, limits.max_num_seqs * (limits.max_model_len - 1)))
        self.limits = limits
        self.prefill_tokens = _axis(_FIRST_PREFILL, limits.step_tokens)
        self.decodes = _axis(1, limits.max_num_seqs)
        self.context_tokens = _axis(_FIRST_CONTEXT, min(most_context, max(FAR_CONTEXT, limits.max_model_len)))
        self._axes = (self.prefill_tokens, self.decodes, self.context_tokens)
        self._parts_by_shape = {shape: self._parts(shape) for shape in starmap(StepShape, product(*self._axes))}

    def shapes(self) -> list[StepShape]:
        """Return the points that steps can reach or come near to, the most useful first.

        First decodes alone and prefills alone without context, then one line of each other kind, then the lines
        between them, then decodes beside a prefill, then everything else.
        """
        cells = product(*(tuple(zip((0, *axis[:-1]), axis, strict=True)) for axis in self._axes))
        shapes = [
            StepShape(prefill, decodes, context)
            for (lower_prefill, prefill), (lower_decodes, decodes), (_, context) in cells
            if lower_prefill + lower_decodes <= self.limits.step_tokens
            and self.slices(StepShape(prefill, decodes, context)) is not None
        ]
        return sorted(shapes, key=lambda shape: (self._rank(shape), shape.context_tokens, sum(shape[:2])))

    def _rank(self, shape: StepShape) -> int:
        most_prefill, some_decodes = self.prefill_tokens[-1], self.decodes[len(self.decodes) // 2]
        match shape:
            case (0, _, 0) | (_, 0, 0):
                return 0
            case (0, decodes, _):
                return 1 if decodes == some_decodes else 2
            case (prefill, 0, context):
                return 1 if prefill == most_prefill and context <= self.limits.max_model_len else 2
            case (prefill, decodes, 0):
                return 1 if prefill == most_prefill and decodes == some_decodes else 3
            case _:
                return 4

    def slices(self, shape: StepShape) -> Slices | None:
        """Return the sequences of a step of this shape; None if no step can have it.

        The prefill gets as much of the context as one prompt can have, because context costs most there and a table of
        three axes cannot tell prefill context from decode context. The decodes share the rest unevenly.
        """
        prefill, decodes, context = shape
        longest = self.limits.max_model_len
        beside = decodes * (longest - 1)  # context that the decodes can hold
        prompts = min(prefill, 1)
        while context > beside + prompts * (longest - -(-prefill // max(prompts, 1))):
            prompts += 1
            if prompts > prefill // 2 or prompts + decodes > self.limits.max_num_seqs:
                return None
        if not prompts and not decodes:
            return None
        lengths = tuple(prefill // prompts + (at < prefill % prompts) for at in range(prompts))
        starts: list[int] = []
        for at, length in enumerate(lengths):
            wanted = context if decodes else -(-context // (prompts - at))
            starts.append(max(0, min(wanted, longest - length)))
            context -= starts[-1]
        return Slices((*lengths, *(1,) * decodes), (*starts, *_uneven(context, decodes, longest - 1)))

    def guess_ms(self, shape: StepShape, measured: Mapping[StepShape, float]) -> float:
        """Return a guess of a forward's time before it is measured: half of an upper bound."""
        parts = self._parts_by_shape[shape]
        worst = min(
            (
                ms * float(np.max(parts / np.maximum(self._parts_by_shape[known], _UNKNOWN)))
                for known, ms in measured.items()
            ),
            default=0.0,
        )
        return worst / 2

    def table(self, measured: Mapping[StepShape, float]) -> StepTimes:
        """Return the full table, from the times of at least one measured shape.

        Measured times are made monotone: the geometric mean of the largest time below and the smallest time above.
        The other times are estimated from the parts of the steps, corrected by the nearest measurements, and kept
        between measured neighbours and never below a smaller step.
        """
        known = np.full(tuple(len(axis) for axis in self._axes), np.nan)
        for shape, ms in measured.items():
            known[self._index(shape)] = max(ms, _MIN_MS)
        middle = np.sqrt(_largest_below(known) * _smallest_above(known))
        known = np.where(np.isnan(known), np.nan, middle)
        shapes = {index: StepShape(*map(_at, self._axes, index)) for index in np.ndindex(known.shape)}
        estimate = self._estimate(known, shapes)
        ms = np.clip(estimate, _largest_below(known), _smallest_above(known))
        ms = _largest_below(np.where(np.isnan(known), ms, known))
        ms[0, 0] = np.minimum(_nothing_ms(ms[0], self.decodes), ms[1, 0])
        return StepTimes(
            prefill_tokens=self.prefill_tokens,
            decodes=self.decodes,
            context_tokens=self.context_tokens,
            ms=tuple(round(value, 6) for value in ms.flatten().tolist()),
        )

    def has(self, shape: StepShape) -> bool:
        """Return whether the shape is a point of this grid at which a step can run."""
        return all(value in axis for value, axis in zip(shape, self._axes, strict=True)) and sum(shape[:2]) > 0

    def _ends(self) -> list[StepShape]:
        """Return a far point of every kind of step."""
        most_prefill, most_decodes, most_context = (axis[-1] for axis in self._axes)
        return [
            StepShape(most_prefill, 0, 0),
            StepShape(0, most_decodes, 0),
            StepShape(0, most_decodes, most_context),
            StepShape(most_prefill, 0, min(most_context, self.context_tokens[1])),
        ]

    def _index(self, shape: StepShape) -> tuple[int, ...]:
        return tuple(axis.index(value) for axis, value in zip(self._axes, shape, strict=True))

    def _parts(self, shape: StepShape) -> NDArray[np.float64]:
        """Return the parts of a shape. If no step can have the shape, one sequence gets all of the context."""
        slices = self.slices(shape)
        if slices is not None:
            return slices.parts()
        prefill, decodes, context = shape
        in_prefill = 0 if decodes or not prefill else context
        reads = context - in_prefill
        return np.array((1, prefill + decodes, decodes, reads, prefill * in_prefill, in_prefill), np.float64)

    def _estimate(self, known: NDArray[np.float64], shapes: Mapping[tuple[int, ...], StepShape]) -> NDArray[np.float64]:
        """Estimate every point from all measured points."""
        places = [index for index in shapes if not np.isnan(known[index])]
        parts = np.stack([self._parts_by_shape[shapes[index]] for index in places])
        ms = np.array([known[index] for index in places])
        weights = _fit(parts, ms, np.stack([self._parts_by_shape[shape] for shape in self._ends()]))
        off = np.log(ms / np.maximum(parts @ weights, _MIN_MS))
        at = np.array(places, np.float64)
        estimate = np.empty(known.shape)
        for index, shape in shapes.items():
            nearness = 1 / (0.25 + ((at - index) ** 2).sum(axis=1)) ** 2
            fitted = max(float(self._parts_by_shape[shape] @ weights), _MIN_MS)
            estimate[index] = fitted * np.exp((nearness * off).sum() / nearness.sum())
        return estimate


def _axis(first: int, last: int) -> tuple[int, ...]:
    """Return 0, then points from `first` to `last` in equal ratios; a point close to `last` is left out."""
    points = [0]
    value = first
    while value * 2 <= last:
        points.append(value)
        value *= _RATIO
    return (*points, last)


def _at(axis: tuple[int, ...], index: int) -> int:
    return axis[index]


def _uneven(total: int, count: int, most: int) -> list[int]:
    """Divide `total` into `count` parts that rise from 0.5 to 1.5 times the mean, each at most `most`."""
    parts: list[int] = []
    for at in range(count):
        left = count - at
        mean = total / left
        # The remaining parts must be able to hold the rest.
        wanted = round(mean * 0.5 * (1 + at / count)) if left > 1 else total
        parts.append(min(max(wanted, total - most * (left - 1)), most, total))
        total -= parts[-1]
    return parts


def _largest_below(known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each point the largest known time of the points smaller or equal in every axis; 0.001 ms if none."""
    values = np.nan_to_num(known, nan=_MIN_MS)
    for axis in range(values.ndim):
        values = np.maximum.accumulate(values, axis)
    return values


def _smallest_above(known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each point the smallest known time of the points larger or equal in every axis; infinite if none."""
    values = np.nan_to_num(known, nan=np.inf)
    for axis in range(values.ndim):
        values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return values


def _fit(parts: NDArray[np.float64], ms: NDArray[np.float64], far: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-negative milliseconds of each part that fit the measured times best, by relative error.

    At the `far` points the assumed proportions have a small weight, so that a single measurement determines all parts.
    Shapes:  parts [n, 6]; ms [n]; far [m, 6]; returns [6].
    Cost:    a small least-squares problem for each of the 63 subsets of the parts.
    """
    speed = np.exp(np.log(ms / (parts @ _PRIOR)).mean())
    believed = _PRIOR_WEIGHT * far / (speed * (far @ _PRIOR))[:, None]
    rows = np.concatenate((parts / ms[:, None], believed))
    ones = np.concatenate((np.ones(len(ms)), np.full(len(far), _PRIOR_WEIGHT)))
    best, least = np.zeros(parts.shape[1]), np.inf
    for size in range(1, parts.shape[1] + 1):
        for chosen in combinations(range(parts.shape[1]), size):
            columns = rows[:, chosen]
            scale = np.abs(columns).max(axis=0)
            if not scale.all():
                continue
            values = np.linalg.lstsq(columns / scale, ones, rcond=None)[0]
            error = float(((columns / scale @ values - ones) ** 2).sum())
            if values.min() >= 0 and error < least * (1 - 1e-9):
                least = error
                best = np.zeros(parts.shape[1])
                best[list(chosen)] = values / scale
    return best


def _nothing_ms(ms: NDArray[np.float64], decodes: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the times without decodes and prefill, which cannot be measured: extrapolated from the first decodes."""
    if len(decodes) < 3:
        return ms[1] * 0.9
    each = (ms[2] - ms[1]) / (decodes[2] - decodes[1])
    return np.maximum.accumulate(np.clip(ms[1] - each, ms[1] / 2, ms[1]))
