"""Quantised weights: reading configurations and tensors, joining layers, rounding at load, memory, errors."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.models import make_checkpoint
from tests.conformance.quantized import (
    awq,
    changed,
    compress,
    compressed_config,
    fp8,
    gptq,
    gptq_config,
    write_quantized,
)
from tests.engine.models.paged_run import PagedRun
from tests.seeds import fresh_seeds
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.activation_rounding import quantize_weight, round_activations
from tiercel.engine.models.base import Model
from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.quantization_scheme import choose_scheme, read_scheme
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.engine.models.registry import load_model
from tiercel.settings.settings import SETTINGS, EngineSettings
from tiercel.values.errors import ConfigError

CPU = torch.device("cpu")
SEEDS = [1, *fresh_seeds(2)]
INT4 = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
PACKED = compressed_config(INT4, "pack-quantized")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, **settings: object) -> Model:
    given = EngineSettings(model=str(folder), **({"dtype": "float32"} | settings))  # type: ignore[arg-type]
    return load_model(given, CPU, SdpaAttention())


def logits(model: Model) -> Tensor:
    return PagedRun(model, 1, 32).prefill(torch.arange(3, 33), 13)


def refusal(folder: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)
    return str(caught.value)


def scheme_refusal(config: Mapping[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_scheme(ConfigFields(config, "config.json: quantization_config"))
    return str(caught.value)


# ---- the canonical form and its product


def random_weight(rng: torch.Generator) -> QuantizedWeight:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    bits, has_offsets, group = 4 if draw(0, 2) else 8, bool(draw(0, 2)), draw(1, 40)
    outputs, groups = draw(1, 70), draw(1, 9)
    inputs = group * groups
    low, high = ((0, 16) if has_offsets else (-8, 8)) if bits == 4 else (-128, 128)
    values = torch.randint(low, high, (outputs, inputs), generator=rng).to(torch.int8)
    if bits == 8 and not has_offsets and draw(0, 2):
        values = torch.randn(outputs, inputs, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.randn(outputs, groups, generator=rng)
    scales = scales.half().float() if draw(0, 2) else scales
    offsets = torch.randn(outputs, groups, generator=rng) if has_offsets else None
    order = torch.randperm(inputs, generator=rng) if draw(0, 2) else None
    return QuantizedWeight(values, scales, offsets, order, group, bits)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_compact_weight_is_the_same_weight_and_its_product_that_of_the_dequantised_one(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(60):
        weight = random_weight(rng)
        compact = CompactWeight.of(weight)
        back = compact.canonical()
        assert torch.equal(back.values.view(torch.uint8), weight.values.view(torch.uint8)), f"seed {seed}"
        assert torch.equal(back.dequantize(), weight.dequantize())
        x = torch.randn(5, weight.values.shape[1], generator=rng)
        bias = torch.randn(weight.values.shape[0], generator=rng)
        expected = torch.nn.functional.linear(x, weight.dequantize(), bias)
        torch.testing.assert_close(compact.forward(x, bias), expected, rtol=1e-4, atol=1e-3)
        tokens = torch.randint(weight.values.shape[0], (4,), generator=rng)
        assert torch.equal(compact.embed(tokens, torch.float32), weight.dequantize()[tokens])
        joined = CompactWeight.join([compact, compact])
        assert torch.equal(joined.canonical().dequantize(), weight.dequantize().repeat(2, 1))


def test_four_bits_take_half_a_byte_and_scales_of_16_bits_two() -> None:
    weight = quantize_weight(torch.randn(64, 128), 4)

    assert CompactWeight.of(weight).nbytes == 64 * 128 // 2 + 64 * 4 * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_activations_are_rounded_row_by_row_to_the_documented_values(seed: int) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)) * 3
    x[3] = 0
    int8, fp8_rows = round_activations(x, "int8"), round_activations(x, "fp8")
    for row in range(7):
        assert torch.equal(round_activations(x[row : row + 1], "int8")[0], int8[row]), "a row depends on another"
        scale = float(x[row].abs().max()) / 127
        steps = int8[row] / scale if scale else int8[row]
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert float((int8[row] - x[row]).abs().max()) <= scale / 2 * 1.001
    assert torch.equal(int8[3], x[3]) and torch.equal(fp8_rows[3], x[3])
    assert 0 < float((fp8_rows - x).abs().max()) < float(x.abs().max()) / 16
    grouped = round_activations(x, "fp8", group=16)
    assert torch.equal(grouped[:, 16:32], round_activations(x[:, 16:32], "fp8", group=16))
    clipped = round_activations(torch.tensor([[1e6, -1e6, 0.26]]), "int8", scale=0.5)
    assert clipped.tolist() == [[63.5, -64.0, 0.5]]


# ---- reading


def test_awq_is_read_as_the_converter_of_the_vllm_project_reads_it() -> None:
    generator = torch.Generator().manual_seed(3)
    stored, _ = awq(32)("x", torch.randn(64, 96, generator=generator), generator)  # type: ignore[misc]
    named = {f"x_proj.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    converted = AutoAWQConverter(bits=4, group_size=32).process(dict(named))
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)
    state = {name.removeprefix("x_proj."): tensor for name, tensor in converted.items()}
    state["weight_scale"] = state["weight_scale"].float()
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]

    form = read_scheme(ConfigFields(AWQ, "config.json")).layer("x_proj")
    assert form is not None
    found = form.read({"weight": stored["qweight"], "zeros": stored["qzeros"], "scales": stored["scales"]}, 64, 96)

    torch.testing.assert_close(found.dequantize(), expected.float(), rtol=1e-5, atol=1e-5)


def test_symmetric_gptq_with_zero_points_of_version_2_is_recognised_whatever_the_version_says(tmp_path: Path) -> None:
    reference = write_quantized(tmp_path, gptq(4, 32, True, version=2), gptq_config(4, 32, True))

    with torch.inference_mode():
        expected = reference(torch.arange(3, 33)[None]).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kept", ["re:.*q_proj", Q_PROJ, "re:.*layers\\.1\\..*"])
def test_layers_that_the_configuration_excludes_stay_as_they_are(kept: str, tmp_path: Path) -> None:
    def write(layer: str, weight: Tensor, generator: torch.Generator) -> object:
        is_kept = re.match(kept[3:], layer) if kept.startswith("re:") else layer == kept
        return None if is_kept else compress(INT4, "pack-quantized")(layer, weight, generator)

    config = PACKED | {"ignore": ["lm_head", kept]}
    reference = write_quantized(tmp_path, write, config)  # type: ignore[arg-type]

    with torch.inference_mode():
        expected = reference(torch.arange(3, 33)[None]).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), expected, atol=1e-3, rtol=0)


def test_layers_of_one_input_with_different_orders_are_multiplied_apart(tmp_path: Path) -> None:
    forms = {name: gptq(4, 16, True, has_order=True) for name in ("q_proj", "k_proj", "v_proj")}

    def write(layer: str, weight: Tensor, generator: torch.Generator) -> object:
        return forms.get(layer.rpartition(".")[2], gptq(4, 16, True))(layer, weight, generator)

    reference = write_quantized(tmp_path, write, gptq_config(4, 16, True, desc_act=True))  # type: ignore[arg-type]

    with torch.inference_mode():
        expected = reference(torch.arange(3, 33)[None]).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), expected, atol=1e-3, rtol=0)


def test_groups_of_a_configuration_choose_by_name_then_expression_then_class() -> None:
    other = QuantizationArgs(num_bits=8, type="int", strategy="channel")
    group = compressed_config(INT4, "pack-quantized")["config_groups"]["group_0"]  # type: ignore[index]
    wide = compressed_config(other, "pack-quantized")["config_groups"]["group_0"]  # type: ignore[index]
    groups = {"a": group, "b": wide | {"targets": ["re:.*down_proj", "model.x"]}}
    scheme = read_scheme(ConfigFields(PACKED | {"config_groups": groups}, "config.json"))

    def bits(layer: str) -> str | None:
        form = scheme.layer(layer)
        return None if form is None else form.text.partition(",")[0]

    assert bits("model.layers.0.mlp.down_proj") == "int8"
    assert (bits("model.x"), bits("model.xx"), bits("lm_head")) == ("int8", "int4", None)


def test_gptq_overrides_by_expression() -> None:
    dynamic = {"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": -1}}
    scheme = read_scheme(ConfigFields(gptq_config(4, 32, True, dynamic=dynamic), "config.json"))

    texts = {name: str(scheme.layer(name) and scheme.layer(name).text) for name in ("a.k_proj", "a.down_proj", "b")}  # type: ignore[union-attr]
    assert texts == {
        "a.k_proj": "None",
        "a.down_proj": "int8, a scale per output",
        "b": "int4, groups of 32",
    }


def test_the_scheme_and_its_tensors_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    write_quantized(tmp_path / "one", compress(INT4, "pack-quantized"), PACKED)
    before = load(tmp_path / "one").fingerprint
    assert load(tmp_path / "one").fingerprint == before

    def double(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.weight_scale"] *= 2

    assert load(changed(tmp_path / "one", tmp_path / "two", double)).fingerprint != before
    make_checkpoint("llama3", tmp_path / "dense")
    fingerprints = {load(tmp_path / "dense", quantization=name).fingerprint for name in ("auto", "int8", "int4")}
    assert len(fingerprints) == 3


# ---- rounding at load


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_a_checkpoint_is_rounded_at_load_to_the_nearest_values(
    name: str, bits: int, family: str, tmp_path: Path
) -> None:
    reference = make_checkpoint(family, tmp_path)  # type: ignore[arg-type]
    is_tied = family == "qwen2"
    with torch.no_grad():
        for module, parameter in reference.named_parameters():
            is_head = module == "lm_head.weight" or (is_tied and module == "model.embed_tokens.weight")
            if module.endswith("_proj.weight") or is_head:
                parameter.copy_(quantize_weight(parameter, 8 if is_head else bits).dequantize())

    model = load(tmp_path, quantization=name)

    with torch.inference_mode():
        expected = reference(torch.arange(3, 33)[None]).logits[0]
    torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=0)
    assert model.weights_bytes < 0.45 * load(tmp_path).weights_bytes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 8)])
def test_rounding_at_load_is_off_by_at_most_half_a_step(bits: int, steps: int, seed: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(seed))
    weight[5] = 0
    weight[6, :32] = 0
    found = quantize_weight(weight, bits)
    groups = weight.unflatten(1, (-1, found.group_size))
    error = (found.dequantize() - weight).unflatten(1, (-1, found.group_size)).abs()
    # With 4 bits the largest number is -8 steps, and one of the other sign may need 8 and gets 7.
    bound = groups.abs().amax(-1, keepdim=True) / steps * (0.502 if bits == 8 else 1.002)
    assert bool((error <= bound).all()), f"seed {seed}"
    assert float(error.mean()) < float(weight.abs().mean()) / steps


def test_a_quantised_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    write_quantized(tmp_path, compress(INT4, "pack-quantized"), PACKED)

    assert "--quantization int8: the checkpoint is quantised already" in refusal(tmp_path, quantization="int8")


@pytest.mark.parametrize(
    ("written", "config", "words"),
    [
        ("compressed-tensors", PACKED, ""),
        ("Compressed_Tensors", PACKED, ""),
        ("gptq_marlin", gptq_config(8, 32, False), ""),
        ("awq_marlin", AWQ, ""),
        ("awq", gptq_config(8, 32, False), "--quantization awq: the checkpoint is quantised with gptq"),
        ("gptq", AWQ, "--quantization gptq: the checkpoint is quantised with awq"),
        ("fp8", PACKED, "--quantization fp8: the checkpoint is quantised with compressed-tensors"),
        ("bitsandbytes", AWQ, "--quantization bitsandbytes: the checkpoint is quantised with awq"),
        ("bitsandbytes", {"quant_method": "bitsandbytes"}, "quant_method: bitsandbytes is not supported"),
        ("awq", {"quant_method": "bitsandbytes"}, "--quantization awq: the checkpoint is quantised with bitsandbytes"),
        ("awq", None, "--quantization awq: the checkpoint is not quantised"),
        ("fp8", None, "--quantization fp8: the checkpoint is not quantised"),
    ],
)
def test_the_format_that_is_asked_for_must_be_that_of_the_checkpoint(
    written: str, config: dict[str, object] | None, words: str
) -> None:
    asked = SETTINGS["quantization"].read(written)
    assert isinstance(asked, str)
    fields = ConfigFields({} if config is None else {"quantization_config": config}, "config.json")
    if not words:
        assert choose_scheme(asked, fields) is not None
        return
    with pytest.raises(ConfigError) as caught:
        choose_scheme(asked, fields)
    assert words in caught.value.message


def test_a_format_that_does_not_exist_is_refused_before_the_model_is_read() -> None:
    assert SETTINGS["quantization"].read("none") == "auto"
    with pytest.raises(ValueError, match="nonsense"):
        SETTINGS["quantization"].read("nonsense")


def test_the_older_name_of_the_configuration_is_read(tmp_path: Path) -> None:
    write_quantized(tmp_path, compress(INT4, "pack-quantized"), PACKED)
    expected = logits(load(tmp_path))
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["compression_config"] = fields.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert torch.equal(logits(load(tmp_path)), expected)


def test_the_transformers_implementation_refuses_quantised_weights(tmp_path: Path) -> None:
    write_quantized(tmp_path, compress(INT4, "pack-quantized"), PACKED)

    assert "--model-impl transformers" in refusal(tmp_path, model_impl="transformers")


@pytest.mark.parametrize("config", [PACKED, gptq_config(8, 32, False), AWQ, {"quant_method": "fp8"}])
def test_dummy_weights_follow_the_scheme(config: Mapping[str, object], tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))

    one, again = (load(tmp_path, load_format="dummy", seed=5) for _ in range(2))

    assert torch.equal(logits(one), logits(again))
    assert float(logits(one).std()) > 0


# ---- broken input


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str, str]] = {
    "missing scales": (lambda t: t.pop(f"{Q_PROJ}.weight_scale"), "weight_scale", "is missing"),
    "missing weight": (lambda t: t.pop(f"{Q_PROJ}.weight_packed"), "weight_packed", "is missing"),
    "other group size": (
        lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(64, 4)}),
        *("weight_scale", "shape [64, 4], not [64, 2]"),
    ),
    "cut weight": (
        lambda t: t.update({f"{Q_PROJ}.weight_packed": torch.zeros(64, 7, dtype=torch.int32)}),
        *("weight_packed", "shape [64, 7], not [64, 8]"),
    ),
    "weight of another type": (
        lambda t: t.update({f"{Q_PROJ}.weight_packed": torch.zeros(64, 8, dtype=torch.int64)}),
        *("weight_packed", "dtype torch.int64"),
    ),
    "other shape": (
        lambda t: t.update({f"{Q_PROJ}.weight_shape": torch.tensor([64, 63])}),
        *("weight_shape", "the shape is [64, 63]"),
    ),
    "infinite scale": (lambda t: t[f"{Q_PROJ}.weight_scale"][3].fill_(float("inf")), "weight_scale", "infinite"),
    "unknown tensor": (lambda t: t.update({f"{Q_PROJ}.other": torch.ones(1)}), "other", "no such tensor"),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_quantized(folder, compress(INT4, "pack-quantized"), PACKED)
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_refused_by_file_and_name(name: str, packed: Path, tmp_path: Path) -> None:
    change, tensor, reason = BROKEN[name]

    message = refusal(changed(packed, tmp_path / "broken", change))

    assert f"model.safetensors: tensor {Q_PROJ}.{tensor}" in message
    assert reason in message


def test_groups_of_unequal_size_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "good", gptq(4, 32, True, has_order=True), gptq_config(4, 32, True))

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.g_idx"][0] = 77

    message = refusal(changed(tmp_path / "good", tmp_path / "bad", spoil))
    assert f"tensor {Q_PROJ}.g_idx: every group must have 32 of the 64 inputs" in message


def test_a_bias_that_the_architecture_lacks_must_be_zero(tmp_path: Path) -> None:
    write_quantized(tmp_path / "good", gptq(4, 32, True), gptq_config(4, 32, True))
    load(tmp_path / "good")

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.bias"][0] = 1

    message = refusal(changed(tmp_path / "good", tmp_path / "bad", spoil))
    assert f"tensor {Q_PROJ}.bias: this architecture has no bias here" in message


def test_a_group_size_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq(4, 32, True), gptq_config(4, 48, True))

    assert "group_size (48) must divide the 64 inputs of model.layers.0.self_attn.q_proj" in refusal(tmp_path)


def test_fp8_weights_without_a_configuration_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, fp8(None), {"quant_method": "fp8"})
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "scale" not in name}, tmp_path / "model.safetensors")

    assert "float8_e4m3fn is not a floating-point type of 16 or more bits" in refusal(tmp_path)


def with_weights(**changes: object) -> dict[str, object]:
    group = compressed_config(INT4, "pack-quantized")["config_groups"]["group_0"]  # type: ignore[index]
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: bitsandbytes is not supported"),
        ({"quant_method": 3}, "quant_method must be str"),
        ({}, "quant_method is missing"),
        (AWQ | {"version": "gemv"}, "version: gemv is not supported"),
        (AWQ | {"bits": 8}, "bits: 8 is not supported"),
        (AWQ | {"group_size": 0}, "group_size must be -1 or from 1"),
        (AWQ | {"modules_to_not_convert": "x"}, "modules_to_not_convert must be a list"),
        (gptq_config(3, 32, True), "bits: 3 is not supported"),
        (gptq_config(4, 32, True, checkpoint_format="marlin"), "checkpoint_format: marlin is not supported"),
        (gptq_config(4, 32, True, dynamic={"-:(": {}}), "is not a regular expression"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, True]}, "weight_block_size must be two numbers"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme: none is not supported"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "format: 'nvfp4-pack-quantized'"),
        (PACKED | {"ignore": ["re:["]}, "ignore: '[' is not a regular expression"),
        (PACKED | {"quantization_status": "frozen"}, "quantization_status: frozen is not supported"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is not supported"),
        (PACKED | {"config_groups": {}}, "config_groups must have a group"),
        (with_weights(num_bits=3), "num_bits: 3 is not supported"),
        (with_weights(group_size=-7), "group_size must be -1 or from 1"),
        (with_weights(strategy="tensor_group"), "strategy: tensor_group is not supported"),
        (with_weights(dynamic=True), "dynamic: True is not supported"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_field(config: Mapping[str, object], words: str) -> None:
    message = scheme_refusal(config)

    assert words in message
    assert message.startswith("config.json: quantization_config")
