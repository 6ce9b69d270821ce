"""Packed matrix products of every processor class against float64, on ragged shapes in poisoned memory."""

import random

import pytest
import torch
from torch import Tensor

from tests.engine.native.classes import CLASSES, library_of
from tests.seeds import fresh_seeds
from tiercel.engine.native.linear import PackedLinear
from tiercel.engine.native.table import CpuClass

GUARD = 64  # poisoned elements before and behind every operand
TOLERANCE_BY_DTYPE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
WEIGHT_DTYPES = (torch.bfloat16, torch.float16)


def guarded(source: Tensor) -> Tensor:
    """Return a copy with NaN before its first and behind its last element."""
    memory = torch.full((source.numel() + 2 * GUARD,), float("nan"), dtype=source.dtype)
    memory[GUARD:-GUARD] = source.flatten()
    return memory[GUARD:-GUARD].view(source.shape)


def threads(count: int) -> None:
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
@pytest.mark.sampled(5)
def test_products_agree_with_float64(cpu_class: CpuClass, seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(20):
        outputs = rng.choice((1, 15, 16, 31, 33, 64, rng.randint(1, 300)))
        inputs = rng.choice((1, 2, 7, 255, 256, 257, 512, 513, rng.randint(1, 1200)))
        weight = torch.randn(outputs, inputs, generator=draw).to(rng.choice(WEIGHT_DTYPES))
        bias = torch.randn(outputs, generator=draw) if rng.random() < 0.5 else None
        packed = PackedLinear(library_of(cpu_class), guarded(weight), bias)
        for rows in (1, 2, rng.randint(3, 13), rng.randint(14, 130)):
            threads(rng.choice((1, 2)))
            dtype = rng.choice(tuple(TOLERANCE_BY_DTYPE))
            x = torch.randn(rows, inputs, generator=draw).to(dtype)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())

            result = packed.forward(guarded(x))

            error = (result.double() - expected).abs().max() / expected.abs().max()
            assert error <= TOLERANCE_BY_DTYPE[dtype], (seed, weight.dtype, dtype, rows, outputs, inputs)


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("dtype", TOLERANCE_BY_DTYPE)
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_nothing_beside_the_result_is_written(
    cpu_class: CpuClass, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    library, code = library_of(cpu_class), {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    outputs, inputs, rows = 45, 301, 17
    size = library.linear_bytes(outputs, inputs)
    memory = torch.full((size + 128,), 0xA5, dtype=torch.uint8)
    weight, x = torch.randn(outputs, inputs).to(weight_dtype), torch.randn(rows, inputs).to(dtype)
    y = torch.full((rows * outputs + 2 * GUARD,), 7.0, dtype=dtype)
    packed, result = memory[64:-64].data_ptr(), y[GUARD:].data_ptr()

    library.linear_pack(code[weight_dtype], weight.data_ptr(), packed, outputs, inputs)
    library.linear(code[weight_dtype], code[dtype], x.data_ptr(), packed, None, result, rows, outputs, inputs)

    assert (memory[:64] == 0xA5).all()
    assert (memory[-64:] == 0xA5).all()
    assert (y[:GUARD] == 7).all()
    assert (y[-GUARD:] == 7).all()


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("dtype", TOLERANCE_BY_DTYPE)
def test_a_row_depends_neither_on_the_other_rows_nor_on_the_threads(cpu_class: CpuClass, dtype: torch.dtype) -> None:
    packed = PackedLinear(library_of(cpu_class), torch.randn(150, 700).bfloat16(), torch.randn(150))
    x = torch.randn(130, 700).to(dtype)
    x[3], x[40, 5], x[129, 0] = float("nan"), float("inf"), float("nan")
    threads(2)
    together = packed.forward(x)
    threads(1)

    for row in (0, 2, 4, 39, 41, 128):
        assert torch.equal(packed.forward(x[row : row + 1]), together[row : row + 1])
        assert together[row].isfinite().all()
    assert torch.equal(packed.forward(x[41:101]), together[41:101])
    assert together[3].isnan().all()
    assert not together[40].isfinite().any()


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_rows_of_the_weight_are_the_embedding(cpu_class: CpuClass, weight_dtype: torch.dtype) -> None:
    weight = torch.randn(101, 33).to(weight_dtype)
    packed = PackedLinear(library_of(cpu_class), weight, None)
    tokens = torch.tensor([0, 100, 31, 32, 33, 5, 5, 64])

    for dtype in TOLERANCE_BY_DTYPE:
        assert torch.equal(packed.embed(tokens, dtype), weight[tokens].to(dtype))
    for wrong in (-1, 101):
        with pytest.raises(IndexError, match="101"):
            packed.embed(torch.tensor([1, wrong]), torch.float32)


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_a_view_is_multiplied_as_its_copy(cpu_class: CpuClass) -> None:
    packed = PackedLinear(library_of(cpu_class), torch.randn(40, 50).half().T.contiguous().T, None)
    x = torch.randn(60, 100)[::2, 50:]

    assert torch.equal(packed.forward(x), packed.forward(x.contiguous()))
    assert packed.forward(x[:0]).shape == (0, 40)
