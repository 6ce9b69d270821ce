"""The configuration of a model, from the metadata of its GGUF file, as config.json of a Hugging Face folder has it.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.fields import MetadataFields
from tiercel.modelfile.header import FileTensor, ModelFile
from tiercel.modelfile.tensor_names import ROPE_FACTORS, names_in_folder


@dataclass(frozen=True, slots=True)
class FileFamily:
    """An architecture of GGUF files.

    model_class:   the class of transformers that computes the same
    model_type:    its name in config.json
    permutes_rows: whether rows of queries and keys are in another order; see `FileTensor` readers
    """

    model_class: str
    model_type: str
    permutes_rows: bool = False


FILE_FAMILIES: Mapping[str, FileFamily] = {
    "llama": FileFamily("LlamaForCausalLM", "llama", permutes_rows=True),  # Mistral's models are written as this one
    "qwen2": FileFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": FileFamily("Qwen3ForCausalLM", "qwen3"),
}
"""The architectures that are served, by their name in files."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FOREIGN_KEYS = ("expert_count", "attention.scale", "logit_scale", "embedding_scale", "residual_scale")
_MAX_LAYERS = 10_000


def read_family(file: ModelFile) -> FileFamily:
    """Return the architecture of the file. Errors: ModelFileError naming an unknown one."""
    name = MetadataFields(file).text("general.architecture")
    if name not in FILE_FAMILIES:
        known = ", ".join(FILE_FAMILIES)
        shown = f"{file.path}: metadata general.architecture: {name:.200} is not supported; known: {known}"
        raise ModelFileError("model.unsupported", shown)
    return FILE_FAMILIES[name]


def model_config(file: ModelFile) -> dict[str, object]:
    """Return the object of config.json. Errors: ModelFileError naming the file, and the key or tensor."""
    family, fields = read_family(file), MetadataFields(file)
    name = fields.text("general.architecture")
    for key in _FOREIGN_KEYS:
        if fields.has(f"{name}.{key}") and file.metadata[f"{name}.{key}"] not in (0, 0.0):
            raise fields.wrong(f"{name}.{key}", "is not supported")
    hidden = fields.count(f"{name}.embedding_length")
    heads = fields.count(f"{name}.attention.head_count")
    head_dim = fields.count(f"{name}.attention.key_length", max(1, hidden // heads))
    if fields.count(f"{name}.attention.value_length", head_dim) != head_dim:
        raise fields.wrong(f"{name}.attention.value_length", "must be that of keys")
    if fields.count(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise fields.wrong(f"{name}.rope.dimension_count", f"must be {head_dim}, the size of a head")
    if fields.has("split.count") and fields.count("split.count", least=0) > 1:
        raise fields.wrong("split.count", "one of several parts; merge them first, with llama-gguf-split --merge")
    names = names_in_folder(file)
    return {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": fields.count(f"{name}.feed_forward_length"),
        "num_hidden_layers": fields.count(f"{name}.block_count", most=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count(f"{name}.context_length"),
        "rms_norm_eps": fields.positive(f"{name}.attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "use_sliding_window": False,
        "dtype": _dtype_of(file),
        "rope_theta": fields.positive(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, file, name, head_dim),
        "quantization_config": _quantization(file, names),
    }


def _dtype_of(file: ModelFile) -> str:
    """Return the type of the model's numbers: that of its matrices if they have one, else bfloat16."""
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if len(kinds) == 1:
        return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16")
    return "bfloat16"


def _quantization(file: ModelFile, names: Mapping[str, str]) -> dict[str, object] | None:
    """Return the layers by the type of their blocks; None if all numbers are floating-point ones."""
    layers: dict[str, list[str]] = {}
    for name, tensor in file.tensors.items():
        if name in names and not tensor.type.is_float:
            layers.setdefault(tensor.type.name, []).append(names[name].removesuffix(".weight"))
    return {"quant_method": "gguf", "layers": layers} if layers else None


def _rope_scaling(fields: MetadataFields, file: ModelFile, name: str, head_dim: int) -> dict[str, object] | None:
    place = f"{name}.rope.scaling"
    kind = fields.choice(f"{place}.type", ("none", "linear", "yarn"), "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise fields.wrong(f"{place}.type", f"{kind} beside a tensor {ROPE_FACTORS} is not supported")
        return _llama3_scaling(file, file.tensors[ROPE_FACTORS], fields.positive(f"{name}.rope.freq_base"), head_dim)
    if kind == "none":
        return None
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.positive(f"{place}.factor")}
    if kind == "linear":
        return scaling
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if fields.positive(f"{place}.{key}", 1.0) != 1:
            raise fields.wrong(f"{place}.{key}", "only 1 is supported")
    return scaling | {
        "original_max_position_embeddings": fields.count(f"{place}.original_context_length"),
        "beta_fast": fields.positive(f"{place}.yarn_beta_fast", 32.0),
        "beta_slow": fields.positive(f"{place}.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(file: ModelFile, tensor: FileTensor, theta: float, head_dim: int) -> dict[str, object]:
    """Return the scaling of Llama 3.1 and later, of which files have the factor of every frequency.

    Errors: ModelFileError if they are not those of its formula, whose other parameters all its models share.
    """
    half = head_dim // 2
    if tensor.type.name != "F32" or tensor.shape != (half,):
        shown = f"{tensor.type.name}, shape {list(tensor.shape)}, expected F32, shape [{half}]"
        raise ModelFileError("weights.shape", f"{file.path}: tensor {ROPE_FACTORS}: {shown}")
    with file.path.open("rb") as source:
        source.seek(tensor.offset)
        factors = struct.unpack(f"<{half}f", source.read(tensor.nbytes))
    largest = max(factors)
    for index, factor in enumerate(factors):
        expected = _llama3_factor(theta ** (2 * index / head_dim), largest)
        if not math.isclose(factor, expected, rel_tol=1e-3):
            shown = f"factor {index} is {factor:.6g}, by the formula of Llama 3 {expected:.6g}"
            raise ModelFileError(
                "model.unsupported", f"{file.path}: tensor {ROPE_FACTORS}: {shown}; other ones unknown"
            )
    return {"rope_type": "llama3", "factor": largest, **_LLAMA3_ROPE}


def _llama3_factor(period: float, largest: float) -> float:
    """Return by how much the formula divides a frequency of 1 / `period`."""
    low, high, length = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"], 8192
    wave = 2 * math.pi * period
    if wave < length / high:
        return 1.0
    if wave > length / low:
        return largest
    share = (length / wave - low) / (high - low)
    return 1 / ((1 - share) / largest + share)
