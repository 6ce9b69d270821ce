"""Products of the GPU with quantised weights against the dequantised weight in float64, within the bounds of their
arithmetic; integers to the bit."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.attention.scene import KERNEL_DEVICE
from tests.engine.kernels.bfloat16 import rounded_bfloat16 as rounded_bfloat16
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.engine.kernels.product_tiles import ProductTile
from tiercel.engine.kernels.quantized_product import pack_nibbles, unpack_nibbles
from tiercel.engine.models.activation_rounding import quantize_weight, round_activations
from tiercel.engine.models.device_linear import DeviceFacts, DeviceLinear, can_multiply, can_scale_rows
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.engine.models.quantized_weight import QuantizedWeight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (0, 16, 32, 48, 64, 128, 192, 256)  # 0: a scale per output
SEEDS = fast_and_slow((1,), (*range(100, 104), *fresh_seeds(4)))
FEW, MANY = DeviceFacts(1, has_float8=False, scales_rows=False), DeviceFacts(132, has_float8=False, scales_rows=False)
TILES = (None, ProductTile(16, 32, 4, 2), ProductTile(32, 16, 4, 2))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, and NaN in memory that was not written."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw_weight(rng: random.Random, draw: torch.Generator, **fixed: object) -> QuantizedWeight:
    """Return a weight of a random kind that the kernels know, with the fields that are given."""
    activations = fixed.get("activations", rng.choice((None, None, "int8", "fp8")))
    bits = fixed.get("bits", rng.choice((4, 8)))
    least = 16 if activations is None else 32
    group = rng.choice([one for one in GROUPS if one % least == 0])
    group = int(str(fixed.get("group", group)))
    inputs = group * rng.randint(1, 512 // group) if group else rng.choice((1, 7, 31, 130, 255, rng.randint(1, 600)))
    outputs = rng.choice((1, 15, 17, 64, 65, rng.randint(1, 150)))
    is_float8 = bits == 8 and (activations == "fp8" or (activations is None and rng.random() < 0.4))
    has_offsets = not is_float8 and bool(fixed.get("has_offsets", rng.random() < 0.5))
    low = 0 if bits == 4 and has_offsets else -(1 << int(str(bits)) - 1)
    values = torch.randint(low, low + (1 << int(str(bits))), (outputs, inputs), generator=draw, dtype=torch.int8)
    if is_float8:
        values = values.masked_fill(values & 0x7F == 0x7F, 1).view(torch.float8_e4m3fn)
    scales = torch.rand(outputs, inputs // (group or inputs), generator=draw) / 64 + 0.01
    if rng.random() < 0.6:
        scales = scales.half().float() if rng.random() < 0.5 else scales.bfloat16().float()
    return QuantizedWeight(
        values=values,
        scales=scales,
        offsets=scales * torch.randint(-8, 8, scales.shape, generator=draw) if has_offsets else None,
        order=torch.randperm(inputs, generator=draw) if rng.random() < 0.4 else None,
        group_size=group or inputs,
        bits=int(str(bits)),
        activations=activations,  # type: ignore[arg-type]
        activation_scale=rng.choice((None, 0.02)) if activations is not None else None,
    )


def packed(weight: QuantizedWeight, bias: Tensor | None = None, facts: DeviceFacts = FEW) -> DeviceLinear:
    compact = CompactWeight.of(weight).to(KERNEL_DEVICE)
    found = DeviceLinear.pack(compact, None if bias is None else bias.to(KERNEL_DEVICE), facts)
    assert found is not None
    return found


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the largest error that float32 sums and one rounding to x's type can make.

    A sum of n products in float32 is off by at most n halves of the last place of the sum of magnitudes, in any order;
    a scale, an offset, a bias and the merging of parts take some more roundings.
    """
    wide = x.double()
    if weight.activations is not None:
        how = weight.activation_scale, weight.activation_group
        wide = round_activations(x, weight.activations, *how).double()
    dense = weight.dequantize(torch.float64)
    plain = replace(weight, offsets=None).dequantize(torch.float64)
    exact, magnitude = wide @ dense.T, wide.abs() @ (plain.abs() + (dense - plain).abs()).T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    steps = weight.values.shape[1] + 24
    bound = steps * 2.0**-24 * magnitude + torch.finfo(x.dtype).eps / 2 * exact.abs()
    return exact, bound * 1.01 + torch.finfo(x.dtype).smallest_normal


def assert_near(result: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, told: object) -> None:
    exact, bound = product(x, weight, bias)
    worst = ((result.cpu().double() - exact).abs() / bound).max()
    assert result.dtype is x.dtype
    assert float(worst) <= 1, (told, float(worst), weight)  # a NaN is not, either


@pytest.mark.parametrize("seed", SEEDS)
def test_products_are_those_of_the_dequantised_weight(seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for turn in range(8):
        weight = draw_weight(rng, draw, bits=(4, 8)[turn % 2])
        outputs, inputs = weight.values.shape
        bias = torch.randn(outputs, generator=draw) if rng.random() < 0.5 else None
        layer = packed(weight, bias, rng.choice((FEW, MANY, DeviceFacts(8, has_float8=False, scales_rows=False))))
        dtype = rng.choice(DTYPES)
        for rows in (1, rng.choice((2, 16, 17)), rng.randint(3, 70)):
            x = torch.randn(rows, inputs, generator=draw).to(dtype)

            result = layer.forward(x.to(KERNEL_DEVICE), rng.choice(TILES))

            assert_near(result, x, weight, bias, (f"seed {seed}", dtype, rows))


@pytest.mark.parametrize("seed", fresh_seeds(1))
@pytest.mark.slow
def test_inputs_cut_into_parts_are_added_whatever_their_number(seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for activations, bits in ((None, 4), (None, 8), ("int8", 8), ("fp8", 8)):
        weight = draw_weight(rng, draw, activations=activations, bits=bits, group=0)
        values = torch.randint(-8, 8, (20, 3000), generator=draw, dtype=torch.int8)
        values = values.to(torch.float8_e4m3fn) if activations == "fp8" else values
        weight = replace(weight, values=values, scales=torch.rand(20, 1), offsets=None, order=None, group_size=3000)
        x, bias = torch.randn(3, 3000, generator=draw), torch.randn(20, generator=draw)
        for processors in (1, 3, 132):
            facts = DeviceFacts(processors, has_float8=False, scales_rows=False)
            assert_near(packed(weight, bias, facts).forward(x.to(KERNEL_DEVICE)), x, weight, bias, f"seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", fast_and_slow((4,), fresh_seeds(2)))
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_integers_on_both_sides_give_the_bits_of_exact_sums_for_any_rows_and_parts(
    seed: int, dtype: torch.dtype
) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for bits, inputs in ((4, 1100), (8, rng.randint(1, 300)), (8, 1100)):  # the longest are cut into two parts
        weight = draw_weight(rng, draw, activations="int8", bits=bits, group=0, has_offsets=False)
        values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (70, inputs), generator=draw, dtype=torch.int8)
        order = torch.randperm(inputs, generator=draw) if rng.random() < 0.5 else None
        scales = torch.rand(70, 1, generator=draw)
        weight = replace(weight, values=values, scales=scales, order=order, group_size=inputs)
        outputs = 70
        bias = torch.randn(outputs, generator=draw)
        x = torch.randn(40, inputs, generator=draw).to(dtype)
        scales = x.float().abs().amax(1, keepdim=True) / 127
        if weight.activation_scale is not None:
            scales = torch.full_like(scales, weight.activation_scale)
        integers = (x.float() / scales).round().clamp(-128, 127).to(torch.int64)
        ordered = integers if weight.order is None else integers[:, weight.order]
        sums = (ordered @ weight.values.to(torch.int64).T).float()
        expected = (sums * weight.scales.T * scales + bias).to(dtype)

        for facts in (FEW, MANY):
            layer = packed(weight, bias, facts)
            assert torch.equal(layer.forward(x.to(KERNEL_DEVICE)).cpu(), expected), f"seed {seed}"
            assert torch.equal(layer.forward(x[7:8].to(KERNEL_DEVICE)).cpu(), expected[7:8]), f"seed {seed}"


@pytest.mark.parametrize("has_float8", [False, True])
@pytest.mark.parametrize("seed", fast_and_slow((5,), fresh_seeds(1)))
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_blocks_of_float8_are_multiplied_with_or_without_instructions_for_float8(seed: int, has_float8: bool) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    facts = DeviceFacts(1, has_float8=has_float8, scales_rows=False)
    for block in (32, 128):
        inputs, outputs = block * rng.randint(1, 4), rng.randint(1, 70)
        weight = draw_weight(rng, draw, activations="fp8", bits=8, group=0)
        weight = replace(
            weight,
            values=torch.randn(outputs, inputs, generator=draw).to(torch.float8_e4m3fn),
            scales=torch.rand(outputs, inputs // block, generator=draw),
            order=None, group_size=block, activation_scale=None, activation_group=rng.choice((block, None, inputs)),
        )  # fmt: skip
        for rows in (1, 30):
            x = torch.randn(rows, inputs, generator=draw, dtype=torch.float32).to(torch.bfloat16)
            assert_near(packed(weight, None, facts).forward(x.to(KERNEL_DEVICE)), x, weight, None, f"seed {seed}")
            whole = replace(weight, scales=weight.scales[:, :1].contiguous(), group_size=inputs)
            assert_near(packed(whole, None, facts).forward(x.to(KERNEL_DEVICE)), x, whole, None, f"seed {seed}")


@pytest.mark.parametrize("seed", fast_and_slow((6,), fresh_seeds(1)))
def test_float8_with_a_scale_for_each_row_is_multiplied_by_torch_where_it_can(seed: int) -> None:
    if not can_scale_rows(KERNEL_DEVICE):
        pytest.skip("this torch has no product of float8 with scales of rows here")
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    facts = DeviceFacts(1, has_float8=False, scales_rows=True)
    for outputs in (48, 47):  # the second one is left to the kernel
        weight = draw_weight(rng, draw, activations="fp8", bits=8, group=0)
        weight = replace(
            weight,
            values=torch.randn(outputs, 64, generator=draw).to(torch.float8_e4m3fn),
            scales=torch.rand(outputs, 1, generator=draw), order=torch.randperm(64, generator=draw), group_size=64,
        )  # fmt: skip
        bias = torch.randn(outputs, generator=draw).bfloat16()
        layer = packed(weight, bias, facts)
        for rows in (1, 5, 33):
            x = torch.randn(rows, 64, generator=draw).bfloat16()
            exact, bound = product(x, weight, bias)
            result = layer.forward(x.to(KERNEL_DEVICE)).cpu().double()
            # torch may round to bfloat16 before it adds the bias.
            assert bool(((result - exact).abs() <= bound + 2.0**-8 * (exact - bias.double()).abs()).all()), seed
            assert_near(layer.forward(x.float().to(KERNEL_DEVICE)), x.float(), weight, bias, f"seed {seed}")


@pytest.mark.parametrize("seed", fast_and_slow((7,), fresh_seeds(2)))
def test_rows_of_the_weight_are_those_of_the_dequantised_one(seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for bits in (4, 4, 8, 8):
        weight = draw_weight(rng, draw, bits=bits)
        tokens = torch.randint(weight.values.shape[0], (6,), generator=draw)
        got = packed(weight).embed(tokens.to(KERNEL_DEVICE), torch.float32)
        assert torch.equal(got.cpu(), weight.dequantize()[tokens]), f"seed {seed}"


@pytest.mark.parametrize("seed", fast_and_slow((8,), fresh_seeds(2)))
def test_packed_nibbles_are_unpacked_and_a_step_is_one_piece_of_memory(seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for depth in (16, 32, 64):
        outputs, inputs = rng.randint(1, 40), rng.randint(1, 300)
        values = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.int8)
        steps = pack_nibbles(values, depth)
        assert steps.shape == (-(-inputs // (2 * depth)), outputs, depth) and steps.is_contiguous()
        assert torch.equal(unpack_nibbles(steps, inputs), values), f"seed {seed}"


def test_memory_is_that_of_the_compact_weight() -> None:
    for bits, group in ((4, 32), (8, 128)):
        compact = CompactWeight.of(quantize_weight(torch.randn(64, 128), bits))
        layer = DeviceLinear.pack(compact, None, FEW)
        assert layer is not None and layer.nbytes == compact.nbytes, group
        if bits == 8:
            assert layer._weight.values.data_ptr() == compact.values.data_ptr()


def test_other_rows_do_not_matter_and_a_nan_stays_in_its_row() -> None:
    draw = torch.Generator().manual_seed(9)
    for weight in (
        quantize_weight(torch.randn(40, 96, generator=draw), 4),
        replace(quantize_weight(torch.randn(40, 96, generator=draw), 8), activations="int8"),
    ):
        layer, x = packed(weight), torch.randn(12, 96, generator=draw)
        x[5, 17] = torch.nan
        result = layer.forward(x.to(KERNEL_DEVICE)).cpu()
        assert result[5].isnan().all()
        others = [row for row in range(12) if row != 5]
        assert result[others].isfinite().all()
        assert torch.equal(layer.forward(x[:1].to(KERNEL_DEVICE)).cpu(), result[:1])
        assert layer.forward(x[:0].to(KERNEL_DEVICE)).shape == (0, 40)


def weight_of(group: int, inputs: int = 96, **fields: object) -> CompactWeight:
    values = torch.ones(4, inputs, dtype=torch.int8)
    values = values.to(torch.float8_e4m3fn) if fields.pop("is_float8", False) else values
    known = {"offsets": None, "order": None, "bits": 8} | fields
    scales = torch.ones(4, max(1, inputs // group))
    return CompactWeight.of(QuantizedWeight(values, scales, group_size=group, **known))  # type: ignore[arg-type]


def test_weights_that_the_kernels_do_not_know_are_left_to_torch() -> None:
    not_a_number = weight_of(96, is_float8=True)
    not_a_number.values.view(torch.uint8)[1, 1] = 0x7F
    for refused in (
        weight_of(24),  # no multiple of 16
        weight_of(16, activations="int8"),
        weight_of(16, activations="fp8", is_float8=True),
        weight_of(96, activations="int8", activation_group=48),
        weight_of(32, activations="fp8", is_float8=True, activation_group=32, order=torch.arange(95, -1, -1)),
        weight_of(1 << 18, 1 << 18, activations="int8"),
        weight_of(96, activations="fp8"),  # integers of 8 bits beside float8
        not_a_number,
    ):
        assert not can_multiply(refused)
        assert DeviceLinear.pack(refused, None, FEW) is None
    for taken in (weight_of(16), weight_of(96), weight_of(32, activations="int8"), weight_of(48, is_float8=True)):
        assert can_multiply(taken)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_has_moved_gives_the_same_product(bits: int) -> None:
    """As the weights of an expert do whose slot changes."""
    rng, draw = random.Random(bits), torch.Generator().manual_seed(bits)
    weight = draw_weight(rng, draw, bits=bits, group=32, has_offsets=True)
    layer = packed(weight)
    x = torch.randn(3, weight.values.shape[1], generator=draw).bfloat16().to(KERNEL_DEVICE)
    expected = layer.forward(x)
    rows = torch.arange(weight.values.shape[0], device=KERNEL_DEVICE)
    embedded = layer.embed(rows, torch.float32)
    for tensor in layer.storage():
        moved = tensor.clone()
        tensor.zero_()
        tensor.set_(moved)  # type: ignore[arg-type]
    layer.moved()
    assert torch.equal(layer.forward(x), expected)
    assert torch.equal(layer.embed(rows, torch.float32), embedded)
