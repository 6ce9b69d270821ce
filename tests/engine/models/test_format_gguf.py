"""Blocks of GGUF files in the canonical form: equal, bit for bit, to what the `gguf` package makes of random bytes."""

import gguf
import numpy as np
import pytest
import torch

from tests.seeds import fresh_seeds
from tiercel.engine.models.format_gguf import BLOCK_CODES, GgufFormat
from tiercel.engine.models.quantization import WrongTensorError
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.modelfile.header import BLOCK_TYPES

TYPES = {kind.name: (gguf.GGMLQuantizationType(number), kind) for number, kind in BLOCK_TYPES.items()}
NUMBERS_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of 16 bits; else at 0


def random_blocks(name: str, rows: int, blocks: int, numbers: np.random.Generator) -> np.ndarray:
    """Return blocks of random bytes whose 16-bit numbers are finite. Shape: [rows, blocks * nbytes] uint8."""
    nbytes = TYPES[name][1].nbytes
    raw = numbers.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    for place in NUMBERS_AT.get(name, (0,)):
        finite = numbers.normal(0, 2, (rows * blocks, 1)).astype(np.float16)
        raw[:, place : place + 2] = finite.view(np.uint8)
    return raw.reshape(rows, blocks * nbytes)


def test_every_type_that_is_no_float_has_an_image() -> None:
    assert set(BLOCK_CODES) == {kind.name for kind in BLOCK_TYPES.values() if not kind.is_float}


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(1)])
@pytest.mark.parametrize("name", BLOCK_CODES)
def test_random_blocks_are_dequantised_exactly_as_the_gguf_package_does(name: str, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    rows, blocks = int(numbers.integers(1, 7)), int(numbers.integers(1, 5))
    raw = random_blocks(name, rows, blocks, numbers)
    asked, kind = TYPES[name]
    expected = torch.from_numpy(gguf.dequantize(raw, asked))
    form, inputs = GgufFormat(kind), blocks * kind.numbers
    (stored,) = form.tensors("layer", rows, inputs).values()
    assert stored.shapes == ((rows, raw.shape[1]),)
    weight = form.read({"weight": torch.from_numpy(raw)}, rows, inputs)
    assert torch.equal(weight.dequantize(), expected), (name, seed)
    low, high = (-128, 127) if weight.bits == 8 else (0, 15) if weight.offsets is not None else (-8, 7)
    assert low <= int(weight.values.min()) <= int(weight.values.max()) <= high
    compact = CompactWeight.of(weight)
    assert torch.equal(compact.canonical().dequantize(), expected), (name, seed)
    assert form.stored_bytes(rows, inputs) <= compact.nbytes


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_the_gguf_package_quantises_is_read_exactly(name: str) -> None:
    asked, kind = TYPES[name]
    weight = np.random.default_rng(3).standard_normal((5, 96)).astype(np.float32)
    raw = gguf.quantize(weight, asked)
    found = GgufFormat(kind).read({"weight": torch.from_numpy(raw)}, 5, 96).dequantize()
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(raw, asked)))


@pytest.mark.parametrize("name", BLOCK_CODES)
def test_infinite_scales_are_refused(name: str) -> None:
    raw = random_blocks(name, 2, 1, np.random.default_rng(4))
    place = NUMBERS_AT.get(name, (0,))[-1]
    raw[1, place : place + 2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    kind = TYPES[name][1]
    with pytest.raises(WrongTensorError, match="infinite"):
        GgufFormat(kind).read({"weight": torch.from_numpy(raw)}, 2, kind.numbers)


@pytest.mark.parametrize("name", BLOCK_CODES)
def test_drawn_weights_are_near_and_of_the_same_form(name: str) -> None:
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(5))
    drawn = GgufFormat(TYPES[name][1]).draw(weight)
    assert drawn.bits == BLOCK_CODES[name].bits
    assert (drawn.offsets is not None) == BLOCK_CODES[name].has_offsets
    assert (drawn.dequantize() - weight).abs().max() < (0.5 if drawn.bits == 4 else 0.05)
