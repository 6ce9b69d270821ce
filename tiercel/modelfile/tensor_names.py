"""The names of tensors: those of a GGUF file, and those of the same tensors in a Hugging Face folder.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

import re
from collections.abc import Mapping

from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.header import ModelFile

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that has no counterpart: it is a part of the configuration."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9][0-9]{0,4})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def folder_name(name: str) -> str | None:
    """Return the name of a file's tensor in a Hugging Face folder; None if there is none for it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_OUTER[part]}.{kind}" if part in _OUTER else None
    return f"model.layers.{layer}.{_INNER[part]}.{kind}" if part in _INNER else None


def names_in_folder(file: ModelFile) -> Mapping[str, str]:
    """Return the name in a folder of every tensor of the file. Errors: ModelFileError naming a tensor without one."""
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        found = folder_name(name)
        if found is None:
            reason = "this architecture has no such tensor"
            raise ModelFileError("weights.extra_tensor", f"{file.path}: tensor {name:.200}: {reason}")
        names[name] = found
    return names
