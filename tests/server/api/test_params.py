"""Request fields and their defaults."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.server.api.generation_config import SamplingDefaults, load_sampling_defaults
from tiercel.server.api.params import ModelLimits, chat_plan, choice_seed, completion_plan
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.completion import CompletionFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.values.errors import AdmissionError, ConfigError
from tiercel.values.request import SamplingParams

LIMITS = ModelLimits(max_model_len=100, vocab_size=50, pool_tokens=80, max_logprobs=20)


def _chat(defaults: SamplingDefaults | None = None, **fields: object) -> SamplingParams:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    plan = chat_plan(read_fields(ChatFields, body), defaults or SamplingDefaults(), LIMITS)
    return plan.choice_params(plan.for_prompt(10, LIMITS, None), 0, lambda: 77)


def test_fields_of_the_client_reach_the_engine() -> None:
    params = _chat(
        temperature=0.3,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": 5, "4": -100},
        seed=9,
        max_completion_tokens=20,
        max_tokens=5,
        min_tokens=4,
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )
    assert params == SamplingParams(
        temperature=0.3,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, 5.0), (4, -100.0)),
        seed=9,
        max_tokens=20,
        min_tokens=4,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=3,
    )


def test_the_models_defaults_fill_parameters_omitted_by_the_client() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, repetition_penalty=1.1)
    params = _chat(defaults, top_p=1.0)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 1.0, 20, 1.1)


def test_chat_defaults_to_the_rest_of_the_context_or_of_the_pool() -> None:
    assert _chat().max_tokens == 70
    plan = chat_plan(
        read_fields(ChatFields, {"messages": [{"role": "user", "content": "x"}]}), SamplingDefaults(), LIMITS
    )
    assert plan.for_prompt(10, LIMITS, 25).max_tokens == 25


def test_a_text_completion_has_sixteen_tokens_by_default() -> None:
    plan = completion_plan(read_fields(CompletionFields, {"prompt": "x"}), SamplingDefaults(), LIMITS)
    assert plan.for_prompt(1, LIMITS, None).max_tokens == 16


def test_a_temperature_near_zero_is_raised_and_zero_stays_greedy() -> None:
    assert _chat(temperature=1e-9).temperature == 0.01
    assert _chat(temperature=0).temperature == 0
    assert _chat(top_k=-1).top_k == 0


def test_not_a_number_is_refused() -> None:
    for field in ("temperature", "top_p", "min_p", "presence_penalty"):
        for value in (float("nan"), float("inf")):
            with pytest.raises(AdmissionError):
                _chat(**{field: value})


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 7))
def test_seeds_of_choices_fit_63_bits_and_repeat(seed: int, choice: int) -> None:
    derived = choice_seed(seed, choice)
    assert 0 <= derived < 2**63
    assert derived == choice_seed(seed, choice)


def test_choices_of_one_seed_differ_and_the_first_keeps_it() -> None:
    assert choice_seed(5, 0) == 5
    assert len({choice_seed(5, choice) for choice in range(8)}) == 8


def test_without_a_seed_each_choice_draws_its_own() -> None:
    assert _chat().seed == 77


def test_generation_config_is_read_unless_another_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "top_k": 40, "max_new_tokens": 30, "eos_token_id": [1], "do_sample": True})
    )
    read = load_sampling_defaults(tmp_path, "auto", {"top_p": 0.5})
    assert read == SamplingDefaults(temperature=0.7, top_k=40, top_p=0.5, max_new_tokens=30)
    assert load_sampling_defaults(tmp_path, "vllm", {}) == SamplingDefaults()
    assert load_sampling_defaults(tmp_path / "absent", "auto", {}) == SamplingDefaults()
    assert load_sampling_defaults(tmp_path / "absent", str(tmp_path), {}).temperature == 0.7
    with pytest.raises(ConfigError):
        load_sampling_defaults(tmp_path, str(tmp_path / "absent"), {})
    with pytest.raises(ConfigError, match="heat"):
        load_sampling_defaults(tmp_path, "auto", {"heat": 1})


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_p": -1}', '{"top_p": NaN}'])
def test_a_broken_generation_config_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError):
        load_sampling_defaults(tmp_path, "auto", {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            ("repetition_penalty", 0),
            ("min_p", 5),
            ("top_p", 7),
            ("top_p", -0.5),
            ("temperature", 101),
            ("top_k", 40.5),
        ],
        *[("top_k", -2), ("max_new_tokens", -1), ("max_new_tokens", 1.5), ("repetition_penalty", 1e9)],
    ],
)
def test_defaults_must_be_in_the_ranges_of_client_values(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--override-generation-config: invalid {key}"):
        load_sampling_defaults(tmp_path, "auto", {key: value})
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({key: value}))
    for source in ("auto", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"{file}: invalid {key}"):
            load_sampling_defaults(tmp_path, source, {})


def test_the_bounds_of_the_ranges_are_valid(tmp_path: Path) -> None:
    edges = {"top_k": -1, "top_p": 1, "min_p": 0, "temperature": 0, "repetition_penalty": 0.1, "max_new_tokens": 0}
    read = load_sampling_defaults(tmp_path, "auto", edges)
    assert (read.top_k, read.top_p, read.max_new_tokens) == (-1, 1, None)


def test_faults_name_their_fields_and_never_the_values() -> None:
    with pytest.raises(AdmissionError) as refusal:
        read_fields(ChatFields, {"messages": [{"role": "user", "content": 5}] * 20, "temperature": "private"})
    assert "private" not in refusal.value.message
    assert refusal.value.message.count(";") == 9
    assert "messages.0.content" in refusal.value.message
