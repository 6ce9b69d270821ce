"""Tiny random checkpoints of every tested family, and the same models in transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import transformers
from transformers import PreTrainedModel

Family = Literal[
    "llama3", "llama2", "mistral", "qwen2", "qwen3", "yarn", "qwen3_moe", "mixtral", "olmoe", "gpt2", "gemma3", "phi3"
]
MIXTURES: tuple[Family, ...] = ("qwen3_moe", "mixtral", "olmoe")
DENSE_NATIVE_FAMILIES: tuple[Family, ...] = ("llama3", "llama2", "mistral", "qwen2", "qwen3", "yarn")
NATIVE_FAMILIES = DENSE_NATIVE_FAMILIES + MIXTURES
TRANSFORMERS_FAMILIES: tuple[Family, ...] = ("gpt2", "gemma3", "phi3")
FAMILIES = NATIVE_FAMILIES + TRANSFORMERS_FAMILIES

VOCAB_SIZE = 256
LAYERS = 3
MAX_LENGTH = 1024  # tokens

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}


def _llama3(std: float) -> PreTrainedModel:
    config = transformers.LlamaConfig(**_SIZES, initializer_range=std, rope_parameters=_LLAMA3_ROPE)
    return transformers.LlamaForCausalLM(config)


def _llama2(std: float) -> PreTrainedModel:
    """A model without grouped heads, with all biases and tied embeddings."""
    sizes = _SIZES | {"num_key_value_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, initializer_range=std, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    )
    return transformers.LlamaForCausalLM(config)


def _mistral(std: float) -> PreTrainedModel:
    """A model with a window smaller than the tested contexts, and a separate head_dim."""
    config = transformers.MistralConfig(**_SIZES, initializer_range=std, sliding_window=24, head_dim=32)
    return transformers.MistralForCausalLM(config)


def _qwen2(std: float) -> PreTrainedModel:
    """A model with a window in the last layer only, and tied embeddings."""
    config = transformers.Qwen2Config(
        **_SIZES,
        initializer_range=std,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=2,
    )
    return transformers.Qwen2ForCausalLM(config)


def _qwen3(std: float) -> PreTrainedModel:
    config = transformers.Qwen3Config(**_SIZES, initializer_range=std, head_dim=32)
    return transformers.Qwen3ForCausalLM(config)


def _yarn(std: float) -> PreTrainedModel:
    config = transformers.Qwen2Config(**_SIZES, initializer_range=std, rope_parameters=_YARN_ROPE)
    return transformers.Qwen2ForCausalLM(config)


def _qwen3_moe(std: float) -> PreTrainedModel:
    """A model whose first layer is dense, with experts of their own size and a separate head_dim."""
    config = transformers.Qwen3MoeConfig(
        **_SIZES,
        initializer_range=std,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _mixtral(std: float) -> PreTrainedModel:
    """A model with a window smaller than the tested contexts."""
    config = transformers.MixtralConfig(
        **_SIZES, initializer_range=std, num_local_experts=4, num_experts_per_tok=2, sliding_window=24
    )
    return transformers.MixtralForCausalLM(config)


def _olmoe(std: float) -> PreTrainedModel:
    """A model with tied embeddings and small experts, whose shares do not sum to 1."""
    sizes = _SIZES | {"intermediate_size": 24}
    config = transformers.OlmoeConfig(
        **sizes, initializer_range=std, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True
    )
    return transformers.OlmoeForCausalLM(config)


def _gpt2(std: float) -> PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=LAYERS,
        n_head=4,
        n_positions=MAX_LENGTH,
        initializer_range=std,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def _gemma3(std: float) -> PreTrainedModel:
    """A model with windows in two of three layers, and capped logits."""
    config = transformers.Gemma3TextConfig(
        **_SIZES,
        initializer_range=std,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=24,
        final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


def _phi3(std: float) -> PreTrainedModel:
    config = transformers.Phi3Config(**_SIZES, initializer_range=std, sliding_window=40)
    return transformers.Phi3ForCausalLM(config)


_BUILDERS: dict[Family, Callable[[float], PreTrainedModel]] = {
    "llama3": _llama3,
    "llama2": _llama2,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "yarn": _yarn,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt2": _gpt2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def make_checkpoint(
    family: Family,
    folder: Path,
    seed: int = 0,
    std: float | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    max_length: int = MAX_LENGTH,
) -> PreTrainedModel:
    """Write a tiny random checkpoint into `folder` and return the model.

    `max_length`: tokens that the model may read; GPT-2, which learns its positions, keeps MAX_LENGTH.

    `std` is the deviation of the weights: wide by default (0.1; Gemma 3 multiplies too much for that: 0.02), so that
    attention is far from uniform and a wrong key shows in the logits. Biases are drawn too.
    """
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide = std if std is not None else 0.02 if family == "gemma3" else 0.1
        model = _BUILDERS[family](wide).to(dtype).eval()
        if family != "gpt2":
            model.config.max_position_embeddings = max_length
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if name.endswith("bias"):
                    tensor.normal_(0.0, wide)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    model = type(model).from_pretrained(folder, dtype=dtype)  # loading casts the rotation, too
    if bars:
        transformers.utils.logging.enable_progress_bar()
    return model
