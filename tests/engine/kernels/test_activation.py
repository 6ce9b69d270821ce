"""The activation and its product against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from tests.engine.kernels.checking import ROUNDING, draw, relative_error
from tiercel.engine.kernels.activation import silu_mul

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (3, 5), (4, 1024), (2, 1500), (1, 3000)])
def test_the_product_is_that_of_torch(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = draw(1, rows, 2 * inner, dtype=dtype) * 3
    gate, up = gate_up.chunk(2, dim=-1)

    out = silu_mul(gate_up)

    assert out.dtype is dtype
    assert relative_error(out, F.silu(gate) * up) < 1e-4
    assert relative_error(out, F.silu(gate.double()) * up.double()) < ROUNDING[dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy, under the interpreter
def test_far_gates_are_closed_or_open() -> None:
    gate_up = torch.tensor([[-1e4, -80.0, 80.0, 1e4, 2.0, 3.0, 4.0, 5.0]])

    out = silu_mul(gate_up)

    torch.testing.assert_close(out, torch.tensor([[-0.0, 0.0, 320.0, 5e4]]), atol=1e-20, rtol=1e-6)
