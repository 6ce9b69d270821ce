"""Checkpoints of mixtures: experts in two tensors of a layer, and quantised experts."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.bench import EngineBench
from tests.conformance.models import MIXTURES, VOCAB_SIZE, Family, make_checkpoint
from tests.conformance.quantized import write_dense
from tests.conformance.test_quantized_exactness import (
    Make,
    compressed,
    difference_of,
    ints,
    packed_awq,
    packed_gptq,
    relative_difference_of,
)
from tests.engine.models.paged_run import PagedRun
from tests.seeds import fresh_seeds
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.activation_rounding import quantize_weight
from tiercel.engine.models.base import Model
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import find_library
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError
from tiercel.values.request import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, **settings: object) -> Model:
    chosen = {"model": str(folder), "dtype": "float32"} | settings
    return load_model(EngineSettings(**chosen), CPU, SdpaAttention())  # type: ignore[arg-type]


def logits_of(model: Model, seed: int = 1) -> Tensor:
    tokens = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(seed))
    return PagedRun(model, 1, 40).prefill(tokens, 17)


def answers(folder: Path, seed: int, quantization: str = "auto") -> list[list[int]]:
    """Return the tokens of the engine for a few prompts at once."""
    bench = EngineBench(folder, quantization=quantization)
    try:
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(3, VOCAB_SIZE, (5 + 9 * i,), generator=generator).tolist() for i in range(4)]
        seqs = [bench.submit(prompt, GREEDY) for prompt in prompts]
        bench.run()
        return [bench.inbox.tokens[seq] for seq in seqs]
    finally:
        bench.close()


# ---- experts in two tensors


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_two_tensors_are_those_of_single_tensors(family: Family, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "single", seed=3)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)

    single, fused = load(tmp_path / "single"), load(tmp_path / "fused")

    assert torch.equal(logits_of(fused), logits_of(single))
    assert fused.fingerprint == single.fingerprint  # stored blocks of one layout are those of the other
    for bits in ("int8", "int4"):
        rounded = load(tmp_path / "fused", quantization=bits)
        assert torch.equal(logits_of(rounded), logits_of(load(tmp_path / "single", quantization=bits)))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_two_tensors_of_another_shape_are_refused_by_name(name: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stored = f"model.layers.1.mlp.experts.{name}"
    tensors[stored] = tensors[stored][:-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=rf"{stored}: shape \[7, .*, not \[8, "):
        load(tmp_path)


def test_a_layer_that_has_one_of_both_tensors_lacks_the_other(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.mlp.experts.down_proj"]
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"layers\.2\.block_sparse_moe\.experts\.0\.w2\.weight is missing"):
        load(tmp_path)


# ---- quantised experts


def rounded_tensors(tensors: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return the numbers that `--quantization` makes of the tensors of a checkpoint."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not name.endswith(("gate.weight", "norm.weight")):
            is_head = name in ("lm_head.weight", "model.embed_tokens.weight")
            if name == "model.embed_tokens.weight" and "lm_head.weight" in tensors:
                continue
            found[name] = quantize_weight(tensor, 8 if is_head else bits).dequantize()
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.sampled(3)
def test_mixtures_rounded_at_load_are_the_models_of_the_rounded_numbers(
    family: Family, bits: int, tmp_path: Path
) -> None:
    seed = fresh_seeds(1)[0]
    model = make_checkpoint(family, tmp_path, seed=seed)
    dense = tmp_path / "dense"
    dense.mkdir()
    write_dense(tmp_path, dense, rounded_tensors(load_file(tmp_path / "model.safetensors"), bits))
    reference = type(model).from_pretrained(dense, dtype=torch.float32)

    largest = difference_of(reference, load(tmp_path, quantization=f"int{bits}"), seed)
    assert largest < 1e-3, f"seed {seed}"

    assert answers(tmp_path, seed, quantization=f"int{bits}") == answers(dense, seed), f"seed {seed}"


STORED: dict[str, tuple[Make, Family]] = {
    "pack-quantized int4 groups": (compressed(ints(4, 16), "pack-quantized"), "qwen3_moe"),
    "pack-quantized int4 zero points": (compressed(ints(4, 32, False), "pack-quantized"), "mixtral"),
    "naive-quantized int8": (compressed(ints(8, None), "naive-quantized"), "olmoe"),
    "awq": (packed_awq(16), "qwen3_moe"),
    "awq mixtral": (packed_awq(32), "mixtral"),
    "gptq int4": (packed_gptq(4, 16, True), "qwen3_moe"),
    "gptq int4 desc_act": (packed_gptq(4, 16, False, has_order=True), "mixtral"),
    "gptq int8": (packed_gptq(8, 8, True), "olmoe"),
}


def keep_routers(folder: Path, name: str) -> None:
    """Name the routers in the configuration, as the tools do that write these formats: GPTQ's write nothing."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    stored = fields["quantization_config"]
    if name.startswith("awq"):
        stored["modules_to_not_convert"] = ["gate"]
    elif not name.startswith("gptq"):
        stored["ignore"] = ["lm_head", "re:.*\\.gate$"]
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("name", STORED)
def test_quantised_checkpoints_of_mixtures_give_the_logits_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    make, family = STORED[name]
    seed = fresh_seeds(1)[0]
    reference = make(tmp_path, family, seed)
    keep_routers(tmp_path, name)

    assert difference_of(reference, load(tmp_path), seed) < 1e-3, f"seed {seed}"


@pytest.mark.parametrize("name", STORED)
@pytest.mark.sampled(2)
def test_native_kernels_give_the_tokens_of_quantised_mixtures(name: str, tmp_path: Path) -> None:
    """Activations are float32 with these kernels if the numbers are those of float16: choices of experts agree.

    Two experts may still be equally likely up to the order of sums, which changes a whole token. So one of three models
    must agree: wrong numbers fail for all.
    """
    library = find_library()
    if isinstance(library, str):
        pytest.skip(library)
    make, family = STORED[name]
    difference_by_seed: dict[int, float] = {}
    for seed in fresh_seeds(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        reference = make(folder, family, seed).half().float()
        keep_routers(folder, name)
        settings = EngineSettings(model=str(folder), dtype="float16")

        model = load_model(settings, CPU, open_attention("native", CPU), library=library)

        assert model.products == "native"
        difference_by_seed[seed] = relative_difference_of(reference, model, seed)
        if difference_by_seed[seed] < 2e-2:
            return
    pytest.fail(f"differences by seed: {difference_by_seed}")
