"""Matrix products with packed weights, on shapes that leave rests of panels, tiles, slices and pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.engine.native.self_tests.base import SelfTest
from tiercel.engine.native.table import TYPE_BY_DTYPE, KernelTable

_OUTPUTS, _INPUTS = 75, 301


def _run_linear(table: KernelTable) -> Sequence[Tensor]:
    """Return products of a few and of many rows, and rows of the weight, for every pair of types."""
    results: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    bias, tokens = torch.randn(_OUTPUTS, generator=generator), torch.tensor([0, 40, _OUTPUTS - 1])
    for weight_type in (torch.bfloat16, torch.float16):
        weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator).to(weight_type)
        kind = TYPE_BY_DTYPE[weight_type]
        packed = torch.empty(table.linear_bytes(_OUTPUTS, _INPUTS), dtype=torch.uint8)
        table.linear_pack(kind, weight.data_ptr(), packed.data_ptr(), _OUTPUTS, _INPUTS)
        for dtype, code in TYPE_BY_DTYPE.items():
            rows = torch.empty(len(tokens), _INPUTS, dtype=dtype)
            table.embed(
                *(kind, code, tokens.data_ptr(), packed.data_ptr(), rows.data_ptr()),
                *(len(tokens), _OUTPUTS, _INPUTS),
            )
            results.append(rows)
            for count in (1, 5, 40):
                x = torch.randn(count, _INPUTS, generator=generator).to(dtype)
                y = torch.empty(count, _OUTPUTS, dtype=dtype)
                table.linear(
                    *(kind, code, x.data_ptr(), packed.data_ptr(), bias.data_ptr(), y.data_ptr()),
                    *(count, _OUTPUTS, _INPUTS),
                )
                results.append(y)
    return results


CHECKS = (SelfTest(("linear_bytes", "linear_pack", "linear", "embed"), _run_linear),)
