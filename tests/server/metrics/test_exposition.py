"""Our exposition text is that of prometheus_client."""

import random
import re

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tiercel.server.metrics.exposition import family, histogram, joined, labels, single, summary
from tiercel.server.metrics.histogram import HistogramCounter

BOUNDS = (0.01, 0.5, 1, 20)
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _read(text: str) -> tuple[list[tuple[str, str, str]], Series]:
    families = list(text_string_to_metric_families(text))
    series = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    return [(one.name, one.type, one.documentation) for one in families if not one.name.endswith("_created")], series


def test_a_tally_is_the_histogram_of_prometheus() -> None:
    rng = random.Random(1)
    registry, tally = CollectorRegistry(), HistogramCounter(BOUNDS)
    theirs = Histogram("waits_seconds", "Waits.", ("who",), buckets=BOUNDS, registry=registry).labels('a"b\\c\nd')
    for value in (*BOUNDS, 0.0, 1e9, *(rng.expovariate(1.0) for _ in range(500))):
        tally.add(value)
        theirs.observe(value)
    text = histogram("waits_seconds", "Waits.", ((labels(who='a"b\\c\nd'), tally),))
    assert _read(text) == _read(generate_latest(registry).decode())
    assert tally.count == tally.below()[-1][1] == 506


def test_bounds_are_written_as_prometheus_client_writes_them() -> None:
    bounds = (0.001, 1, 200, 1_000_000, 2_500_000, 50_000_000)
    registry = CollectorRegistry()
    Histogram("waits_seconds", "Waits.", buckets=bounds, registry=registry)
    page = generate_latest(registry).decode()
    own = histogram("waits_seconds", "Waits.", ((labels(who="a"), HistogramCounter(bounds)),))
    written = [re.findall(r'le="([^"]+)"', text) for text in (page, own)]
    assert written[0] == written[1]
    assert "1e+06" in written[1]


def test_a_summary_has_sum_and_count_alone() -> None:
    tally = HistogramCounter(BOUNDS)
    tally.add(0.25)
    tally.add(2)
    families, series = _read(summary("waits_seconds", "Waits.", ((labels(who="a"), tally),)))
    assert families == [("waits_seconds", "summary", "Waits.")]
    assert series == {("waits_seconds_sum", (("who", "a"),)): 2.25, ("waits_seconds_count", (("who", "a"),)): 2}


def test_families_of_one_and_of_many_samples() -> None:
    samples = ((labels(who=who, b="1"), value) for who, value in (("a", 1), ("b", 0.5)))
    pieces = [single("up_total", "counter", "Ups.", 3), family("level", "gauge", "Level.", samples)]
    families, series = _read(joined((*pieces, "# a long one " + "x" * 5000 + "\n")))
    assert families == [("up", "counter", "Ups."), ("level", "gauge", "Level.")]
    assert series == {
        ("up_total", ()): 3,
        ("level", (("b", "1"), ("who", "a"))): 1,
        ("level", (("b", "1"), ("who", "b"))): 0.5,
    }
