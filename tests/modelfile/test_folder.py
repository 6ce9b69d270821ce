"""GGUF files as folders: what is written where, once, and which files are refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.modelfile.written import BUILDERS, TOKENS, add_tokens, finish, write_model
from tiercel.engine.models.weights import open_checkpoint
from tiercel.modelfile.checkpoint import resolve_model_folder
from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.folder import unfold_model
from tiercel.values.errors import ConfigError


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", BUILDERS)
def test_the_configuration_is_that_of_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    expected = write_model(tmp_path / "a.gguf", family, "F16").config
    folder = unfold_model(tmp_path / "a.gguf", tmp_path / "cache")
    found = AutoConfig.from_pretrained(folder)
    assert found.model_type == ("llama" if family == "mistral" else expected.model_type)
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "bos_token_id"),
    ):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert config_of(folder)["dtype"] == "float16"
    for name, value in expected.rope_parameters.items():
        if isinstance(value, float | int):
            assert found.rope_parameters[name] == pytest.approx(value), name
        else:
            assert found.rope_parameters[name] == value, name


def test_the_types_of_blocks_are_listed_by_layer(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", "qwen2", "Q8_0", others={"down_proj": "F16", "embed_tokens": "Q4_0"})
    layers = config_of(unfold_model(tmp_path / "a.gguf", tmp_path / "cache"))["quantization_config"]["layers"]
    assert layers["Q4_0"] == ["model.embed_tokens"]
    assert len(layers["Q8_0"]) == 2 * 6  # all but the last matrix of each layer; biases and norms are not listed
    assert "model.layers.1.self_attn.q_proj" in layers["Q8_0"]


def test_the_folder_has_a_tokenizer_and_a_template(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", "llama", "F32")
    folder = unfold_model(tmp_path / "a.gguf", tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abcdx")) == ["abcd", "x"]
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<s>", "</s>", len(TOKENS))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2]}


def test_a_file_is_unfolded_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.gguf", tmp_path / "cache"
    write_model(path, "llama", "F32")
    first = unfold_model(path, cache)
    (first / "config.json").write_text("{}")  # would be written again
    assert unfold_model(path, cache) == first
    assert config_of(first) == {}
    write_model(path, "qwen2", "F32")
    os.utime(path, ns=(1, 1))
    second = unfold_model(path, cache)
    assert second != first
    assert config_of(second)["model_type"] == "qwen2"
    assert {entry.name for entry in cache.iterdir()} == {first.name, second.name}  # nothing half-written is left


def test_a_file_that_has_changed_is_not_read_by_the_configuration_of_the_old_one(tmp_path: Path) -> None:
    """As by an engine that starts again: its folder is the one of the first start."""
    path = tmp_path / "a.gguf"
    write_model(path, "llama", "F32")
    folder = unfold_model(path, tmp_path / "cache")
    assert open_checkpoint(folder).shards
    write_model(tmp_path / "b.gguf", "mistral", "F32")
    os.replace(tmp_path / "b.gguf", path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"a\.gguf: is not the file that this folder was made of"):
        open_checkpoint(folder)
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(path, own / "model.gguf")
    with pytest.raises(ConfigError, match="serve the file itself"):
        open_checkpoint(own)


def test_the_name_of_a_file_is_the_name_of_a_model(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", "llama", "F32")
    folder = resolve_model_folder(str(tmp_path / "a.gguf"), None, str(tmp_path / "cache"))
    assert (folder / "model.gguf").resolve() == (tmp_path / "a.gguf").resolve()
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        resolve_model_folder(str(tmp_path / "a.gguf"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", "llama", "F32")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelFileError, match=r"cache: the files of .* cannot be written: .*; set XDG_CACHE_HOME"):
        unfold_model(tmp_path / "a.gguf", tmp_path / "cache")


# ---- errors

Change = Callable[[gguf.GGUFWriter], None]


def with_tensor(name: str, *shape: int) -> Change:
    return lambda writer: writer.add_tensor(name, np.ones(shape, dtype=np.float32))


WRONG: dict[str, tuple[Change, str]] = {
    "another architecture": (lambda w: w.add_string("general.architecture", "mamba"), "mamba is not supported"),
    "experts": (lambda w: w.add_uint32("llama.expert_count", 8), "metadata llama.expert_count: is not supported"),
    "no layers": (lambda w: w.add_uint32("llama.block_count", 0), "llama.block_count: must be from 1 to 10,000, not 0"),
    "layers that differ": (
        lambda w: w.add_array("llama.attention.head_count_kv", [1, 2]),
        "head_count_kv: layers that differ in it are not supported",
    ),
    "a partial rotation": (
        lambda w: w.add_uint32("llama.rope.dimension_count", 16),
        "llama.rope.dimension_count: must be 64, the size of a head",
    ),
    "values of another size": (
        lambda w: w.add_uint32("llama.attention.value_length", 16),
        "llama.attention.value_length: must be that of keys",
    ),
    "a rotation that is unknown": (
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        "llama.rope.scaling.type: longrope is not supported; known: none, linear, yarn",
    ),
    "an epsilon of zero": (
        lambda w: w.add_float32("llama.attention.layer_norm_rms_epsilon", 0.0),
        "layer_norm_rms_epsilon: must be a number above 0, not 0.0",
    ),
    "a part of a model": (
        lambda w: w.add_uint16("split.count", 3),
        "split.count: one of several parts; merge",
    ),
    "an unknown tensor": (
        with_tensor("blk.0.ssm_in.weight", 4, 4),
        "tensor blk.0.ssm_in.weight: this architecture has no",
    ),
    "factors of another formula": (with_tensor("rope_freqs.weight", 32), "rope_freqs.weight: factor"),
    "factors of another size": (
        with_tensor("rope_freqs.weight", 7),
        "rope_freqs.weight: F32, shape [7], expected F32, shape [32]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    change, words = WRONG[name]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add_tokens(writer)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    (entries,) = writer.kv_data
    kept = dict(entries)
    entries.clear()
    change(writer)
    entries.update({key: value for key, value in kept.items() if key not in entries})
    if name == "factors of another formula":
        writer.tensors[0]["rope_freqs.weight"].tensor[:] = np.linspace(1, 9, 32)
    finish(writer)
    with pytest.raises(ModelFileError) as caught:
        unfold_model(tmp_path / "a.gguf", tmp_path / "cache")
    assert str(caught.value).startswith(f"{tmp_path / 'a.gguf'}: ")
    assert words in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_the_command_line_gets_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"a\.gguf: not a whole GGUF file"):
        resolve_model_folder(str(tmp_path / "a.gguf"), None, str(tmp_path / "cache"))
