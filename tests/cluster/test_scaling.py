"""The number of engines follows the seconds of predicted work, and stays without a report."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tiercel.cluster.scaling import METRIC, WorkPolicy, wanted_engines


@dataclass
class Context:
    """The context that Ray Serve gives a policy."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[object, float]] | None
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4


@pytest.mark.parametrize(("work_s", "count"), [(0, 1), (0.1, 1), (2, 1), (2.1, 2), (7.9, 4), (100, 4)])
def test_each_engine_has_at_most_the_goal(work_s: float, count: int) -> None:
    assert wanted_engines(work_s, 2.0, 1, 4) == count
    assert WorkPolicy(2.0)(Context(1, {METRIC: {"a": work_s, "b": work_s / 2}})) == (count, {})


@pytest.mark.parametrize("metrics", [None, {}, {METRIC: {}}, {"other": {"a": 100.0}}])
def test_nothing_changes_without_a_report(metrics: Mapping[str, Mapping[object, float]] | None) -> None:
    assert WorkPolicy(2.0)(Context(3, metrics)) == (3, {})
