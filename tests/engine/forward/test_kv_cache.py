"""The rounding of keys and values to 8 bits, against the rule written out with exact numbers."""

import math
import random
from fractions import Fraction

import pytest
import torch

from tests.seeds import fresh_seeds
from tiercel.engine.attention.cache_rows import gather_rows, write_rows
from tiercel.engine.forward.kv_cache import (
    LIMIT_BY_DTYPE,
    dequantize,
    head_dim_of,
    is_quantized,
    quantize,
    split_cache,
    width_of,
)
from tiercel.engine.forward.state import ForwardState
from tiercel.values.tier import KVSpec

INT8, FP8 = torch.int8, torch.float8_e4m3fn
FP8_NUMBERS = sorted(
    Fraction(2) ** (max(exponent, 1) - 7) * (Fraction(mantissa, 8) + (exponent > 0))
    for exponent in range(16)
    for mantissa in range(8)
    if (exponent, mantissa) != (15, 7)  # NaN
)


def nearest(x: Fraction, numbers: list[Fraction]) -> Fraction:
    """Return the nearest of ascending numbers; of two, the one whose place is even."""
    return min(enumerate(numbers), key=lambda one: (abs(one[1] - x), one[0] % 2))[1]


def rounded(x: float, bits: int) -> Fraction:
    """Round to a number of significant bits, ties to even."""
    if x == 0:
        return Fraction(0)
    unit = Fraction(2) ** (math.frexp(x)[1] - bits)
    return Fraction(round(Fraction(x) / unit)) * unit


def expected(x: list[float], dtype: torch.dtype) -> tuple[list[Fraction], Fraction]:
    limit = LIMIT_BY_DTYPE[dtype]
    scale = rounded(float(rounded(float(Fraction(max(map(abs, x))) / Fraction(limit)), 24)), 8)
    numbers = []
    for one in x:
        ratio = rounded(float(Fraction(one) / scale), 24)
        magnitude = min(abs(ratio), Fraction(limit))
        whole = Fraction(round(magnitude)) if dtype is INT8 else nearest(magnitude, FP8_NUMBERS)
        numbers.append(whole if ratio >= 0 else -whole)
    return numbers, scale


@pytest.mark.parametrize("dtype", LIMIT_BY_DTYPE, ids=str)
@pytest.mark.parametrize("seed", [*range(20), *fresh_seeds(10)])
def test_vectors_are_rounded_by_the_rule(dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    spread = draw.choice([1e-30, 1e-6, 1.0, 300.0, 1e30])
    x = torch.tensor([draw.gauss(0, spread) * draw.choice([1, 1, 0.01]) for _ in range(draw.choice([2, 6, 64]))])

    numbers, scale = quantize(x, dtype)

    wanted, wanted_scale = expected(x.tolist(), dtype)
    assert scale.item() == float(wanted_scale)
    assert numbers.float().tolist() == [float(one) for one in wanted]


@pytest.mark.parametrize("dtype", LIMIT_BY_DTYPE, ids=str)
def test_a_vector_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 4000)[:, None]

    back = dequantize(*quantize(x, dtype), torch.float32)

    peak = x.abs().amax(-1, keepdim=True)
    # Half a step of int8, with the rounding of the scale; of fp8 a part of the number, and half its smallest step.
    allowed = peak / 127 * 0.502 if dtype is INT8 else x.abs() / 16 + peak / 448 / 512
    assert ((back - x).abs() <= allowed * 1.004).all()


@pytest.mark.parametrize("dtype", LIMIT_BY_DTYPE, ids=str)
def test_a_bad_number_makes_the_whole_vector_bad(dtype: torch.dtype) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(3, 8)
        x[1, 5] = bad

        numbers, scales = quantize(x, dtype)
        back = dequantize(numbers, scales, torch.float32)

        assert back[1].isnan().all()
        assert numbers[1].float().eq(0).all()
        assert scales.view(torch.int16)[1] == 0x7FC0
        torch.testing.assert_close(back[::2], torch.ones(2, 8), atol=2**-8, rtol=0)


@pytest.mark.parametrize("dtype", LIMIT_BY_DTYPE, ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype) -> None:
    limit = LIMIT_BY_DTYPE[dtype]
    x = torch.tensor([0.0, -0.0, 1e-45, 2.0**-126 * limit * 0.99, 2.0**-126 * limit, 3e38, -3.4e38])[:, None]

    numbers, scales = quantize(x, dtype)

    assert scales[:4].tolist() == [0.0] * 4
    assert numbers[:4].float().flatten().tolist() == [0.0] * 4
    assert numbers[4:].float().flatten().tolist() == [limit, limit, -limit]
    assert scales[4] == 2.0**-126
    torch.testing.assert_close(dequantize(numbers, scales, torch.float32)[5:], x[5:], rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8, FP8], ids=str)
def test_the_parts_of_a_cache_lie_in_one_extent_and_do_not_overlap(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    spec = KVSpec(layers=3, kv_heads=2, head_dim=6, block_size=4, dtype=name)
    kv = torch.zeros(5, 3, 4, 2, spec.width, dtype=dtype)

    assert spec.width == width_of(6, dtype)
    assert head_dim_of(kv) == 6
    assert is_quantized(kv) == (dtype in (INT8, FP8))
    assert kv[0].nbytes == spec.block_bytes
    if is_quantized(kv):
        rows, scales = split_cache(kv[:, 1])
        rows.view(torch.uint8)[:] = 1
        scales.view(torch.int16)[:] = 0x0202
        found = kv.view(torch.uint8)[:, 1].flatten(1)
        assert found.shape == (5, 4 * 2 * 16)
        assert found[:, : 4 * 2 * 12].eq(1).all()
        assert found[:, 4 * 2 * 12 :].eq(2).all()
        assert kv.view(torch.uint8)[:, ::2].eq(0).all()


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_a_block_takes_half_of_16_bits_and_four_bytes_a_head(dtype: str, factor: int, narrow: str) -> None:
    wide, small = (KVSpec(layers=24, kv_heads=2, head_dim=64, block_size=16, dtype=one) for one in (dtype, narrow))

    assert small.block_bytes == 24 * 16 * 2 * (128 + 4)
    assert wide.block_bytes / small.block_bytes == pytest.approx(factor * 128 / 132)
    assert repr(wide) != repr(small)


@pytest.mark.parametrize("dtype", LIMIT_BY_DTYPE, ids=str)
def test_rows_are_read_as_they_were_written(dtype: torch.dtype) -> None:
    kv = torch.zeros(6, 2, 4, 3, width_of(10, dtype), dtype=dtype)[:, 1]
    state = ForwardState.of_slices(torch.tensor([[5, 2, 3]]), [0], [11], 4)
    key, value = torch.randn(2, 11, 3, 10, generator=torch.Generator().manual_seed(3))

    write_rows(key, value, kv, state)
    found = gather_rows(kv, state.block_tables[0], 11, torch.float32)

    for got, given in zip(found, (key, value), strict=True):
        assert torch.equal(got, dequantize(*quantize(given, dtype), torch.float32))
    assert split_cache(kv).scales[[0, 1, 4]].eq(0).all()  # no other block is written
