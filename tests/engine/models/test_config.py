"""Reading config.json: accepted and rejected fields."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from tiercel.engine.models.config import (
    ConfigFields,
    DecoderConfig,
    choose_dtype,
    is_native_refusal,
    parse_decoder,
    read_config,
    refuse_foreign,
)
from tiercel.engine.models.mixture_config import MixtureConfig
from tiercel.engine.models.rope import rope_frequencies
from tiercel.values.errors import ConfigError

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"]}
OLMOE = LLAMA | {"architectures": ["OlmoeForCausalLM"]}


def parse(fields: dict[str, object]) -> DecoderConfig:
    return parse_decoder(ConfigFields(fields, "config.json"))


def refusal(fields: dict[str, object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(fields)
    return caught.value


def test_missing_fields_have_the_defaults_of_transformers() -> None:
    config = parse({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"})

    assert (config.kv_heads, config.head_dim, config.rms_eps, config.rope.theta) == (4, 16, 1e-6, 10000.0)
    assert not (config.is_tied or config.has_qkv_bias or config.has_output_bias or config.has_mlp_bias)
    assert config.windows == (None,) * 4


@pytest.mark.parametrize(
    ("name", "count"), [("num_hidden_layers", 4294967296), ("vocab_size", 2**31), ("hidden_size", 0)]
)
def test_counts_have_limits(name: str, count: int) -> None:
    assert f"config.json: {name} must be from 1 to" in refusal(LLAMA | {name: count}).message


def test_a_head_dim_of_its_own_is_kept() -> None:
    assert parse(LLAMA | {"head_dim": 32}).head_dim == 32
    assert parse(LLAMA | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


def test_qwen2_has_bias_on_queries_keys_and_values_only() -> None:
    config = parse(QWEN2)

    assert config.has_qkv_bias
    assert not config.has_output_bias


def test_mistral_windows_cover_every_layer_unless_null() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}

    assert parse(mistral | {"sliding_window": 7}).windows == (7,) * 4
    assert parse(mistral | {"sliding_window": None}).windows == (None,) * 4
    assert parse(mistral).windows == (4096,) * 4


def test_qwen2_windows_follow_its_switches() -> None:
    windowed = QWEN2 | {"sliding_window": 9, "max_window_layers": 3}

    assert parse(windowed).windows == (None,) * 4
    assert parse(windowed | {"use_sliding_window": True}).windows == (None, None, None, 9)
    types = ["sliding_attention", "full_attention"] * 2
    assert parse(windowed | {"use_sliding_window": True, "layer_types": types}).windows == (9, None, 9, None)


def test_layer_types_must_fit_the_layers() -> None:
    assert "layer_types" in str(refusal(QWEN2 | {"layer_types": ["full_attention"]}))
    assert "layer_types" in str(refusal(QWEN2 | {"layer_types": ["sliding_attention"] * 4}))


def test_yarn_stretches_the_length_by_its_factor() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

    assert parse(QWEN2 | {"rope_parameters": rope}).max_model_len == 16384


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 3.0, "beta_fast": 16.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 3.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_rotations_are_those_of_transformers(rope: dict[str, object], is_old: bool) -> None:
    twin = transformers.LlamaModel(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=8,
            max_position_embeddings=2048,
            rope_parameters=dict(rope),
        )
    ).rotary_emb
    if is_old:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        fields = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
        if rope["rope_type"] == "linear":
            scaling["type"] = scaling.pop("rope_type")
    else:
        fields = {"rope_parameters": rope}

    config = parse(LLAMA | {"num_attention_heads": 2, "max_position_embeddings": 2048} | fields).rope

    torch.testing.assert_close(rope_frequencies(config, 32), twin.inv_freq, atol=0, rtol=1e-6)
    assert config.attention_factor == pytest.approx(twin.attention_scaling)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_size_is_refused_by_name(field: str) -> None:
    assert field in str(refusal({name: value for name, value in LLAMA.items() if name != field}))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.5),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("rope_theta", -1.0),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("attention_bias", 1),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(field: str, wrong: object) -> None:
    error = refusal(LLAMA | {field: wrong})

    assert field.removeprefix("num_") in str(error) or "num_attention_heads" in str(error)
    assert not is_native_refusal(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["Qwen2MoeForCausalLM"]),
        ("hidden_act", "relu"),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_models_that_only_the_native_decoder_lacks_use_transformers(field: str, value: object) -> None:
    extra = {"rope_scaling": {"rope_type": "default"}} if field == "partial_rotary_factor" else {}

    assert is_native_refusal(refusal(LLAMA | extra | {field: value}))


def mixture(fields: dict[str, object]) -> MixtureConfig:
    found = parse(fields).mixture
    assert found is not None
    return found


def test_missing_fields_of_mixtures_have_the_defaults_of_transformers() -> None:
    qwen3, mixtral, olmoe = mixture(QWEN3_MOE), mixture(MIXTRAL), mixture(OLMOE)

    assert (qwen3.experts, qwen3.per_token, qwen3.inner_size, qwen3.normalizes) == (128, 8, 768, False)
    assert (mixtral.experts, mixtral.per_token, mixtral.inner_size, mixtral.normalizes) == (8, 2, 128, True)
    assert (olmoe.experts, olmoe.per_token, olmoe.inner_size, olmoe.normalizes) == (64, 8, 128, False)
    assert qwen3.layers == mixtral.layers == olmoe.layers == (True,) * 4
    assert (parse(MIXTRAL).rope.theta, parse(MIXTRAL).rms_eps, parse(OLMOE).rms_eps) == (1e6, 1e-5, 1e-5)


def test_fields_choose_the_layers_with_a_mixture() -> None:
    assert mixture(QWEN3_MOE | {"decoder_sparse_step": 2}).layers == (False, True, False, True)
    assert mixture(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).layers == (False, False, False, True)
    assert mixture(QWEN3_MOE | {"mlp_only_layers": None}).layers == (True,) * 4


def test_windows_of_mixtures_are_those_of_transformers() -> None:
    assert parse(MIXTRAL).windows == (None,) * 4
    assert parse(MIXTRAL | {"sliding_window": 9}).windows == (9,) * 4
    assert parse(QWEN3_MOE | {"sliding_window": 9}).windows == (None,) * 4
    assert parse(QWEN3_MOE | {"sliding_window": 9, "use_sliding_window": True}).windows == (9,) * 4
    assert parse(OLMOE | {"sliding_window": 9}).windows == (None,) * 4


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_either_name_of_the_number_of_experts_counts(name: str) -> None:
    assert [mixture(fields | {name: 11}).experts for fields in (QWEN3_MOE, MIXTRAL, OLMOE)] == [11, 11, 11]


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"num_experts": 0}, "num_experts must be from 1 to 4,096"),
        ({"num_experts": 2**31}, "num_experts must be from 1 to 4,096"),
        ({"num_experts": 4, "num_local_experts": 5}, r"num_experts \(4\) and num_local_experts \(5\) differ"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) must be at most .* \(4\)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be from 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be bool"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be from 1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must list numbers from 0 to 3"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers must list numbers from 0 to 3"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must list numbers from 0 to 3"),
    ],
)
def test_a_wrong_mixture_is_refused_by_its_field(wrong: dict[str, object], shown: str) -> None:
    error = refusal(QWEN3_MOE | wrong)

    assert re.search(shown, error.message), error.message
    assert not is_native_refusal(error)


def test_clipped_queries_are_left_to_transformers() -> None:
    error = refusal(OLMOE | {"clip_qkv": 8.0})

    assert "clip_qkv" in error.message
    assert is_native_refusal(error)
    assert parse(OLMOE | {"clip_qkv": None}).norms_whole_width


def test_a_norm_over_all_heads_needs_heads_that_fill_the_hidden_size() -> None:
    assert "head_dim (32) must be hidden_size (64)" in refusal(OLMOE | {"head_dim": 32}).message


@pytest.mark.parametrize("names", [None, [], ["A", "B"], "LlamaForCausalLM", [3]])
def test_architectures_must_name_one_class(names: object) -> None:
    assert "architectures" in str(refusal(LLAMA | {"architectures": names}))


@pytest.mark.parametrize("field", ["vision_config", "audio_config"])
def test_unsupported_models_are_rejected_by_field(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        refuse_foreign(ConfigFields(LLAMA | {field: {"any": 1}}, "config.json"))


def test_encoder_decoder_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="is_encoder_decoder"):
        refuse_foreign(ConfigFields(LLAMA | {"is_encoder_decoder": True}, "config.json"))


def test_auto_dtype_is_that_of_the_config() -> None:
    assert choose_dtype("auto", ConfigFields({"dtype": "bfloat16"}, "")) == torch.bfloat16
    assert choose_dtype("auto", ConfigFields({"torch_dtype": "float16"}, "")) == torch.float16
    assert choose_dtype("auto", ConfigFields({}, "")) == torch.float32
    assert choose_dtype("float32", ConfigFields({"dtype": "bfloat16"}, "")) == torch.float32


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: int8"):
        choose_dtype("auto", ConfigFields({"dtype": "int8"}, "config.json"))


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_config_that_is_not_an_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_config_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    assert parse_decoder(read_config(tmp_path)) == parse(LLAMA)
