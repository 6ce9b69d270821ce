"""The self-tests of norm, rotation and activation."""

import torch
from torch import Tensor

from tiercel.engine.forward.kv_cache import width_of
from tiercel.engine.native.self_tests.base import SelfTest
from tiercel.engine.native.table import CACHE_TYPE_BY_DTYPE, TYPE_BY_DTYPE, HeadsPlan, KernelTable

_EPS = 1e-5


def _run_add_norm(table: KernelTable) -> list[Tensor]:
    results: list[Tensor] = []
    for dtype, kind in TYPE_BY_DTYPE.items():
        x, residual, weight = (_draw(seed, 3, 37).to(dtype) for seed in range(3))
        out = torch.empty_like(x)
        table.add_norm(kind, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), 3, 37, _EPS)
        results += [out, residual]
    return results


def _run_silu_mul(table: KernelTable) -> list[Tensor]:
    results: list[Tensor] = []
    for dtype, kind in TYPE_BY_DTYPE.items():
        gate_up = (4 * _draw(1, 3, 74)).to(dtype)
        out = torch.empty(3, 37, dtype=dtype)
        table.silu_mul(kind, gate_up.data_ptr(), out.data_ptr(), 3, 37)
        results.append(out)
    return results


def _run_store_heads(table: KernelTable) -> list[Tensor]:
    """Three query heads and one key head of 38 numbers, in all types of activations and cache."""
    tokens, heads, head_dim, block_size = 3, 3, 38, 2
    cos, sin = _draw(1, tokens, head_dim // 2), _draw(2, tokens, head_dim // 2)
    slots, offsets = torch.tensor([2, 0, 1]), torch.tensor([1, 0, 0])
    results: list[Tensor] = []
    for dtype, kind in TYPE_BY_DTYPE.items():
        qkv = _draw(3, tokens, (heads + 2) * head_dim).to(dtype)
        weight = _draw(4, head_dim).to(dtype)
        for kv_dtype, kv_kind in CACHE_TYPE_BY_DTYPE.items():
            # A norm differs in the order of its sum, and a difference of a bit may be one of 8 bits' whole step.
            norm = weight.data_ptr() if kind and kv_dtype.itemsize > 1 else None
            query = torch.empty(tokens, heads, head_dim, dtype=dtype)
            kv = torch.zeros(3, block_size, 1, width_of(head_dim, kv_dtype), dtype=kv_dtype)
            rows = 2 * head_dim
            plan = HeadsPlan(
                *(tokens, heads, 1, head_dim, kv.stride(0), rows, rows),
                *(cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), offsets.data_ptr(), kind, kv_kind),
                block_size * rows,
            )
            table.store_heads(plan, qkv.data_ptr(), norm, norm, _EPS, _EPS, query.data_ptr(), kv.data_ptr())
            results += [query, kv if kv_dtype.itemsize > 1 else kv.view(torch.uint8).float()]
    return results


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CHECKS = (
    SelfTest(("add_norm",), _run_add_norm),
    SelfTest(("silu_mul",), _run_silu_mul),
    SelfTest(("store_heads",), _run_store_heads),
)
