"""The fused sum and norm against plain torch."""

import pytest
import torch

from tests.engine.kernels.checking import ROUNDING, draw, relative_error
from tiercel.engine.kernels.norm import add_norm
from tiercel.engine.models.layers import rms_norm

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (5, 64), (2, 1000), (4, 4096)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_norm_is_that_of_torch(has_residual: bool, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = draw(1, rows, size, dtype=dtype), draw(2, size, dtype=dtype)
    residual = draw(3, rows, size, dtype=dtype) if has_residual else None
    total = x if residual is None else residual + x
    wanted = rms_norm(total, weight, 1e-5)
    exact = rms_norm(total.double().float(), weight.float(), 1e-5)

    normed, kept = add_norm(x.clone(), None if residual is None else residual.clone(), weight, 1e-5)

    assert torch.equal(kept, total)
    assert normed.dtype is dtype
    assert relative_error(normed, wanted) < 1e-4
    assert relative_error(normed, exact) < ROUNDING[dtype]


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    x, residual = draw(4, 8, 96, dtype=torch.float16), draw(5, 8, 96, dtype=torch.float16) * 512
    weight = torch.ones(96, dtype=torch.float16)
    wanted = rms_norm(residual + x, weight, 1e-6)

    normed, _ = add_norm(x, residual, weight, 1e-6)

    assert (normed != wanted).sum() <= 1  # the square root may be rounded differently


def test_memory_is_reused_with_a_residual() -> None:
    x, residual, weight = draw(6, 2, 8), draw(7, 2, 8), draw(8, 8)

    normed, total = add_norm(x, residual, weight, 1e-5)

    assert normed.data_ptr() == x.data_ptr()
    assert total.data_ptr() == residual.data_ptr()


def test_the_first_norm_does_not_change_its_input() -> None:
    x, weight = draw(9, 2, 8), draw(10, 8)
    before = x.clone()

    normed, total = add_norm(x, None, weight, 1e-5)

    assert total is x
    assert torch.equal(x, before)
    assert normed.data_ptr() != x.data_ptr()
