"""Comparison of load test results."""

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.loadtest.example_run import example_run
from tiercel.cli.main import main
from tiercel.loadtest.results.bootstrap import (
    grouped_percentile_sampler,
    interval,
    mean_sampler,
    percentile_sampler,
    rounds_for,
)
from tiercel.loadtest.results.comparison import ComparisonVerdict, Difference, compare, differing_settings
from tiercel.loadtest.results.distribution import percentile
from tiercel.loadtest.results.record import RunResult
from tiercel.loadtest.results.result_file import write_result

ROUNDS = 400


@pytest.fixture(scope="module")
def first() -> RunResult:
    return example_run(seed=1, num_requests=800)


@pytest.fixture(scope="module")
def slower() -> RunResult:
    return example_run(seed=2, num_requests=800, slower=1.3)


def by_figure(differences: list[Difference]) -> dict[str, Difference]:
    return {difference.figure: difference for difference in differences if not difference.tenant}


@pytest.mark.slow
def test_runs_of_the_same_kind_are_ties_as_often_as_the_intervals_predict() -> None:
    verdicts: list[ComparisonVerdict] = []
    for seed in range(10, 18):
        pair = (example_run(seed=number, num_requests=300) for number in (seed, seed + 100))
        verdicts += [difference.verdict for difference in compare(*pair, rounds=200) if not difference.tenant]
    reported = [verdict for verdict in verdicts if verdict is not ComparisonVerdict.UNKNOWN]
    assert len(reported) > 80
    assert reported.count(ComparisonVerdict.TIE) / len(reported) > 0.88


def test_a_run_against_itself_is_a_tie_in_everything(first: RunResult) -> None:
    found = compare(first, first, rounds=ROUNDS)
    assert {difference.verdict for difference in found} <= {ComparisonVerdict.TIE, ComparisonVerdict.UNKNOWN}
    assert {difference.ratio for difference in found} == {1.0}


def test_a_slower_run_is_found_worse_and_the_truth_lies_in_the_interval(first: RunResult, slower: RunResult) -> None:
    found = by_figure(compare(first, slower, rounds=ROUNDS))
    for figure in ("median_ttft_ms", "median_tpot_ms", "p90_tpot_ms", "p99_tpot_ms", "median_e2el_ms", "p99_itl_ms"):
        difference = found[figure]
        assert difference.verdict is ComparisonVerdict.WORSE, figure
        assert difference.spread is not None
        assert difference.spread.low < 1.3 < difference.spread.high, figure


def test_the_other_way_round_it_is_better(first: RunResult, slower: RunResult) -> None:
    found = by_figure(compare(slower, first, rounds=ROUNDS))
    assert found["median_tpot_ms"].verdict is ComparisonVerdict.BETTER
    assert found["output tokens/s"].verdict is ComparisonVerdict.TIE, "both were offered the same"


def test_the_same_seed_gives_the_same_intervals(first: RunResult, slower: RunResult) -> None:
    assert compare(first, slower, seed=5, rounds=50) == compare(first, slower, seed=5, rounds=50)
    assert compare(first, slower, seed=5, rounds=50) != compare(first, slower, seed=6, rounds=50)


def test_tenants_that_both_runs_have_are_compared(first: RunResult, slower: RunResult) -> None:
    found = compare(first, slower, rounds=50)
    assert {difference.tenant for difference in found} == {"", "interactive", "batch", "nightly <reports>"}
    (tail,) = [one for one in found if one.tenant == "nightly <reports>" and one.figure == "p99_ttft_ms"]
    assert tail.verdict is ComparisonVerdict.UNKNOWN, (
        "one of a hundred requests says nothing about the slowest hundredth"
    )
    assert tail.reason == "too few samples"


def test_without_single_requests_latencies_have_ratios_and_no_verdict() -> None:
    plain = example_run(num_requests=800, is_detailed=False)
    found = by_figure(compare(plain, plain, rounds=50))
    assert found["p99_ttft_ms"].ratio == 1
    assert found["p99_ttft_ms"].spread is None
    assert found["p99_ttft_ms"].verdict is ComparisonVerdict.UNKNOWN
    assert "--save-detailed" in found["p99_ttft_ms"].reason
    assert found["requests/s"].verdict is ComparisonVerdict.TIE


def test_differing_settings_are_named(first: RunResult, slower: RunResult) -> None:
    other = msgspec.structs.replace(slower, machine={"cpu": "a slow one"})
    assert set(differing_settings(first, other)) == {"seed", "machine"}
    assert differing_settings(first, first) == {}


def test_intervals_of_quantiles_have_the_nominal_coverage() -> None:
    chance, rng = random.Random(11), np.random.default_rng(11)
    truth = 2.302585  # the 90th percentile of the exponential distribution
    held = 0
    for _ in range(200):
        values = [chance.expovariate(1) for _ in range(120)]
        spread = interval(percentile_sampler(values, 90, rng)(200))
        held += spread.low <= truth <= spread.high
    assert 180 <= held <= 198


def test_drawing_a_rank_is_the_same_as_drawing_every_value() -> None:
    values = [chance_value**2 for chance_value in range(50)]
    chance, rng = random.Random(12), np.random.default_rng(12)
    quick = percentile_sampler(values, 75, rng)(4000).tolist()
    slow = sorted(percentile(sorted(chance.choices(values, k=50)), 75) for _ in range(4000))
    for rank in (5, 25, 50, 75, 95):
        assert percentile(quick, rank) == pytest.approx(percentile(slow, rank), rel=0.04)


def test_the_mean_of_many_values_is_drawn_as_that_of_few() -> None:
    chance, rng = random.Random(13), np.random.default_rng(13)
    many = [chance.expovariate(1) for _ in range(20_000)]
    spread = interval(mean_sampler(many, rng)(500))
    assert spread.low == pytest.approx(sum(many) / 20_000 - 1.96 / 20_000**0.5, abs=0.004)
    few = interval(mean_sampler(many[:500], rng)(500))
    assert few.high - few.low == pytest.approx(2 * 1.96 / 500**0.5, rel=0.2)


def test_gaps_of_one_request_are_drawn_together() -> None:
    rng = np.random.default_rng(14)
    groups = [[10.0] * 50 if number % 10 == 0 else [1.0] * 50 for number in range(40)]
    together = interval(grouped_percentile_sampler(groups, 92, rng)(300))
    assert (together.low, together.high) == (1.0, 10.0), "four slow requests may as well be one or ten"
    apart = interval(grouped_percentile_sampler([[value] for group in groups for value in group], 92, rng)(300))
    assert (apart.low, apart.high) == (10.0, 10.0)
    assert rounds_for(groups, 300) == 300
    assert rounds_for([[1.0] * 200] * 20_000, 2000) == 200


def test_the_verb_prints_a_table_or_json(
    first: RunResult, slower: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for run, path in zip((first, slower), paths, strict=True):
        write_result(run, path)
    assert main(["bench", "compare", *map(str, paths)]) == 0
    table = capsys.readouterr().out
    assert "different seed: 1 | 2" in table
    assert "median TPOT" in table
    assert "worse" in table
    assert "tie" in table
    assert main(["bench", "compare", "--json", *map(str, paths)]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["differing"] == {"seed": ["1", "2"]}
    assert {figure["verdict"] for figure in plain["figures"]} == {"worse", "tie", "unknown"}


def test_a_file_that_is_not_a_result_gives_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
