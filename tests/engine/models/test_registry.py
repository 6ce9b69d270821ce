"""The implementation for each model."""

import json
from pathlib import Path

import pytest
import torch

from tests.conformance.models import make_checkpoint
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.base import Model
from tiercel.engine.models.registry import load_model
from tiercel.settings.settings import Dtype, EngineSettings, ModelImpl
from tiercel.values.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, impl: ModelImpl = "auto", dtype: Dtype = "auto") -> Model:
    settings = EngineSettings(model=str(folder), model_impl=impl, dtype=dtype, load_format="dummy")
    return load_model(settings, CPU, open_attention("auto", CPU))


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("family", "impl", "expected"),
    [
        ("llama3", "auto", "native"),
        ("llama3", "native", "native"),
        ("llama3", "transformers", "transformers"),
        ("gpt2", "auto", "transformers"),
        ("gpt2", "transformers", "transformers"),
    ],
)
def test_the_operator_chooses_the_implementation(family: str, impl: ModelImpl, expected: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)  # type: ignore[arg-type]

    assert load(tmp_path, impl).impl == expected


def test_native_is_rejected_for_unsupported_models(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)

    with pytest.raises(ConfigError, match="GPT2LMHeadModel is not supported by the native decoder"):
        load(tmp_path, "native")


def test_auto_leaves_a_native_family_with_an_unusual_rotation_to_transformers(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    change(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})

    model = load(tmp_path)

    assert model.impl == "transformers"
    assert model.max_model_len == 1024


def test_auto_does_not_hide_a_wrong_field_behind_the_other_implementation(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    change(tmp_path, num_key_value_heads=3)

    with pytest.raises(ConfigError, match="num_attention_heads"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_computes_in_the_requested_dtype(family: str, dtype: Dtype, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)  # type: ignore[arg-type]

    assert load(tmp_path, dtype=dtype).precision.weights == getattr(torch, dtype)


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
@pytest.mark.parametrize("field", ["quantization_config", "vision_config"])
def test_foreign_models_are_refused_by_every_implementation(family: str, field: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)  # type: ignore[arg-type]
    change(tmp_path, **{field: {"any": 1}})

    for impl in ("auto", "native", "transformers"):
        with pytest.raises(ConfigError, match=field):
            load(tmp_path, impl)
