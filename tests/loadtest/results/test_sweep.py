"""The search for the highest rate that meets the goals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loadtest.builders import stub_server
from tests.loadtest.example_run import example_run
from tiercel.cli.main import main
from tiercel.loadtest.plan import settings_at
from tiercel.loadtest.report.sweep_page import verdict, write_sweep
from tiercel.loadtest.results.sweep import Point, SearchPlan, best, knee, make_sweep, point_of, search
from tiercel.loadtest.settings import BenchSettings
from tiercel.values.errors import ConfigError


def server_of(capacity: float) -> Callable[[float], Point]:
    """Return the measurement of a server whose good share falls beyond its capacity."""

    def measure(rate: float) -> Point:
        share = 1.0 if rate <= capacity else max(0.0, 1 - 2 * (rate / capacity - 1))
        figures: dict[str, float | None] = {"median_ttft_ms": 100.0, "p99_ttft_ms": None}
        return Point(rate=rate, good_share=share, request_throughput=rate, output_throughput=rate, figures=figures)

    return measure


@pytest.mark.parametrize("capacity", [0.07, 1.0, 3.3, 17.0, 300.0])
def test_the_knee_is_found_within_the_precision(capacity: float) -> None:
    plan = SearchPlan(precision=0.05)
    points = list(search(server_of(capacity), plan))
    found = knee(points, plan.wanted_share)
    assert found is not None
    assert capacity / 1.05 <= found.rate <= capacity * 1.026, "95 % are good up to 2.5 % beyond the capacity"
    assert len(points) <= 16


def test_rates_double_until_goals_are_missed_and_then_close_in() -> None:
    rates = [point.rate for point in search(server_of(5), SearchPlan(precision=0.2))]
    assert rates[:4] == [1, 2, 4, 8]
    assert all(4 < rate < 8 for rate in rates[4:])


def test_a_first_rate_that_is_too_much_is_lowered() -> None:
    rates = [point.rate for point in search(server_of(0.3), SearchPlan(first_rate=8, precision=0.5))]
    assert rates[:6] == [8, 4, 2, 1, 0.5, 0.25]


def test_a_server_that_keeps_up_is_measured_up_to_the_highest_rate() -> None:
    plan = SearchPlan(highest_rate=10)
    points = list(search(server_of(1000), plan))
    assert [point.rate for point in points] == [1, 2, 4, 8, 10]
    sweep = make_sweep(plan, ["tiercel"], points)
    assert "may be higher" in verdict(sweep)


def test_a_server_that_never_keeps_its_goals_has_no_knee_and_the_search_ends() -> None:
    plan = SearchPlan()

    def never(rate: float) -> Point:
        return Point(rate=rate, good_share=0.1, request_throughput=1, output_throughput=1, figures={})

    points = list(search(never, plan))
    assert knee(points, plan.wanted_share) is None
    assert len(points) < 30
    assert "At no rate" in verdict(make_sweep(plan, [], points))


def test_a_lucky_point_beyond_a_miss_is_not_the_knee() -> None:
    def point(rate: float, share: float) -> Point:
        return Point(rate=rate, good_share=share, request_throughput=rate, output_throughput=1, figures={})

    points = [point(1, 1), point(2, 0.97), point(3, 0.6), point(4, 0.96)]
    found = knee(points, 0.95)
    assert found is not None
    assert found.rate == 2
    assert best(points).rate == 4


def test_a_point_counts_good_requests_among_all_sent() -> None:
    run = example_run(num_requests=300)
    point = point_of(run, 5.0)
    assert point.good_share == pytest.approx(4.2 * 60 / 300)
    assert point.goodput == pytest.approx(4.2)


def test_every_rate_is_offered_for_the_same_time() -> None:
    settings = BenchSettings(goodput=["ttft:500"])
    assert settings_at(settings, 10, 30, 0).num_prompts == 300
    assert settings_at(settings, 10, 30, 0).request_rate == 10
    assert settings_at(settings, 0.1, 30, 0).num_prompts == 20, "fewer say nothing"


def test_no_rate_of_a_sweep_repeats_the_prompts_of_another() -> None:
    settings = BenchSettings(goodput=["ttft:500"], seed=5)
    assert [settings_at(settings, 1, 1, number).seed for number in range(3)] == [5, 6, 7]


def test_a_sweep_wants_goals() -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        settings_at(BenchSettings(), 1, 1, 0)


@pytest.mark.parametrize("flag", ["--tenants", "--max-concurrency", "--request-rate", "--isolation"])
def test_flags_that_make_no_sense_in_a_sweep_are_not_there(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--goodput", "ttft:1", flag, "1"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize(
    "plan",
    [
        SearchPlan(first_rate=0),
        SearchPlan(first_rate=4, highest_rate=2),
        SearchPlan(growth=1),
        SearchPlan(wanted_share=1.5),
    ],
)
def test_plans_that_make_no_sense_are_refused(plan: SearchPlan) -> None:
    with pytest.raises(ConfigError):
        plan.check()


def test_the_page_shows_the_knee_and_the_points_are_beside_it(tmp_path: Path) -> None:
    plan = SearchPlan(precision=0.1)
    sweep = make_sweep(plan, ["tiercel", "bench", "sweep"], list(search(server_of(5), plan)))
    page = write_sweep(sweep, example_run(num_requests=30), tmp_path).read_text(encoding="utf-8")
    assert "The knee is at" in page
    assert page.count('<tr class="good">') == 1
    assert "tiercel bench sweep" in page
    assert (tmp_path / "goodput.png").stat().st_size > 10_000
    plain = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert len(plain["points"]) == len(sweep.points)
    assert plain["knee"]["rate"] <= 5.2


def test_the_verb_sweeps_a_server_to_its_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server("--default", "first=20 gap=2 tokens=4") as url:
        code = main(
            [
                *("bench", "sweep", "--base-url", url, "--goodput", "ttft:5000", "tpot:5000", "--out", str(tmp_path)),
                *("--first-rate", "30", "--highest-rate", "60", "--step-sec", "0.5", "--random-input-len", "8"),
                *("--api-key", "secret", "--client-processes", "1", "--num-warmups", "0"),
            ]
        )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "The knee is at 60 requests/s" in captured.out
    assert len((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert "secret" not in (tmp_path / "sweep.html").read_text(encoding="utf-8")


def test_a_sweep_without_goals_ends_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--out", str(tmp_path / "none")]) == 2
    assert "--goodput" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
