"""`tiercel check` and the engine decide alike which model folders can be served, with the same words and facts."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests.conformance.models import FAMILIES, Family, make_checkpoint
from tiercel.cli.model_facts import compare_small_model, facts_of, read_model_facts
from tiercel.device.cpu import CpuDevice
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.precision import CpuProducts
from tiercel.engine.models.registry import examine_model, load_model
from tiercel.engine.native.library import load_library
from tiercel.settings.settings import EngineSettings, LoadFormat
from tiercel.values.errors import ConfigError

CPU = torch.device("cpu")
SIZES: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, object] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}
LONGROPE: dict[str, object] = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
}
DYNAMIC: dict[str, object] = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
Fields = dict[str, object]

# The class of the model, its `model_type`, other fields, and the words of the refusal; no words: it is served.
CASES: list[tuple[str, str, Fields, str]] = [
    ("LlamaForCausalLM", "llama", {}, ""),
    ("LlamaForCausalLM", "llama", DYNAMIC, ""),
    ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16, **LONGROPE}, ""),
    ("Phi3ForCausalLM", "phi3", LONGROPE, ""),
    ("GPT2LMHeadModel", "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, ""),
    ("GPTBigCodeForCausalLM", "gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4}, ""),
    ("OPTForCausalLM", "opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, ""),
    ("Qwen2MoeForCausalLM", "qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 32}, ""),
    ("GptOssForCausalLM", "gpt_oss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 24}, ""),
    ("Gemma2ForCausalLM", "gemma2", {"head_dim": 16, "sliding_window": 24}, ""),
    ("DeepseekV3ForCausalLM", "deepseek_v3", LATENT | {"v_head_dim": 24, "n_group": 2, "topk_group": 1}, ""),
    ("BertLMHeadModel", "bert", {"is_decoder": True}, ""),
    (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        LATENT | {"v_head_dim": 16, "n_group": 2, "topk_group": 1},
        "differ in shape",
    ),
    ("Gemma4ForCausalLM", "gemma4_text", {"head_dim": 32, "num_hidden_layers": 6}, "differ between layers"),
    ("FalconH1ForCausalLM", "falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "kind hybrid"),
    ("Mamba2ForCausalLM", "mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16}, "linear_attention"),
    ("GlmMoeDsaForCausalLM", "glm_moe_dsa", LATENT | {"v_head_dim": 16}, "indexed_attention"),
    ("Lfm2ForCausalLM", "lfm2", {"layer_types": ["conv", "full_attention"]}, "kind conv"),
    ("BertLMHeadModel", "bert", {}, "not causal"),
    ("BertModel", "bert", {}, "BertModel is no causal language model"),
    ("BertForMaskedLM", "bert", {}, "BertForMaskedLM is no causal language model"),
    ("XLMRobertaForSequenceClassification", "xlm-roberta", {}, "is no causal language model"),
    ("Qwen3ForSequenceClassification", "qwen3", {"head_dim": 16}, "is no causal language model"),
    ("LlamaModel", "llama", {}, "LlamaModel is no causal language model"),
    ("ModernBertForMaskedLM", "modernbert", {}, "modernbert is no causal language model"),
    ("FalconForCausalLM", "falcon", {}, "keeps its own attention"),
    ("BloomForCausalLM", "bloom", {"n_layer": 2, "n_head": 4}, "keeps its own attention"),
    ("DiffLlamaForCausalLM", "diffllama", {}, "not once for each"),
    ("MptForCausalLM", "mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "cannot be called this way"),
    ("GPT2LMHeadModel", "gpt2", {"n_embd": 64, "add_cross_attention": True}, "has cross-attention"),
    ("T5ForConditionalGeneration", "t5", {"is_encoder_decoder": True}, "only decoder-only models"),
    ("Gemma3ForConditionalGeneration", "gemma3", {"vision_config": {"depth": 2}}, "vision_config"),
    ("NoSuchForCausalLM", "nonsense", {}, "nonsense"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def served(settings: EngineSettings) -> tuple[object, ...]:
    """Return what the engine knows of a loaded model, or the words of its refusal."""
    try:
        model = load_model(settings, CPU, open_attention("auto", CPU), library=load_library())
    except ConfigError as refusal:
        return refusal.code, refusal.message
    shape = model.layers, model.kv_heads, model.head_dim
    return (model.impl, *shape, model.vocab_size, model.max_model_len, model.weights_bytes, str(model.precision))


def checked(settings: EngineSettings, *, loads: bool = False) -> tuple[object, ...]:
    """Return the same of `tiercel check`. `loads`: the weights of small models are compared, too."""
    try:
        found = examine_model(settings, CpuProducts.of(load_library()))
        facts = facts_of(settings, found)
        if loads:
            compare_small_model(settings, found, CpuDevice().free_bytes())
    except ConfigError as refusal:
        return refusal.code, refusal.message
    kv = facts.kv
    shape = kv.layers, kv.kv_heads, kv.head_dim
    return (facts.impl, *shape, facts.vocab_size, facts.max_model_len, facts.weights_bytes, str(facts.precision))


def settings_of(folder: Path, load_format: LoadFormat) -> EngineSettings:
    return EngineSettings(model=str(folder), load_format=load_format)


@pytest.mark.parametrize(("architecture", "kind", "extra", "words"), CASES)
@pytest.mark.sampled(16)
def test_check_and_the_engine_decide_alike(
    architecture: str, kind: str, extra: Fields, words: str, tmp_path: Path
) -> None:
    fields = SIZES | extra | {"architectures": [architecture], "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = settings_of(tmp_path, "dummy")
    verdict = served(settings)
    assert checked(settings) == verdict
    assert words in f"{verdict[-1]}" if words else verdict[0] in ("native", "transformers")


def test_a_rotation_that_depends_on_the_batch_limits_the_length_that_check_names(tmp_path: Path) -> None:
    fields = SIZES | LONGROPE | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_model_facts(settings_of(tmp_path, "dummy")).max_model_len == 64


def test_a_large_model_is_not_loaded_and_check_says_so(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    settings = settings_of(tmp_path, "auto")
    found = examine_model(settings, None)
    assert "left to the start of the engine" in compare_small_model(settings, found, free_bytes=1000)
    assert "equal those of transformers" in compare_small_model(settings, found, CpuDevice().free_bytes())


def spoil(folder: Path, name: str) -> None:
    """Drop a tensor of the checkpoint."""
    # lazy: only here
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_check_and_the_engine_decide_alike_about_weights(family: Family, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    settings = settings_of(tmp_path, "auto")
    verdict = served(settings)
    assert verdict[0] in ("native", "transformers")
    assert checked(settings, loads=True) == verdict
    name = "transformer.h.0.ln_1.weight" if family == "gpt2" else "model.layers.0.input_layernorm.weight"
    spoil(tmp_path, name)
    verdict = served(settings)
    assert "input_layernorm" in f"{verdict[-1]}" or "ln_1" in f"{verdict[-1]}"
    assert checked(settings, loads=True) == verdict


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "extra", "words"), [case for case in CASES if not case[3]])
def test_check_and_the_engine_decide_alike_about_saved_models(
    architecture: str, kind: str, extra: Fields, words: str, tmp_path: Path
) -> None:
    twin_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    twin = twin_class(twin_class.config_class(**SIZES | extra)).eval()
    assert isinstance(twin, PreTrainedModel)
    assert twin.config.model_type == kind
    assert not words
    twin.save_pretrained(tmp_path)
    settings = settings_of(tmp_path, "auto")
    verdict = served(settings)
    assert verdict[0] in ("native", "transformers")
    assert checked(settings, loads=True) == verdict
