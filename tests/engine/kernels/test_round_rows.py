"""Rows rounded to 8 bits against the definition in torch."""

import pytest
import torch
from torch import Tensor

from tests.engine.attention.scene import KERNEL_DEVICE
from tests.seeds import fresh_seeds
from tiercel.engine.kernels.quantized_kv import FP8, INT8
from tiercel.engine.kernels.round_rows import RowRounding, round_rows
from tiercel.engine.models.activation_rounding import round_activations

pytestmark = pytest.mark.usefixtures("poisoned")
KINDS = {"int8": INT8.value, "fp8": FP8.value}


def rounded(x: Tensor, kind: str, scale: float | None = None, group: int | None = None) -> Tensor:
    """Return the numbers that the kernel's results stand for, as the definition computes them."""
    numbers, scales = round_rows(x.to(KERNEL_DEVICE), RowRounding(KINDS[kind], scale, group))
    wide = (numbers if kind == "int8" else numbers.view(torch.float8_e4m3fn)).float()
    assert scales.shape == (x.shape[0], x.shape[1] // (group or x.shape[1]))
    return (wide.view(*scales.shape, -1) * scales[:, :, None]).view(x.shape).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", [1, *fresh_seeds(2)])
@pytest.mark.sampled(1)
def test_rows_are_rounded_to_the_bit_as_the_definition_rounds_them(seed: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(seed)
    for size, group in ((1, None), (33, None), (96, 32), (640, 128), (1000, None)):
        x = torch.randn(5, size, generator=rng) * torch.logspace(-6, 2, 5)[:, None]
        x[2], x[3, 0] = 0, -0.0
        x = x.to(dtype)
        for kind in KINDS:
            for scale, own in ((None, None), (0.02, None), (0.003, None), *(((None, group),) if group else ())):
                wanted = round_activations(x, kind, scale, own)  # type: ignore[arg-type]
                assert torch.equal(rounded(x, kind, scale, own), wanted), f"seed {seed} {kind} {scale} {own}"


def test_halves_go_to_the_even_integer_and_what_is_too_large_to_the_largest() -> None:
    steps = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -127.5, -128.5, 1e30]])

    assert rounded(steps, "int8", 1.0).tolist() == [[0, 2, 2, 0, -2, 126, 127, -128, -128, 127]]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_number_stay_without_one_and_change_no_other_row(kind: str) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(7))
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    good = [0, 2, 4]

    assert torch.equal(rounded(x, kind)[good], rounded(x[good], kind))
    assert rounded(x, kind)[[1, 3]].isnan().all()
    assert rounded(x, kind, 0.05)[1].isnan().all()
    assert torch.equal(rounded(x, kind, 0.05)[3], round_activations(x[3:4], kind, 0.05)[0])  # type: ignore[arg-type]
