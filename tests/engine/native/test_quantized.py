"""Products with weights of 4 and 8 bits, of every processor class, against the dequantised weight in float64."""

import random

import pytest
import torch
from torch import Tensor

from tests.engine.native.classes import CLASSES, library_of
from tests.seeds import fresh_seeds
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.engine.native.linear import PackedLinear
from tiercel.engine.native.quantized import can_multiply
from tiercel.engine.native.table import CpuClass

GUARD = 64  # poisoned elements before and behind every operand
TOLERANCE_BY_DTYPE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
GROUPS = (16, 32, 48, 64, 128, 256)


def guarded(source: Tensor) -> Tensor:
    """Return a copy with NaN before its first and behind its last element."""
    memory = torch.full((source.numel() + 2 * GUARD,), float("nan"), dtype=source.dtype)
    memory[GUARD:-GUARD] = source.flatten()
    return memory[GUARD:-GUARD].view(source.shape)


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    torch.set_num_threads(1)


def draw_weight(rng: random.Random, draw: torch.Generator, outputs: int, **fixed: object) -> QuantizedWeight:
    """Return a weight of a random kind, with the fields that are given."""
    bits = int(str(fixed.get("bits", rng.choice((4, 8)))))
    group = rng.choice((0, *GROUPS))
    inputs = group * rng.randint(1, 1024 // group) if group else rng.choice((1, 7, 8, 255, 257, rng.randint(1, 1100)))
    group = group or inputs
    has_offsets = rng.random() < 0.5
    low = 0 if bits == 4 and has_offsets and rng.random() < 0.7 else -(1 << bits - 1)
    values = torch.randint(low, low + (1 << bits), (outputs, inputs), generator=draw, dtype=torch.int8)
    rounds_x = bool(fixed.get("rounds_x", rng.random() < 0.3))
    if bits == 8 and not rounds_x and rng.random() < 0.3:
        values = values.masked_fill(values & 0x7F == 0x7F, 1).view(torch.float8_e4m3fn)
    scales = torch.rand(outputs, inputs // group, generator=draw) + 0.1
    if rng.random() < 0.5:
        scales = scales.half().float() if rng.random() < 0.5 else scales.bfloat16().float()
    offsets = scales * torch.randint(-8, 8, scales.shape, generator=draw) if has_offsets else None
    order = torch.randperm(inputs, generator=draw) if rng.random() < 0.4 else None
    return QuantizedWeight(
        *(values, scales, offsets, order, group, bits, "int8" if rounds_x else None),
        activation_scale=rng.choice((None, 0.02)) if rounds_x else None,
    )


def pack(cpu_class: CpuClass, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    packed = PackedLinear.quantized(library_of(cpu_class), weight, bias)
    assert packed is not None
    return packed


def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return the product with the dequantised weight in float64, of x rounded to int8 where the weight says so."""
    wide = x.double()
    if weight.activations == "int8":
        scales = x.float().abs().amax(-1, keepdim=True) / 127
        if weight.activation_scale is not None:
            scales = torch.full_like(scales, weight.activation_scale)
        integers = (x.float() / scales).round().clamp(-128, 127)
        wide = torch.where(scales > 0, integers, 0).double() * scales.double()
    return wide @ weight.dequantize().double().T


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
@pytest.mark.sampled(1)
def test_products_are_those_of_the_dequantised_weight(cpu_class: CpuClass, seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(20):
        outputs = rng.choice((1, 31, 33, 64, 65, rng.randint(1, 300)))
        weight = draw_weight(rng, draw, outputs)
        bias = torch.randn(outputs, generator=draw) if rng.random() < 0.5 else None
        packed = pack(cpu_class, weight, bias)
        for rows in (1, 2, rng.randint(3, 13), rng.randint(14, 230)):
            torch.set_num_threads(rng.choice((1, 2)))
            dtype = rng.choice(tuple(TOLERANCE_BY_DTYPE))
            x = torch.randn(rows, weight.values.shape[1], generator=draw).to(dtype)
            expected = product(x, weight) + (0 if bias is None else bias.double())

            result = packed.forward(guarded(x))

            torch.set_num_threads(1)
            error = (result.double() - expected).abs().max() / expected.abs().max()
            assert result.dtype is dtype
            assert error <= TOLERANCE_BY_DTYPE[dtype], (seed, dtype, rows, outputs, weight)


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("dtype", TOLERANCE_BY_DTYPE)
@pytest.mark.parametrize("rounds_x", [False, True])
@pytest.mark.parametrize("seed", [3, *fresh_seeds(1)])
@pytest.mark.sampled(4)
def test_a_row_depends_neither_on_the_other_rows_nor_on_the_threads(
    cpu_class: CpuClass, dtype: torch.dtype, rounds_x: bool, seed: int
) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for bits in (4, 8):
        weight = draw_weight(rng, draw, 150, bits=bits, rounds_x=rounds_x)
        packed = pack(cpu_class, weight, torch.randn(150, generator=draw))
        x = torch.randn(230, packed.inputs, generator=draw).to(dtype)
        x[3], x[40, packed.inputs // 2], x[229, 0] = float("nan"), float("inf"), float("nan")
        torch.set_num_threads(2)
        together = packed.forward(x)
        torch.set_num_threads(1)

        for count, row in zip((1, 1, 2, 3, 4, 5, 6, 12, 20), (0, 2, 4, 41, 41, 50, 60, 80, 100), strict=True):
            assert torch.equal(packed.forward(x[row : row + count]), together[row : row + count]), (seed, count, row)
            assert together[row].isfinite().all()
        assert torch.equal(packed.forward(x[41:161]), together[41:161]), seed
        assert together[3].isnan().all()
        if weight.activation_scale is None:
            assert not together[40].isfinite().any()


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("seed", [4, *fresh_seeds(1)])
def test_nothing_beside_the_result_is_written(cpu_class: CpuClass, seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    library, code = library_of(cpu_class), {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    for rows in (1, 5, 17, 100):
        packed = pack(cpu_class, draw_weight(rng, draw, 45))
        layout, dtype = packed.weights.quantized, rng.choice(tuple(code))
        size = library.quantized_room(layout, code[dtype], rows)
        room = torch.full((size + 128,), 0xA5, dtype=torch.uint8)
        x = guarded(torch.randn(rows, packed.inputs, generator=draw).to(dtype))
        y = torch.full((rows * 45 + 2 * GUARD,), 7.0, dtype=dtype)

        library.quantized_linear(
            *(layout, code[dtype], x.data_ptr(), packed.weights.packed, None, y[GUARD:].data_ptr(), rows),
            room[64:].data_ptr(),
        )

        assert (room[:64] == 0xA5).all()
        assert (room[-64:] == 0xA5).all()
        assert (y[:GUARD] == 7).all()
        assert (y[-GUARD:] == 7).all()
        assert y.isfinite().all()


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("seed", [5, *fresh_seeds(1)])
def test_rows_of_the_weight_are_the_embedding(cpu_class: CpuClass, seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = torch.tensor([0, 100, 31, 32, 33, 5, 5, 64])
    for bits in (4, 8):
        weight = draw_weight(rng, draw, 101, bits=bits)
        packed = pack(cpu_class, weight)
        for dtype in TOLERANCE_BY_DTYPE:
            expected = weight.dequantize()[tokens]
            error = (packed.embed(tokens, dtype).float() - expected.to(dtype).float()).abs().max()
            assert error <= 2 * torch.finfo(dtype).eps * expected.abs().max(), (seed, weight)
        for wrong in (-1, 101):
            with pytest.raises(IndexError, match="101"):
                packed.embed(torch.tensor([1, wrong]), torch.float32)


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_extreme_rows_are_rounded_as_the_definition_says(cpu_class: CpuClass) -> None:
    """The largest integers everywhere, which saturate 16 bits; ties; rows of zeros and of the smallest numbers."""
    values = torch.full((70, 4096), -128, dtype=torch.int8)
    values[1::2] = 127
    weight = QuantizedWeight(values, torch.ones(70, 1), None, None, 4096, 8, "int8")
    x = torch.stack(
        [
            torch.full((4096,), 3.0),
            torch.full((4096,), -5.0),
            torch.zeros(4096),
            (torch.arange(4096) % 255 - 127.0) / 2,
            torch.full((4096,), 1e-44),
            torch.full((4096,), 2e30),
        ]
    )

    result = pack(cpu_class, weight).forward(x)

    torch.testing.assert_close(result.double(), product(x, weight), rtol=1e-6, atol=1e-38)
    assert (result[2] == 0).all()


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_a_fixed_scale_saturates_and_keeps_a_nan(cpu_class: CpuClass) -> None:
    weight = QuantizedWeight(
        torch.eye(4, dtype=torch.int8), torch.ones(4, 1), None, None, 4, 8, "int8", activation_scale=0.5
    )
    x = torch.tensor([[0.25, 0.75, -1.25, 1e9], [torch.inf, -torch.inf, 0.0, 1.0], [torch.nan, 1.0, 1.0, 1.0]])

    result = pack(cpu_class, weight).forward(x)

    assert result[:2].tolist() == [[0.0, 1.0, -1.0, 63.5], [63.5, -64.0, 0.0, 1.0]]
    assert result[2].isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 24, "scales": torch.ones(3, 4)},
        {"group_size": 8, "scales": torch.ones(3, 12)},
        {"values": torch.full((3, 96), torch.nan).to(torch.float8_e4m3fn)},
        {"values": torch.ones(3, 96).to(torch.float8_e4m3fn), "activations": "int8"},
        {"values": torch.ones(3, 96).to(torch.float8_e5m2)},
        {"activations": "fp8"},
        {"activations": "int8", "activation_group": 32},
        {"scales": torch.ones(3, 2)},
    ],
    ids=["group 24", "group 8", "NaN", "x in int8 by fp8", "e5m2", "x in fp8", "x in groups", "scales of other groups"],
)
def test_a_weight_that_no_kernel_knows_is_left_to_the_caller(change: dict[str, object]) -> None:
    fields = {
        "values": torch.zeros(3, 96, dtype=torch.int8),
        "scales": torch.ones(3, 3),
        "offsets": None,
        "order": None,
        "group_size": 32,
        "bits": 8,
        "activations": None,
    }
    assert can_multiply(QuantizedWeight(**fields))  # pyright: ignore[reportArgumentType]

    other = QuantizedWeight(**(fields | change))  # pyright: ignore[reportArgumentType]

    assert not can_multiply(other)
    assert PackedLinear.quantized(library_of(CpuClass.PORTABLE), other, None) is None


@pytest.mark.parametrize("low", [-9, 0])
def test_values_of_more_than_four_bits_are_refused(low: int) -> None:
    values = torch.arange(low, low + 16).to(torch.int8).repeat(2, 2)
    weight = QuantizedWeight(values, torch.ones(2, 1), None, None, 32, 4)

    with pytest.raises(ValueError, match=f"from {low} to {low + 15}"):
        PackedLinear.quantized(library_of(CpuClass.PORTABLE), weight, None)
