"""The tenants file and its errors."""

from pathlib import Path

import pytest

from tests.loadtest.builders import texts
from tiercel.loadtest.load.mix import read_mix
from tiercel.loadtest.plan import make_plan, mix_of
from tiercel.loadtest.results.record import Goals
from tiercel.loadtest.settings import BenchSettings
from tiercel.values.errors import ConfigError

GOOD = """
duration_s: 30
tenants:
  - name: chat
    key: sk-chat
    weight: 3
    num_prompts: 5
    arrivals: {process: poisson, rate: 4}
    dataset: {name: random, input_len: 16, output_len: 8}
    goals: {ttft: 500, tpot: 60}
  - name: flood
    aggressor: true
    max_concurrency: 8
    extra_body: {priority: 1}
"""


def _file(folder: Path, text: str) -> str:
    path = folder / "mix.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_gives_tenants_with_keys_goals_and_load(tmp_path: Path) -> None:
    settings = BenchSettings(tenants=_file(tmp_path, GOOD), num_prompts=7, goodput=["e2el:900"])
    plan = make_plan(mix_of(settings), texts(), 0, {"authorization": "Bearer other"})
    chat, flood = plan.tenants
    assert (chat.weight, chat.goals, flood.goals) == (3.0, Goals(ttft=500, tpot=60), Goals(e2el=900))
    assert [len(source.jobs) for source in plan.sources] == [5, 7]
    assert [source.headers["authorization"] for source in plan.sources] == ["Bearer sk-chat", "Bearer other"]
    assert plan.sources[1].extra_body == {"priority": 1}
    assert plan.sources[1].jobs[0].due_s is None
    assert plan.duration_s == 30
    assert [job.index for source in plan.sources for job in source.jobs] == list(range(12))
    assert plan.only("flood").requests == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants: []", "tenants is empty"),
        ("tenants: {}", "tenants: Expected `array`, got `object`"),
        ("{}", "missing required field `tenants`"),
        ("tenants: [{name: a, wieght: 2}]", r"tenants\[0\]: Object contains unknown field `wieght`"),
        ("tenants: [{name: a, weight: two}]", r"tenants\[0\].weight: Expected `float`, got `str`"),
        ("tenants: [{name: a, weight: 0}]", r"tenants\[0\]: weight is not greater than 0"),
        ("tenants: [{name: ' '}]", r"tenants\[0\]: name is empty"),
        ("tenants: [{name: a}, {name: a}]", "two tenants are named a"),
        ("tenants: [{name: a, arrivals: {process: poisson}}]", "arrivals: poisson arrivals need a rate"),
        ("tenants: [{name: a, arrivals: {process: often}}]", "arrivals.process: Invalid enum value 'often'"),
        ("tenants: [{name: a, arrivals: {process: ramp_linear, rate: 1}}]", "start_rate and end_rate"),
        ("tenants: [{name: a, dataset: {name: sharegpt}}]", "dataset: dataset sharegpt needs a path"),
        ("tenants: [{name: a, dataset: {input_len: 0}}]", "dataset: input_len is less than 1"),
        ("tenants: [{name: a, goals: {ttft: fast}}]", r"goals.ttft: Expected `float \| null`, got `str`"),
        ("tenants: [{name: a}]\nduration_s: -1", "duration_s is not greater than 0"),
        ("tenants: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_mix(Path(_file(tmp_path, text)))


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        read_mix(tmp_path / "none.yaml")


def test_flags_alone_make_one_tenant() -> None:
    settings = BenchSettings(num_prompts=3, request_rate=5, burstiness=0.5, random_input_len=4, random_output_len=2)
    mix = mix_of(settings)
    assert [(tenant.name, tenant.arrivals.process) for tenant in mix.tenants] == [("default", "gamma")]
    again = [make_plan(mix, texts(), 9, {}).sources for _ in range(2)]
    assert again[0] == again[1]
    assert make_plan(mix, texts(), 10, {}).sources != again[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BenchSettings(goodput=["speed:1"]), "--goodput speed:1"),
        (BenchSettings(goodput=["ttft"]), "--goodput ttft"),
        (BenchSettings(dataset_name="custom"), "needs a path"),
        (BenchSettings(arrivals="constant"), "need a rate"),
    ],
)
def test_wrong_flags_are_refused_by_name(settings: BenchSettings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mix_of(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BenchSettings(num_prompts=0), "--num-prompts 0"),
        (BenchSettings(isolation=True), "--isolation"),
        (BenchSettings(tenants="mix.yaml", request_rate=3), "--request-rate: with --tenants"),
        (BenchSettings(client_processes="many"), "--client-processes many"),
        (BenchSettings(ramp_up_strategy="linear"), "--ramp-up-strategy needs"),
        (BenchSettings(metric_percentiles="99,x"), "--metric-percentiles"),
        (BenchSettings(metadata=["duration=3"]), "--metadata duration"),
        (BenchSettings(metadata=["p99_ttft_ms=3"]), "--metadata p99_ttft_ms"),
    ],
)
def test_flags_that_make_no_sense_are_refused(settings: BenchSettings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings.check()
