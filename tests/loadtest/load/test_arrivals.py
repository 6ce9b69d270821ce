"""Due times: mean, spread, sum, and dependence on the seed alone."""

import random
import statistics
from itertools import pairwise

import pytest

from tiercel.loadtest.load.arrivals import due_times
from tiercel.loadtest.load.mix import ArrivalSettings
from tiercel.values.errors import ConfigError

RATE = 8.0


def _times(settings: ArrivalSettings, count: int = 4000, seed: int = 1) -> list[float]:
    return due_times(settings, count, random.Random(seed))


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


@pytest.mark.parametrize(
    ("settings", "spread"),
    [
        (ArrivalSettings(process="constant", rate=RATE), 0.0),
        (ArrivalSettings(process="poisson", rate=RATE), 1.0),
        (ArrivalSettings(process="gamma", rate=RATE, burstiness=0.25), 2.0),
        (ArrivalSettings(process="gamma", rate=RATE, burstiness=4.0), 0.5),
    ],
)
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_process(settings: ArrivalSettings, spread: float) -> None:
    gaps = _gaps(_times(settings))
    assert statistics.fmean(gaps) == pytest.approx(1 / RATE)
    assert statistics.pstdev(gaps) * RATE == pytest.approx(spread, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_the_total_time_follows_from_the_rate_for_every_seed(seed: int) -> None:
    assert _times(ArrivalSettings(process="poisson", rate=RATE), 50, seed)[-1] == pytest.approx(50 / RATE)


def test_a_seed_gives_the_same_times_again_and_another_seed_others() -> None:
    settings = ArrivalSettings(process="gamma", rate=RATE, burstiness=0.5)
    assert _times(settings, 100, 1) == _times(settings, 100, 1)
    assert _times(settings, 100, 1) != _times(settings, 100, 2)


def test_nothing_is_due_while_on_off_arrivals_are_off() -> None:
    times = _times(ArrivalSettings(process="on_off", rate=RATE, on_s=2, off_s=3), 200)
    assert all(at_s % 5 <= 2 + 1e-6 for at_s in times)
    assert times[-1] == pytest.approx(25 + 12 * 3, abs=5)


@pytest.mark.parametrize("kind", ["ramp_linear", "ramp_exponential"])
def test_a_ramp_begins_at_one_rate_and_ends_at_the_other(kind: str) -> None:
    settings = ArrivalSettings(process=kind, start_rate=1, end_rate=16)  # type: ignore[arg-type]
    gaps = _gaps(_times(settings, 8000))
    assert 1 / statistics.fmean(gaps[:200]) == pytest.approx(1, rel=0.3)
    assert 1 / statistics.fmean(gaps[-200:]) == pytest.approx(16, rel=0.2)
    middle = 1 / statistics.fmean(gaps[3800:4200])
    assert middle == pytest.approx(8.5 if kind == "ramp_linear" else 4, rel=0.25)


def test_a_trace_is_replayed_from_zero_at_its_speed_or_at_a_rate() -> None:
    recorded = [100.0, 101.0, 103.0, 110.0]
    rng = random.Random(0)
    assert due_times(ArrivalSettings(process="trace", speed=2), 4, rng, recorded) == [0.0, 0.5, 1.5, 5.0]
    at_rate = due_times(ArrivalSettings(process="trace", rate=2), 4, rng, recorded)
    assert at_rate[-1] == pytest.approx(4 / 2)
    with pytest.raises(ConfigError, match="no times"):
        due_times(ArrivalSettings(process="trace"), 1, rng, [None])


def test_all_at_once_is_all_at_zero() -> None:
    assert _times(ArrivalSettings(), 3) == [0.0, 0.0, 0.0]
