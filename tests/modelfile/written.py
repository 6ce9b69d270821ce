"""GGUF files of tiny models, written with the `gguf` package, and the same models in transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tiercel.embedded import MODEL_DIR
from tiercel.modelfile.header import BLOCK_TYPES

_NUMBERS_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of 16 bits in blocks that the package cannot write
_SCALES = {"Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 2e-5}  # of these blocks: their numbers are about 0.03
_SIZES: dict[str, Any] = {
    "hidden_size": 256,  # a block of Q4_K
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LETTERS = [chr(code) for code in range(97, 123)]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "ab", "cd", "abcd"]


def _llama(**more: Any) -> Callable[[int], PreTrainedModel]:
    return lambda size: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=size, **(_SIZES | more)))


BUILDERS: Mapping[str, Callable[[int], PreTrainedModel]] = {
    "llama": _llama(),
    "llama tied, with biases": _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama 3 rope": _llama(rope_parameters=_LLAMA3_ROPE, head_dim=128),
    "llama yarn": _llama(rope_parameters=_YARN_ROPE),
    "llama linear": _llama(rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}),
    "mistral": lambda size: transformers.MistralForCausalLM(
        transformers.MistralConfig(vocab_size=size, sliding_window=None, head_dim=128, **_SIZES)
    ),
    "qwen2": lambda size: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=size, tie_word_embeddings=True, **_SIZES)
    ),
    "qwen3": lambda size: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(vocab_size=size, head_dim=128, **_SIZES)
    ),
}
"""Models by family: each is built with a size of the vocabulary."""


def write_model(
    path: Path, family: str, kind: str, seed: int = 0, others: Mapping[str, str] | None = None
) -> PreTrainedModel:
    """Write a model whose matrices have blocks of this kind. Return what the file means, in transformers and float32.

    `others`: kinds of matrices, by the last part of their layer's name.
    """
    torch.manual_seed(seed)
    model = BUILDERS[family](len(TOKENS)).float().eval()
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in own else 0.0, 0.1)
    name = {"mistral": "llama"}.get(family, family.split()[0])
    writer = gguf.GGUFWriter(path, name)
    add_tokens(writer)
    _write(writer, model, name, kind, np.random.default_rng(seed), others)
    return model


def write_embedded(path: Path, kind: str) -> None:
    """Write the embedded model."""
    folder = Path(MODEL_DIR)
    writer = gguf.GGUFWriter(path, "llama")
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {entry["id"] for entry in spec["added_tokens"] if entry["special"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_eos_token_id(2)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_chat_template(config["chat_template"])
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _write(writer, model, "llama", kind, np.random.default_rng(0), None)


def _write(
    writer: gguf.GGUFWriter,
    model: PreTrainedModel,
    name: str,
    kind: str,
    numbers: np.random.Generator,
    others: Mapping[str, str] | None,
) -> None:
    """Write configuration and weights, and give the model the weights that the file means."""
    _add_config(writer, model)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), model.config.num_hidden_layers)
    with torch.no_grad():
        for own, parameter in model.named_parameters():  # a head that is the embedding is not among them
            layer, ending = own.rsplit(".", 1)
            heads = _heads_of(own, model) if name == "llama" else 0
            stored = _pairs(parameter, heads) if heads else parameter
            chosen = (others or {}).get(layer.rsplit(".", 1)[-1], kind)
            asked = Kind[chosen] if parameter.dim() > 1 else Kind.F32
            raw, meant = _blocks(stored.numpy(), asked, numbers)
            writer.add_tensor(f"{names.get_name(layer)}.{ending}", raw, raw_dtype=asked)
            parameter.copy_(_halves(meant, heads) if heads else meant)
    _add_factors(writer, model)
    finish(writer)


def add_tokens(writer: gguf.GGUFWriter) -> None:
    """Add a tokenizer of letters."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_factors(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Add what each frequency of Llama 3 is divided by, from transformers' function for it."""
    rope = model.config.rope_parameters
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
        head_dim = model.config.head_dim
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))


def _blocks(weight: np.ndarray, kind: Kind, numbers: np.random.Generator) -> tuple[np.ndarray, Tensor]:
    """Return the blocks of a weight, and what they mean. Blocks that the package cannot write are random ones."""
    if kind == Kind.F32:
        return weight.copy(), torch.from_numpy(weight.copy())
    if kind.name not in _NUMBERS_AT:
        raw = gguf.quantize(weight, kind)
        return raw, torch.from_numpy(gguf.dequantize(raw, kind).astype(np.float32))
    block = BLOCK_TYPES[kind.value]
    raw = numbers.integers(0, 256, (weight.size // block.numbers, block.nbytes), dtype=np.uint8)
    for place in _NUMBERS_AT[kind.name]:
        scales = numbers.normal(0, _SCALES[kind.name], (len(raw), 1)).astype(np.float16)
        raw[:, place : place + 2] = scales.view(np.uint8)
    raw = raw.reshape(weight.shape[0], -1)
    return raw, torch.from_numpy(gguf.dequantize(raw, kind).copy())


def _heads_of(name: str, model: PreTrainedModel) -> int:
    """Return the heads of a tensor whose rows files of the architecture `llama` have in another order; else 0."""
    if ".q_proj." in name:
        return model.config.num_attention_heads
    return model.config.num_key_value_heads if ".k_proj." in name else 0


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Return the rows in the file's order; llama.cpp's converter calls it `permute`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Return the rows in transformers' order."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
