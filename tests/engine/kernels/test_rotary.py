"""Rotation and writing of keys and values to the cache, against plain torch."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.checking import draw, relative_error
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.kernels.rotary import position_angles, store_heads
from tiercel.engine.models.config import RopeConfig
from tiercel.engine.models.layers import rms_norm
from tiercel.engine.models.rope import Rotary, rotate

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def rotary_of(head_dim: int, dtype: torch.dtype, kind: Literal["default", "yarn"] = "default") -> Rotary:
    factor = 1.3 if kind == "yarn" else 1.0
    config = RopeConfig(kind=kind, theta=10_000.0, factor=4.0, original_max_position=64, attention_factor=factor)
    return Rotary(config, head_dim, dtype, CPU)


def ragged_state(seed: int) -> ForwardState:
    """Return slices of three sequences with scattered blocks: a chunk, a decode, a prompt."""
    tables = (torch.randperm(15, generator=torch.Generator().manual_seed(seed)) + 1).view(3, 5)
    return ForwardState.of_slices(tables, (6, 18, 0), (11, 19, 3), BLOCK_SIZE)


def arena(kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return sixteen slots of three layers, full of NaN."""
    return torch.full((16, 3, BLOCK_SIZE, kv_heads, 2 * head_dim), torch.nan, dtype=dtype)


def place_by_torch(
    qkv: Tensor, weights: tuple[Tensor, Tensor] | None, rotary: Rotary, kv: Tensor, state: ForwardState
) -> Tensor:
    kv_heads, head_dim = kv.shape[2], kv.shape[3] // 2
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if weights is not None:
        query, key = rms_norm(query, weights[0], 1e-5), rms_norm(key, weights[1], 1e-6)
    angles = rotary.angles(state.positions)
    write_rows(rotate(key, *angles), value, kv, state)
    return rotate(query, *angles)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (6, 2, 20), (5, 1, 128), (3, 3, 16)])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.sampled(3)
def test_heads_equal_those_of_torch(
    has_norms: bool, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    state, rotary = ragged_state(heads), rotary_of(head_dim, dtype)
    qkv = draw(1, 9, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = (draw(2, head_dim, dtype=dtype), draw(3, head_dim, dtype=dtype)) if has_norms else None
    wanted_kv, kv = (arena(kv_heads, head_dim, dtype) for _ in range(2))
    wanted = place_by_torch(qkv, weights, rotary, wanted_kv[:, 1], state)

    norms = None if weights is None else ((weights[0], 1e-5), (weights[1], 1e-6))
    angles = position_angles(state.positions, rotary.frequencies, rotary.scale, dtype)
    query = store_heads(qkv, norms, angles, kv[:, 1], state)

    assert query.is_contiguous()
    assert relative_error(query, wanted) < 1e-3
    is_written = ~wanted_kv.isnan()
    assert torch.equal(~kv.isnan(), is_written)  # nothing but the slots of this layer
    assert relative_error(kv[is_written], wanted_kv[is_written]) < 1e-3
    values = kv[:, 1, :, :, head_dim:]
    assert torch.equal(values.nan_to_num(), wanted_kv[:, 1, :, :, head_dim:].nan_to_num())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_angles_are_those_of_torch(kind: Literal["default", "yarn"], dtype: torch.dtype) -> None:
    rotary = rotary_of(20, dtype, kind)
    positions = torch.tensor([0, 1, 7, 4095, 131_071])
    wanted = [tensor[:, 0, :10] for tensor in rotary.angles(positions)]

    angles = position_angles(positions, rotary.frequencies, rotary.scale, dtype)

    for got, right in zip(angles, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-6 if dtype is torch.float32 else 1e-3)


def test_padded_rows_write_the_null_block_alone() -> None:
    tables = torch.tensor([[3], [0], [0]])
    state = ForwardState.of_slices(tables, (2, 0, 0), (3, 1, 1), BLOCK_SIZE)
    rotary, kv = rotary_of(8, torch.float32), arena(2, 8, torch.float32)

    angles = position_angles(state.positions, rotary.frequencies, rotary.scale, torch.float32)
    store_heads(draw(1, 3, 8 * 8), None, angles, kv[:, 0], state)

    written = (~kv.isnan()).nonzero()[:, :3].unique(dim=0).tolist()
    assert written == [[0, 0, 0], [3, 0, 2]]


def test_slots_beyond_two_billion_elements_are_reached() -> None:
    far = 2**31 + 64
    memory = torch.empty(far + 64, dtype=torch.float16)  # only written pages are allocated
    kv = memory.as_strided((2, 2, 1, 16), (far, 16, 16, 1))
    state = ForwardState.of_slices(torch.tensor([[1]]), (1,), (2,), 2)
    rotary, qkv = rotary_of(8, torch.float16), draw(1, 1, 24, dtype=torch.float16)

    store_heads(qkv, None, position_angles(state.positions, rotary.frequencies, 1.0, torch.float16), kv, state)

    assert torch.equal(kv[1, 1, 0, 8:], qkv[0, 16:])
