"""The number of engines, from the time that they need for the sequences that wait and run.

A count of requests says little: one prompt may take as long as a thousand short ones.
"""

import math
from collections.abc import Mapping
from typing import Protocol

METRIC = "work_s"
"""The name under which engines report the predicted work of all fronts, in seconds of one engine."""


class Replicas(Protocol):
    """The part of Ray Serve's `AutoscalingContext` that the policy reads."""

    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[object, float]] | None:
        """Metric -> replica -> its mean over the last seconds."""
        ...


def wanted_engines(work_s: float, goal_s: float, least: int, most: int) -> int:
    """Return how many engines have at most `goal_s` seconds of work each, from `least` to `most`."""
    return max(least, min(most, math.ceil(work_s / goal_s)))


class WorkPolicy:
    """The number of engines that have at most `goal_s` seconds of work each. Serve applies its delays."""

    def __init__(self, goal_s: float) -> None:
        self._goal_s = goal_s

    def __call__(self, ctx: Replicas) -> tuple[int, dict[str, object]]:
        """Return the number of engines, and no state. Without a report nothing changes."""
        reports = tuple((ctx.aggregated_metrics or {}).get(METRIC, {}).values())
        if not reports:
            return ctx.target_num_replicas, {}
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return wanted_engines(max(reports), self._goal_s, least, most), {}
