"""Quantised checkpoints: the logits of the dequantised model in transformers, for every format."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from transformers import PreTrainedModel

from tests.conformance.models import Family
from tests.conformance.quantized import (
    awq,
    compress,
    compressed_config,
    fp8,
    gptq,
    gptq_config,
    write_quantized,
)
from tests.engine.models.paged_run import PagedRun
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.models.base import Model
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantization_scheme import choose_scheme
from tiercel.engine.models.registry import load_model
from tiercel.engine.models.triton_ops import TritonOps
from tiercel.engine.models.weights import ContentDigest, load_weights, open_checkpoint
from tiercel.engine.native.library import find_library
from tiercel.settings.settings import Dtype, EngineSettings

CPU = torch.device("cpu")
LENGTH = 40  # tokens
SHORT = 12  # tokens for kernels in the interpreter
MOST_ROUNDING = 1.5  # of that of transformers
Make = Callable[[Path, Family, int], PreTrainedModel]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, dtype: Dtype = "float32") -> Model:
    return load_model(EngineSettings(model=str(folder), dtype=dtype), CPU, SdpaAttention())


def difference_of(
    reference: PreTrainedModel, model: Model, seed: int, tokens: int = 250, length: int = LENGTH
) -> float:
    """Return the largest difference between two logits of the models."""
    drawn = draw_tokens(seed, tokens, length)
    return float((logits_of(model, drawn) - logits_of_reference(reference, drawn)).abs().max())


def relative_difference_of(reference: PreTrainedModel, model: Model, seed: int) -> float:
    """Return the norm of all differences over that of the logits."""
    drawn = draw_tokens(seed, 250)
    expected = logits_of_reference(reference, drawn)
    return float((logits_of(model, drawn) - expected).norm() / expected.norm())


def rounding_over_transformers(
    reference: PreTrainedModel, model: Model, dtype: torch.dtype, seed: int, tokens: int = 250
) -> float:
    """Return how much more than transformers a model of 16 bits rounds; `reference` has float32 and has `dtype` after.

    Both are compared with the logits of float32, by the norm of all differences: what 16 bits lose depends on the
    weights that were drawn, so a bound on it alone is too wide for some models and too narrow for others.
    """
    drawn = draw_tokens(seed, tokens)
    exact = logits_of_reference(reference, drawn)
    lost = logits_of_reference(reference.to(dtype), drawn) - exact
    return float((logits_of(model, drawn) - exact).norm() / lost.norm())


def draw_tokens(seed: int, tokens: int = 250, length: int = LENGTH) -> Tensor:
    return torch.randint(3, tokens, (length,), generator=torch.Generator().manual_seed(seed))


def logits_of_reference(reference: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return reference(tokens[None]).logits[0].float()


def logits_of(model: Model, tokens: Tensor) -> Tensor:
    return PagedRun(model, 1, LENGTH).prefill(tokens, min(17, len(tokens) // 2)).float()


def ints(bits: int, group: int | None, is_symmetric: bool = True) -> QuantizationArgs:
    strategy = "channel" if group is None else "group"
    return QuantizationArgs(num_bits=bits, type="int", symmetric=is_symmetric, strategy=strategy, group_size=group)


def compressed(args: QuantizationArgs, storage: str) -> Make:
    config = compressed_config(args, storage)
    return lambda folder, family, seed: write_quantized(folder, compress(args, storage), config, family, seed)


def packed_gptq(bits: int, group: int, is_symmetric: bool, version: int = 1, has_order: bool = False) -> Make:
    more: dict[str, object] = {"desc_act": has_order}
    if version == 2:
        more["checkpoint_format"] = "gptq_v2"
    config = gptq_config(bits, group, is_symmetric, **more)
    write = gptq(bits, group, is_symmetric, version, has_order)
    return lambda folder, family, seed: write_quantized(folder, write, config, family, seed)


def packed_awq(group: int) -> Make:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return lambda folder, family, seed: write_quantized(folder, awq(group), config, family, seed)


WEIGHT_ONLY: dict[str, tuple[Make, Family]] = {
    "pack-quantized int4 groups": (compressed(ints(4, 32), "pack-quantized"), "llama3"),
    "pack-quantized int4 channel": (compressed(ints(4, None), "pack-quantized"), "qwen3"),
    "pack-quantized int4 zero points": (compressed(ints(4, 32, False), "pack-quantized"), "qwen2"),
    "pack-quantized int8 groups": (compressed(ints(8, 16), "pack-quantized"), "qwen3"),
    "pack-quantized int8 zero points": (compressed(ints(8, None, False), "pack-quantized"), "llama3"),
    "naive-quantized int8": (compressed(ints(8, None), "naive-quantized"), "qwen2"),
    "naive-quantized int8 zero points": (compressed(ints(8, 64, False), "naive-quantized"), "llama3"),
    "naive-quantized int4": (compressed(ints(4, 32), "naive-quantized"), "llama3"),
    "naive-quantized fp8": (compressed(QuantizationArgs(type="float", strategy="channel"), "naive-quantized"), "qwen3"),
    "awq": (packed_awq(32), "qwen2"),
    "gptq int4": (packed_gptq(4, 32, True), "llama3"),
    "gptq int4 zero points": (packed_gptq(4, 32, False), "qwen2"),
    "gptq int4 version 2": (packed_gptq(4, 64, False, version=2), "qwen3"),
    "gptq int4 desc_act": (packed_gptq(4, 16, True, has_order=True), "qwen3"),
    "gptq int8 desc_act": (packed_gptq(8, 32, False, has_order=True), "llama3"),
    "gptq int8 channel": (packed_gptq(8, -1, True), "llama3"),
}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.sampled(8)
def test_weights_alone_give_the_logits_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    make, family = WEIGHT_ONLY[name]
    seed = fresh_seeds(1)[0]
    reference = make(tmp_path, family, seed)

    assert difference_of(reference, load(tmp_path), seed) < 1e-3, f"seed {seed}"

    rounding = rounding_over_transformers(reference, load(tmp_path, "bfloat16"), torch.bfloat16, seed)
    assert rounding < MOST_ROUNDING, f"seed {seed}"


NATIVE = (
    *("pack-quantized int4 groups", "pack-quantized int4 zero points", "pack-quantized int8 groups", "awq"),
    *("naive-quantized int8", "naive-quantized fp8", "gptq int4 desc_act", "gptq int8 channel"),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.sampled(8)
def test_native_kernels_give_the_logits_of_the_dequantised_model(name: str, dtype: Dtype, tmp_path: Path) -> None:
    library = find_library()
    if isinstance(library, str):
        pytest.skip(library)
    make, family = WEIGHT_ONLY[name]
    seed = fresh_seeds(1)[0]
    reference = make(tmp_path, family, seed)
    settings = EngineSettings(model=str(tmp_path), dtype=dtype)

    model = load_model(settings, CPU, open_attention("native", CPU), library=library)

    rounding = rounding_over_transformers(reference, model, getattr(torch, dtype), seed)
    assert rounding < MOST_ROUNDING, f"seed {seed}"
    assert model.products == "native"


def load_on_device(folder: Path, dtype: torch.dtype) -> Decoder:
    """Return the model with the operators of a GPU, in Triton's interpreter."""
    fields = read_config(folder)
    precision = replace(Precision.of(dtype), scheme=choose_scheme("auto", fields))
    model = Decoder(parse_decoder(fields), TritonOps(TritonAttention(4)), precision, CPU)
    load_weights(dict(model.targets()), open_checkpoint(folder), ContentDigest(), None)
    model.pack()
    assert model.products.startswith("Triton")
    return model


@pytest.mark.parametrize("name", fast_and_slow(("pack-quantized int4 zero points",), ("awq", "gptq int4 desc_act")))
def test_kernels_of_a_gpu_give_the_logits_of_the_dequantised_model(name: object, tmp_path: Path) -> None:
    make, family = WEIGHT_ONLY[str(name)]
    seed = fresh_seeds(1)[0]
    reference = make(tmp_path, family, seed)

    assert difference_of(reference, load_on_device(tmp_path, torch.float32), seed, length=SHORT) < 1e-3, f"seed {seed}"


def to_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def to_fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def to_fp8_groups(size: int) -> Callable[[Tensor], Tensor]:
    return lambda x: to_fp8(x.unflatten(-1, (-1, size))).flatten(-2)


def to_scaled(scale: float, kind: str) -> Callable[[Tensor], Tensor]:
    if kind == "int8":
        return lambda x: torch.round(x / scale).clamp(-128, 127) * scale
    return lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def token(kind: str) -> QuantizationArgs:
    return QuantizationArgs(type=kind, strategy="token", dynamic=True)


def static(kind: str) -> QuantizationArgs:
    return QuantizationArgs(type=kind, strategy="tensor", dynamic=False)


def rounded(
    args: QuantizationArgs, storage: str, inputs: QuantizationArgs, rounding: Callable[[Tensor], Tensor]
) -> Make:
    config = compressed_config(args, storage, inputs)
    write = compress(args, storage, inputs)
    return lambda folder, family, seed: write_quantized(folder, write, config, family, seed, rounding)


def stored_fp8(
    config: dict[str, object], rounding: Callable[[Tensor], Tensor], block: tuple[int, int] | None = None, **how: bool
) -> Make:
    given = {"quant_method": "fp8"} | config
    return lambda folder, family, seed: write_quantized(folder, fp8(block, **how), given, family, seed, rounding)


FLOAT8 = QuantizationArgs(type="float", strategy="channel")
BLOCKS = QuantizationArgs(type="float", strategy="block", block_structure=[16, 32])
GROUPED = QuantizationArgs(type="float", strategy="group", group_size=32, dynamic=True)

WITH_ACTIVATIONS: dict[str, tuple[Make, Family]] = {
    "int-quantized per token": (rounded(ints(8, None), "int-quantized", token("int"), to_int8), "llama3"),
    "int-quantized static": (
        rounded(ints(8, None), "int-quantized", static("int"), to_scaled(0.05, "int8")),
        "qwen3",
    ),
    "int-quantized one scale": (
        rounded(QuantizationArgs(strategy="tensor"), "int-quantized", token("int"), to_int8),
        "qwen2",
    ),
    "pack-quantized int4, int8 inputs": (rounded(ints(4, 32), "pack-quantized", token("int"), to_int8), "qwen2"),
    "float-quantized per token": (rounded(FLOAT8, "float-quantized", token("float"), to_fp8), "qwen2"),
    "float-quantized static": (
        rounded(
            QuantizationArgs(type="float", strategy="tensor"),
            *("float-quantized", static("float"), to_scaled(0.05, "fp8")),
        ),
        "llama3",
    ),
    "float-quantized blocks": (rounded(BLOCKS, "float-quantized", GROUPED, to_fp8_groups(32)), "qwen3"),
    "fp8 one scale": (stored_fp8({"activation_scheme": "dynamic"}, to_fp8), "llama3"),
    "fp8 per output": (stored_fp8({}, to_fp8, per_output=True), "qwen2"),
    "fp8 static": (stored_fp8({"activation_scheme": "static"}, to_scaled(0.01, "fp8"), is_static=True), "qwen3"),
    "fp8 blocks": (stored_fp8({"weight_block_size": [24, 32]}, to_fp8_groups(32), (24, 32)), "qwen3"),
}


ROUNDED_ON_DEVICE = fast_and_slow(
    (("int-quantized per token", True),),
    [(name, True) for name in WITH_ACTIVATIONS if name != "int-quantized per token"],
)


@pytest.mark.parametrize("case", [*((name, False) for name in WITH_ACTIVATIONS), *ROUNDED_ON_DEVICE])
@pytest.mark.sampled(6)
def test_rounded_activations_give_the_logits_of_a_model_that_rounds_the_same_values(
    case: tuple[str, bool], tmp_path: Path
) -> None:
    """A value that lies between two rounded ones may go either way.

    One such value is nearly half of the rounding error of a product, and of all tokens after it if it comes early. So
    the bound is on the mean of the differences, and the best of three models counts: a wrong rounding fails for all.
    """
    share_by_seed: dict[int, float] = {}
    for seed in fresh_seeds(3):
        share_by_seed[seed] = rounded_difference(*case, seed, tmp_path)
        if share_by_seed[seed] < 0.2:
            return
    pytest.fail(f"differences over the effect of rounding, by seed: {share_by_seed}")


def rounded_difference(name: str, is_on_device: bool, seed: int, tmp_path: Path) -> float:
    """Return the mean difference from a model that rounds the same values, over the effect of rounding."""
    make, family = WITH_ACTIVATIONS[name]
    folder = tmp_path / str(seed)
    folder.mkdir()
    reference = make(folder, family, seed)
    tokens = draw_tokens(seed, length=SHORT if is_on_device else LENGTH)
    expected = logits_of_reference(reference, tokens)
    for module in reference.modules():
        module._forward_pre_hooks.clear()
    without = logits_of_reference(reference, tokens)

    model = load_on_device(folder, torch.float32) if is_on_device else load(folder)

    found = logits_of(model, tokens)

    return float((found - expected).abs().mean() / (without - expected).abs().mean())
