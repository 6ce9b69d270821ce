"""Attention on a small mixed step, for every combination of types that a model may use."""

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from tiercel.engine.forward.kv_cache import quantize, split_cache, width_of
from tiercel.engine.native.self_tests.base import SelfTest
from tiercel.engine.native.table import CACHE_TYPE_BY_DTYPE, TYPE_BY_DTYPE, AttentionLayer, AttentionStep, KernelTable

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _BLOCKS = 14, 2, 36, 16, 6


def _run_attend(table: KernelTable) -> Sequence[Tensor]:
    """Return the results of a decode, a chunk and a prompt in one call, plain and with all parameters."""
    results: list[Tensor] = []
    starts, contexts = torch.tensor([0, 1, 20, 30]).int(), torch.tensor([87, 70, 10]).int()
    tables = torch.arange(1, 3 * _BLOCKS + 1).view(3, _BLOCKS)
    step = AttentionStep(3, starts.data_ptr(), contexts.data_ptr(), tables.data_ptr(), _BLOCKS)
    sinks = torch.linspace(-1, 1, _HEADS)
    for query_type, kv_type in ((q, k) for q in TYPE_BY_DTYPE for k in CACHE_TYPE_BY_DTYPE):
        generator = torch.Generator().manual_seed(1)
        query = torch.randn(30, _HEADS, _HEAD_DIM, generator=generator).to(query_type)
        rows = torch.randn(3 * _BLOCKS + 1, _BLOCK_SIZE, _KV_HEADS, 2 * _HEAD_DIM, generator=generator)
        kv = rows.to(kv_type) if kv_type.itemsize > 1 else _quantized(rows, kv_type)
        shape = (_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, kv.stride(0))
        kinds = TYPE_BY_DTYPE[query_type], CACHE_TYPE_BY_DTYPE[kv_type]
        for layer in (
            AttentionLayer(*kinds, *shape, 0, None, 0.2, 0.0),
            AttentionLayer(*kinds, *shape, 40, sinks.data_ptr(), 0.2, 3.0),
        ):
            out = torch.empty_like(query)
            stride = _HEADS * _HEAD_DIM
            table.attend(byref(step), byref(layer), query.data_ptr(), stride, kv.data_ptr(), out.data_ptr())
            results.append(out)
    return results


def _quantized(rows: Tensor, kv_type: torch.dtype) -> Tensor:
    """Return a cache of 8 bits with these keys and values."""
    kv = torch.zeros(*rows.shape[:3], width_of(_HEAD_DIM, kv_type), dtype=kv_type)
    parts = split_cache(kv)
    for half, vectors in enumerate(rows.split(_HEAD_DIM, dim=-1)):
        numbers, parts.scales[..., half] = quantize(vectors, kv_type)
        parts.rows.view(torch.uint8)[..., half * _HEAD_DIM :][..., :_HEAD_DIM] = numbers.view(torch.uint8)
    return kv


CHECKS = (SelfTest(("attend",), _run_attend),)
