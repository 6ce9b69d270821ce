"""Architectures that the transformers implementation accepts, and those that it rejects."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conformance.models import make_checkpoint
from tests.engine.models.paged_run import PagedRun
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.base import Model
from tiercel.engine.models.bridge import Bridge, paged_attention
from tiercel.engine.models.registry import load_model
from tiercel.settings.settings import EngineSettings, LoadFormat, ModelImpl
from tiercel.values.errors import ConfigError, InvariantError

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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, load_format: LoadFormat = "auto", impl: ModelImpl = "auto", seed: int = 0) -> Model:
    settings = EngineSettings(model=str(folder), dtype="float32", load_format=load_format, model_impl=impl, seed=seed)
    return load_model(settings, CPU, SdpaAttention())


def load_dummy(folder: Path, fields: Mapping[str, object]) -> Model:
    (folder / "config.json").write_text(json.dumps(fields))
    return load(folder, "dummy")


def refusal(folder: Path, fields: Mapping[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dummy(folder, fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 24}),  # two caps, windows
        ("GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 24}),  # sinks, experts
        ("CohereForCausalLM", {}),  # scaled logits
        ("GraniteForCausalLM", {"logits_scaling": 3.0}),
        (
            "Qwen2MoeForCausalLM",
            {"num_experts": 4, "moe_intermediate_size": 32},
        ),  # with an expert that all tokens share
        ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
        ("OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64}),  # its body is one level deeper
        ("GPTNeoXForCausalLM", {}),
        ("Olmo2ForCausalLM", {}),
    ],
)
@pytest.mark.sampled(5)
def test_an_architecture_gives_the_results_of_transformers(
    architecture: str, extra: dict[str, object], tmp_path: Path
) -> None:
    twin_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = twin_class(twin_class.config_class(**SIZES | extra)).eval()
    twin.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = torch.randint(3, 256, (70,), generator=torch.Generator().manual_seed(0))

    logits = PagedRun(model, 1, 70).prefill(tokens, 16)

    with torch.inference_mode():
        torch.testing.assert_close(logits, twin(input_ids=tokens[None]).logits[0], atol=1e-4, rtol=0)
    assert model.impl == "transformers"


def test_an_architecture_that_keeps_its_own_attention_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, SIZES | {"architectures": ["FalconForCausalLM"], "model_type": "falcon"})

    assert "falcon" in message
    assert "keeps its own attention" in message


def test_positions_that_only_the_own_attention_knows_are_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4}

    assert "BloomForCausalLM" in refusal(tmp_path, SIZES | fields | {"hidden_size": 64})


def test_keys_and_values_of_different_width_are_refused(tmp_path: Path) -> None:
    heads = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    fields = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "moe_intermediate_size": 32}

    assert "differ in shape" in refusal(tmp_path, SIZES | heads | experts | fields)


def test_attention_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    assert "not causal" in refusal(tmp_path, SIZES | {"architectures": ["BertLMHeadModel"], "model_type": "bert"})


@pytest.mark.parametrize(("architecture", "model_type"), [("MambaForCausalLM", "mamba"), ("JambaForCausalLM", "jamba")])
def test_state_space_layers_are_refused(architecture: str, model_type: str, tmp_path: Path) -> None:
    fields = SIZES | {"architectures": [architecture], "model_type": model_type}

    assert "linear_attention" in refusal(tmp_path, fields)


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    fields = SIZES | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "head_dim": 16}

    assert "chunked_attention" in refusal(tmp_path, fields)


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}

    assert "t5" in refusal(tmp_path, fields)


def test_a_config_that_its_own_class_rejects_is_refused_in_one_line(tmp_path: Path) -> None:
    fields = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "mamba_n_heads": 3}

    message = refusal(tmp_path, SIZES | fields)

    assert "bamba cannot be read" in message
    assert "\n" not in message


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "add_cross_attention": True}

    assert "cross-attention" in refusal(tmp_path, fields)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('this ran')")
    fields = {
        "architectures": ["XForCausalLM"],
        "model_type": "x",
        "auto_map": {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    }

    assert "auto_map" in refusal(tmp_path, SIZES | fields)


def test_an_unknown_class_of_a_known_type_is_refused(tmp_path: Path) -> None:
    fields = SIZES | {"architectures": ["LlamaForSomethingElse"], "model_type": "llama"}

    assert "LlamaForSomethingElse" in refusal(tmp_path, fields)


def test_a_rotation_that_depends_on_the_batch_is_limited_in_length(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 10000.0}
    fields = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": rope}

    model = load_dummy(tmp_path, SIZES | fields | {"original_max_position_embeddings": 128})

    assert model.max_model_len == 128


def test_dummy_weights_follow_the_seed_and_leave_the_generator_alone(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    before = torch.get_rng_state()

    one, again, other = (load(tmp_path, "dummy", seed=seed) for seed in (1, 1, 2))

    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fingerprint_is_of_the_content_not_of_the_folder(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = load(tmp_path / "one").fingerprint
    assert load(tmp_path / "two").fingerprint == first

    tensors = load_file(tmp_path / "two" / "model.safetensors")
    next(iter(tensors.values())).flatten()[3].add_(0.1)
    save_file(tensors, tmp_path / "two" / "model.safetensors", {"format": "pt"})

    assert load(tmp_path / "two").fingerprint != first


def test_weights_survive_a_change_of_their_file(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    model = load(tmp_path)
    before = PagedRun(model, 1, 16).prefill(torch.arange(3, 13), 10)

    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(20_000)
        file.write(b"\x11" * 200_000)

    assert torch.equal(PagedRun(model, 1, 16).prefill(torch.arange(3, 13), 10), before)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"transformer.h.0.old.bias": torch.ones(1, 1, 8, 8)}, tmp_path / "model.safetensors")

    load(tmp_path)

    assert "transformer.h.0.old.bias" in caplog.text


@pytest.mark.parametrize("change", ["missing", "shape", "truncated"])
def test_broken_weights_are_refused_by_tensor_or_file(change: str, tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    path, name = tmp_path / "model.safetensors", "transformer.h.1.mlp.c_fc.weight"
    tensors: dict[str, Tensor] = load_file(path)
    match change:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = torch.zeros(3, 5)
        case _:
            name = "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ConfigError) as caught:
        load(tmp_path)

    assert name in str(caught.value)


class Echo:
    """An attention that returns its query and keeps its arguments."""

    def __init__(self) -> None:
        self.asked: list[AttentionParams] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        self.asked.append(params)
        return query


class Layer(nn.Module):
    layer_idx = 1
    is_causal = True


def call(module: nn.Module, mask: Tensor | None = None, **keywords: object) -> Tensor:
    query, key = torch.arange(4 * 3 * 8.0).view(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    return paged_attention(module, query, key, key, mask, **keywords)[0]  # type: ignore[arg-type]


def joined(attention: Echo) -> Layer:
    module, bridge = Layer(), Bridge(attention)
    bridge.attach(module)
    bridge.enter(torch.zeros(2, 2, 16, 2, 16), SimpleNamespace())  # type: ignore[arg-type]
    return module


def test_every_known_keyword_reaches_the_backend() -> None:
    attention, sinks = Echo(), torch.zeros(4)

    out = call(joined(attention), scaling=0.5, sliding_window=9, softcap=30.0, s_aux=sinks, position_ids=torch.ones(1))

    assert attention.asked == [AttentionParams(scale=0.5, window=9, softcap=30.0, sinks=sinks)]
    assert torch.equal(out, torch.arange(4 * 3 * 8.0).view(1, 4, 3, 8).transpose(1, 2))


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "unknown keyword position_bias"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "its own attention mask"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_unsupported_attention_is_rejected(keywords: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        call(joined(Echo()), **keywords)  # type: ignore[arg-type]


def test_a_layer_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer_idx"):
        call(nn.Linear(1, 1))


def test_a_call_outside_of_a_forward_is_a_broken_invariant() -> None:
    module = Layer()
    Bridge(Echo()).attach(module)

    with pytest.raises(InvariantError):
        call(module)
