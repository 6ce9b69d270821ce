"""The repaired bfloat16 of Triton's interpreter against torch's."""

import pytest
import torch
import triton
import triton.language as tl

from tests.engine.kernels.bfloat16 import narrow, widen
from tiercel.engine.kernels.interpreter import is_interpreted


@triton.jit
def add_kernel(x, y, out):
    tl.store(out, tl.load(x) + tl.load(y))


def test_rounding_is_that_of_torch() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.3e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, 1.99999])
    values = torch.cat((special, torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100))

    bits = narrow(values.numpy())

    assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), values.bfloat16())
    assert torch.equal(torch.from_numpy(widen(bits)), values.bfloat16().float())
    assert torch.from_numpy(narrow(torch.tensor([torch.nan]).numpy())).view(torch.bfloat16).isnan().all()


@pytest.mark.skipif(not is_interpreted(), reason="a GPU adds bfloat16 numbers by itself")
def test_arithmetic_on_bfloat16_numbers_is_refused() -> None:
    x = torch.ones(1, dtype=torch.bfloat16)

    with pytest.raises(Exception, match="on bfloat16 numbers"):
        add_kernel[(1,)](x, x, torch.empty_like(x))
