"""Matrix products with weights of 4 and 8 bits, on shapes that leave rests of panels, tiles, passes and chunks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.engine.native.self_tests.base import SelfTest
from tiercel.engine.native.table import TYPE_BY_DTYPE, KernelTable, QuantizedLayout

_OUTPUTS = 75
_KINDS = (
    (8, 301, 301, False, False, False),
    (8, 288, 32, True, False, False),
    (8, 320, 64, False, True, False),
    (8, 301, 301, True, True, False),
    (4, 301, 301, True, False, False),
    (4, 288, 32, False, False, False),
    (8, 301, 301, False, False, True),
)
"""Bits, inputs, group, whether there are offsets, whether x is rounded, whether values are float8."""


def _run_products(table: KernelTable) -> Sequence[Tensor]:
    """Return products of a few and of many rows, and rows of the weight, for every kind of weight and type of x."""
    results: list[Tensor] = []
    for seed, (bits, inputs, group, has_offsets, rounds_x, is_float8) in enumerate(_KINDS):
        draw = torch.Generator().manual_seed(seed)
        most = 1 << bits - 1
        values = torch.randint(-most, most, (_OUTPUTS, inputs), generator=draw, dtype=torch.int8)
        if is_float8:
            values[values & 0x7F == 0x7F] = 1  # NaN
        scales = torch.rand(_OUTPUTS, inputs // group, generator=draw) + 0.1
        offsets = torch.randn(_OUTPUTS, inputs // group, generator=draw)
        bias, tokens = torch.randn(_OUTPUTS, generator=draw), torch.tensor([0, 40, _OUTPUTS - 1])
        order = torch.randperm(inputs, generator=draw).int()
        layout = QuantizedLayout(
            *(_OUTPUTS, inputs, group, order.data_ptr(), bits, is_float8, TYPE_BY_DTYPE[torch.float32]),
            *(has_offsets, rounds_x),
        )
        packed = torch.empty(table.quantized_bytes(layout), dtype=torch.uint8)
        table.quantized_pack(
            *(layout, values.data_ptr(), scales.data_ptr()),
            *(offsets.data_ptr() if has_offsets else None, packed.data_ptr()),
        )
        for dtype, kind in TYPE_BY_DTYPE.items():
            rows = torch.empty(len(tokens), inputs, dtype=dtype)
            table.quantized_embed(layout, kind, tokens.data_ptr(), packed.data_ptr(), rows.data_ptr(), len(tokens))
            results.append(rows)
            for count in (1, 7, 20):
                x = torch.randn(count, inputs, generator=draw).to(dtype)
                y = torch.empty(count, _OUTPUTS, dtype=dtype)
                room = torch.empty(table.quantized_room(layout, kind, count), dtype=torch.uint8)
                table.quantized_linear(
                    *(layout, kind, x.data_ptr(), packed.data_ptr(), bias.data_ptr(), y.data_ptr(), count),
                    room.data_ptr(),
                )
                results.append(y)
    return results


_KERNELS = ("quantized_bytes", "quantized_pack", "quantized_room", "quantized_linear", "quantized_embed")
CHECKS = (SelfTest(_KERNELS, _run_products),)
