"""Quantised checkpoints of tiny models, and the models of transformers with the same numbers.

Checkpoints of compressed-tensors are written and read by that package. Those of GPTQ, AWQ and fp8 are written here by
their documented layouts, one integer after the other, because the packages that write them need another torch.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.conformance.models import MIXTURES, Family, make_checkpoint

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer in its checkpoint, without the layer's name, and the weight that they mean, in float32."""
Write = Callable[[str, Tensor, torch.Generator], Written | None]
"""Quantises the weight of the layer of this name. None: it stays as it is."""
Rounding = Callable[[Tensor], Tensor]

_LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")  # the last three: of experts of Mixtral


def write_quantized(
    folder: Path,
    write: Write,
    config: Mapping[str, object],
    family: Family = "llama3",
    seed: int = 0,
    roundings: Mapping[str, Rounding] | Rounding | None = None,
) -> PreTrainedModel:
    """Quantise every linear layer of a tiny checkpoint but the head. Return the dequantised model in transformers.

    `roundings`: rounds the inputs of all quantised layers in the returned model, or of those of these names.
    """
    model = make_checkpoint(family, folder, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    quantized: list[str] = []
    for name in sorted(dense):
        layer = name.removesuffix(".weight")
        if not name.endswith(_LINEAR) or (written := write(layer, dense[name], generator)) is None:
            continue
        quantized.append(layer)
        stored, dense[name] = written
        del tensors[name]
        for suffix, tensor in stored.items():
            tensors.setdefault(f"{layer}.{suffix}", tensor.contiguous())  # a bias that the model has stays
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": dict(config)}))
    if family in MIXTURES:  # in memory, transformers has the experts of a layer in two tensors
        _load_dense(model, dense, folder)
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(dense[name])
    for layer in quantized:
        rounding = roundings.get(layer) if isinstance(roundings, Mapping) else roundings
        if rounding is not None:
            model.get_submodule(layer).register_forward_pre_hook(_rounded_by(rounding))
    return model


def _load_dense(model: PreTrainedModel, dense: dict[str, Tensor], folder: Path) -> None:
    """Fill a model of transformers from tensors in the layout of checkpoints."""
    with TemporaryDirectory(dir=folder) as beside:
        write_dense(folder, Path(beside), dense)
        model.load_state_dict(type(model).from_pretrained(beside, dtype=torch.float32).state_dict())


def write_dense(folder: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that is not quantised, with these tensors and the other files of a quantised one."""
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(fields))
    shutil.copy(folder / "generation_config.json", target)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})


def _rounded_by(rounding: Rounding) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda module, inputs: (rounding(inputs[0]), *inputs[1:])


def changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Copy a checkpoint to another folder, with other tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


# ---- compressed-tensors


def compress(args: QuantizationArgs, storage: str, inputs: QuantizationArgs | None = None) -> Write:
    """Return a writer in a format of the compressed-tensors package: its rounding, its packing and its reading."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=storage)
    compressor = BaseCompressor.get_value_from_registry(storage)

    def write(layer: str, weight: Tensor, generator: torch.Generator) -> Written:
        match args.strategy:
            case "tensor":
                groups = weight.reshape(1, -1)
            case "channel":
                groups = weight
            case "group":
                groups = weight.unflatten(1, (-1, args.group_size))
            case "block":
                rows, width = args.block_structure
                groups = weight.unflatten(1, (-1, width)).unflatten(0, (-1, rows)).permute(0, 2, 1, 3).flatten(2)
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        if args.strategy in ("tensor", "channel"):
            scales, zeros = scales.reshape(-1, 1), zeros.reshape(-1, 1)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        stored = compressor.compress(state, scheme)
        dense = compressor.decompress(stored, scheme)["weight"]
        if inputs is not None and not inputs.dynamic:
            stored["input_scale"] = torch.tensor([0.05])
        return stored, dense.float()

    return write


def compressed_config(
    args: QuantizationArgs, storage: str, inputs: QuantizationArgs | None = None, **more: object
) -> dict[str, object]:
    """Return the `quantization_config` that the package writes."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "version": "0.20.0",
    } | more


# ---- GPTQ and AWQ


def pack_words(integers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack integers of each row into 32-bit words: the i-th of a word at the place i, or `places[i]`."""
    count = 32 // bits
    rows = []
    for row in integers.tolist():
        words = []
        for start in range(0, len(row), count):
            word = 0
            for index, value in enumerate(row[start : start + count]):
                word |= value << bits * (index if places is None else places[index])
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def round_affine(weight: Tensor, bits: int, group_of: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers, scales in float16 and zero points. Shapes: [outputs, inputs], twice [outputs, groups]."""
    groups = int(group_of.max()) + 1
    largest = torch.stack([weight[:, group_of == group].abs().amax(1) for group in range(groups)], dim=1)
    scales = (largest / ((1 << bits - 1) - 1)).half().float()
    points = torch.full(scales.shape, 1 << bits - 1) if zeros is None else zeros
    integers = (weight / scales[:, group_of]).round().int() + points[:, group_of]
    return integers.clamp(0, (1 << bits) - 1), scales, points


def gptq(bits: int, group_size: int, is_symmetric: bool, version: int = 1, has_order: bool = False) -> Write:
    """Return a writer of the GPTQ layout. `has_order`: groups of inputs that do not adjoin, as with desc_act."""
    orders: dict[str, Tensor] = {}

    def write(layer: str, weight: Tensor, generator: torch.Generator) -> Written:
        outputs, inputs = weight.shape
        size = inputs if group_size == -1 else group_size
        group_of = torch.arange(inputs) // size
        if has_order:
            block = layer.rpartition(".")[0]  # the layers of a block whose input is the same are sorted alike
            order = orders.setdefault(f"{block} {inputs}", torch.randperm(inputs, generator=generator))
            group_of = group_of[order]
        least = 1 if version == 1 else 0  # 0 minus 1 is no number of these bits
        shape = outputs, inputs // size
        points = None if is_symmetric else torch.randint(least, 1 << bits, shape, generator=generator)
        integers, scales, zeros = round_affine(weight, bits, group_of, points)
        dense = scales[:, group_of] * (integers - zeros[:, group_of])
        stored = {
            "qweight": pack_words(integers, bits).t(),
            "qzeros": pack_words((zeros - (1 if version == 1 else 0)).t(), bits),
            "scales": scales.t().half(),
            "g_idx": group_of.int(),
            "bias": torch.zeros(outputs, dtype=torch.float16),
        }
        return stored, dense

    return write


def gptq_config(bits: int, group_size: int, is_symmetric: bool, **more: object) -> dict[str, object]:
    """Return the `quantization_config` of a GPTQ checkpoint."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": is_symmetric,
        "desc_act": False,
    } | more


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of a word holds, from the lowest on."""


def awq(group_size: int) -> Write:
    """Return a writer of AutoAWQ's layout `gemm`."""
    places = tuple(AWQ_ORDER.index(output) for output in range(8))

    def write(layer: str, weight: Tensor, generator: torch.Generator) -> Written:
        outputs, inputs = weight.shape
        group_of = torch.arange(inputs) // group_size
        points = torch.randint(0, 16, (outputs, inputs // group_size), generator=generator)
        integers, scales, zeros = round_affine(weight, 4, group_of, points)
        stored = {
            "qweight": pack_words(integers.t(), 4, places),
            "qzeros": pack_words(zeros.t(), 4, places),
            "scales": scales.t().half(),
        }
        return stored, scales[:, group_of] * (integers - zeros[:, group_of])

    return write


# ---- fp8


def fp8(block: tuple[int, int] | None, per_output: bool = False, is_static: bool = False) -> Write:
    """Return a writer of `quant_method: fp8`."""

    def write(layer: str, weight: Tensor, generator: torch.Generator) -> Written:
        outputs, inputs = weight.shape
        rows, columns = block or ((1, inputs) if per_output else (outputs, inputs))
        scales = torch.empty(-(-outputs // rows), inputs // columns)
        dense, values = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                piece = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[piece].abs().max() / 448
                values[piece] = (weight[piece] / scales[i, j]).to(torch.float8_e4m3fn)
                dense[piece] = values[piece].float() * scales[i, j]
        stored = {"weight": values}
        if block is not None:
            stored["weight_scale_inv"] = scales
        else:
            stored["weight_scale"] = scales if per_output else scales.reshape(())
        if is_static:
            stored["input_scale"] = torch.tensor(0.01)
        return stored, dense

    return write
