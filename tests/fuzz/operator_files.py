"""Fuzz targets: files that an operator writes, and files of a model."""

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

from tests.fuzz.mutator import mutate_bytes, mutate_json, mutator_of
from tests.fuzz.target import Target
from tiercel.embedded import MODEL_DIR
from tiercel.engine.measure.split_search import open_splits_file
from tiercel.engine.models.config import ConfigFields, choose_dtype, parse_decoder, read_architecture, read_config
from tiercel.engine.models.generation import read_end_tokens
from tiercel.engine.models.quantization_scheme import read_scheme
from tiercel.engine.models.weights import open_checkpoint, stream_tensors
from tiercel.server.api.generation_config import load_sampling_defaults
from tiercel.server.tenancy.operator_document import DocumentError, read_json, read_yaml
from tiercel.server.tenancy.tenant_file import load_tenant_file, read_tenants
from tiercel.server.text.tokenizer import load_text_codec
from tiercel.settings.config import resolve
from tiercel.values.errors import ConfigError

_TENANTS = b"""
admin_key: boss
secret: "a secret of the operator"
tenants:
  - {name: anna, key: one, weight: 3, slo: {ttft_s: 1.0, tbt_s: 0.001}}
  - name: berta
    keys: [two, three]
    requests_per_minute: 3
    kv_quota_bytes: {hbm: 1G, ddr: 2G}
    priority: low
"""
_SETTINGS = b"""
port = 8001
max-num-seqs = 8
kv-disk-size = "64M"
api-key = ["a", "b"]
enable-prefix-caching = false
override-generation-config = {temperature = 0.5}
"""
_JSON = mutator_of(mutate_json, mutate_json, mutate_bytes)


def _in_folder(
    read: Callable[[Path], object], name: str, beside: dict[str, bytes] | None = None
) -> Callable[[bytes, random.Random], object]:
    """Return a parser that writes its input to a file of a new folder, beside other files, and reads the folder."""

    def parse(text: bytes, rng: random.Random) -> object:
        with tempfile.TemporaryDirectory() as folder:
            for other, content in (beside or {}).items():
                (Path(folder) / other).write_bytes(content)
            path = Path(folder) / name
            path.write_bytes(text)
            path.chmod(0o600)
            return read(Path(folder))

    return parse


_MIXTURE_CONFIG = b"""{"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 256, "hidden_size": 64,
"intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": true, "clip_qkv": null,
"decoder_sparse_step": 2, "mlp_only_layers": [1], "use_sliding_window": true, "sliding_window": 32}"""


def _read_model_config(folder: Path) -> None:
    fields = read_config(folder)
    read_architecture(fields)
    choose_dtype("auto", fields)
    parse_decoder(fields)


def _read_quantization(text: bytes, rng: random.Random) -> None:
    """Read a scheme, and ask it for the tensors of layers of several sizes."""
    value = read_json(text)
    if not isinstance(value, dict):
        return
    scheme = read_scheme(ConfigFields(value, "quantization_config"))
    assert scheme.identity and str(scheme)
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.3.down_proj", "lm_head"):
        form = scheme.layer(layer)
        if form is not None:
            form.tensors(layer, 128, 256)
            assert form.stored_bytes(128, 256) > 0


def _read_generation(folder: Path) -> None:
    load_sampling_defaults(folder, "auto", {})
    read_end_tokens(folder)


def _read_weights(folder: Path) -> None:
    for _, _, tensor in stream_tensors(open_checkpoint(folder)):
        tensor.numel()


def _mutate_safetensors(rng: random.Random, text: bytes) -> bytes:
    """Change the header and keep its length right, or change any bytes."""
    length = int.from_bytes(text[:8], "little")
    if rng.random() < 0.3 or not 0 < length <= len(text) - 8:
        return mutate_bytes(rng, text)
    header = mutate_json(rng, text[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + text[8 + length :]


_WEIGHTS = save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, metadata={"format": "pt"})
_INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "model-1-of-1.safetensors", "b": "model-1-of-1.safetensors"}})
_SPLITS = json.dumps({"identity": open_splits_file("/", {"model": "x"}).identity, "rows": []}).encode()


def _splits(folder: Path) -> object:
    file = open_splits_file(str(folder), {"model": "x"})
    assert file.path is not None
    (folder / "file").rename(file.path)
    return file.read()


_WEIGHTS_ARGS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64}
_INPUTS_ARGS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_BLOCKS_ARGS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
_QUANTIZATION = tuple(
    json.dumps(config).encode()
    for config in (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": _WEIGHTS_ARGS, "format": "pack-quantized"},
                "group_1": {"targets": ["re:.*down_proj"], "weights": _BLOCKS_ARGS, "input_activations": _INPUTS_ARGS},
            },
            "format": "mixed-precision",
            "ignore": ["lm_head", "re:.*gate$"],
        },
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "modules_to_not_convert": ["gate"]},
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "dynamic": {"-:.*up": {}, "x": {"bits": 4}},
         "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]], "checkpoint_format": "gptq_v2"},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
    )
)  # fmt: skip

TARGETS = (
    Target("tenants_file", (_TENANTS,), _in_folder(lambda folder: load_tenant_file(folder / "file"), "file"),
           (ConfigError,)),
    Target("tenants_document", (json.dumps({"tenants": [{"name": "anna", "key": "one", "weight": 2}]}).encode(),),
           lambda text, rng: read_tenants(read_json(text), "request"), (ConfigError, DocumentError), _JSON),
    Target("yaml", (_TENANTS, b"a: [1, 2.5, {b: null}]\n"), lambda text, rng: read_yaml(text), (DocumentError,)),
    Target("settings_file", (_SETTINGS,),
           _in_folder(lambda folder: resolve({"config": str(folder / "file.toml")}), "file.toml"), (ConfigError,)),
    Target("model_config", ((MODEL_DIR / "config.json").read_bytes(), _MIXTURE_CONFIG),
           _in_folder(_read_model_config, "config.json"), (ConfigError,), _JSON),
    Target("quantization_config", _QUANTIZATION, _read_quantization, (ConfigError, DocumentError), _JSON),
    Target("generation_config",
           (b'{"temperature": 0.7, "top_k": 20, "eos_token_id": [1, 2], "max_new_tokens": 9}',),
           _in_folder(_read_generation, "generation_config.json"), (ConfigError,), _JSON),
    Target("tokenizer_config", ((MODEL_DIR / "tokenizer_config.json").read_bytes(),),
           _in_folder(load_text_codec, "tokenizer_config.json",
                      {"tokenizer.json": (MODEL_DIR / "tokenizer.json").read_bytes()}), (ConfigError,), _JSON),
    Target("tokenizer", ((MODEL_DIR / "tokenizer.json").read_bytes(),),
           _in_folder(load_text_codec, "tokenizer.json", {"tokenizer_config.json": b"{}"}), (ConfigError,), _JSON),
    Target("safetensors", (_WEIGHTS,), _in_folder(_read_weights, "model.safetensors"), (ConfigError,),
           _mutate_safetensors),
    Target("weights_index", (_INDEX.encode(),),
           _in_folder(_read_weights, "model.safetensors.index.json", {"model-1-of-1.safetensors": _WEIGHTS}),
           (ConfigError,), _JSON),
    Target("measurements", (_SPLITS,), _in_folder(_splits, "file"), (), _JSON),
)  # fmt: skip
