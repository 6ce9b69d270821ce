"""The native operators of every class of processors against those in plain torch, on random ragged shapes."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.native.classes import CLASSES, library_of
from tests.seeds import fresh_seeds
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.config import RopeConfig
from tiercel.engine.models.layers import RMSNorm, rms_norm
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.rope import Rotary, rotate
from tiercel.engine.native.table import CpuClass

CPU = torch.device("cpu")
SEEDS = [1, *fresh_seeds(2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One rounding of the result may go the other way.
ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
PARAMS = AttentionParams(scale=1.0)


class QueryReader:
    """A `PagedReader` that returns the queries."""

    is_capturable = False

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        return query

    def attend(self, *_: object) -> Tensor:
        raise NotImplementedError


def ops_of(cpu_class: CpuClass) -> NativeOps:
    return NativeOps(library_of(cpu_class), QueryReader())


def draw(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers in the middle of memory that is NaN elsewhere."""
    count = math.prod(shape)
    memory = torch.full((count + 64,), torch.nan, dtype=dtype)
    memory[32 : 32 + count] = torch.randn(count, generator=torch.Generator().manual_seed(rng.randrange(1 << 31)))
    return memory[32 : 32 + count].view(shape)


def assert_within_rounding(got: Tensor, wanted: Tensor, exact: Tensor, rounding: float) -> None:
    """Compare each number with the same operator in torch; the float64 result bounds the error of sums."""
    tolerance = rounding * exact.abs().clamp_min(exact.abs().mean())
    assert ((got.double() - wanted.double()).abs() <= tolerance).all()
    assert ((got.double() - exact).abs() <= 2 * tolerance).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cpu_class", CLASSES)
def test_norm_of_a_sum(cpu_class: CpuClass, dtype: torch.dtype, seed: int) -> None:
    rng, ops = random.Random(seed), ops_of(cpu_class)
    rows, size, eps = rng.choice((1, 3, 17, 70)), rng.choice((1, 7, 16, 37, 896, 1200)), 1e-6
    x, residual, weight = (draw(rng, *shape, dtype=dtype) for shape in ((rows, size), (rows, size), (size,)))
    total = x + residual
    wide = total.double()
    exact = weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wanted = rms_norm(total, weight, eps)

    first, same = ops.add_norm(total.clone(), None, weight, eps)
    normed, kept = ops.add_norm(x, residual, weight, eps)

    assert torch.equal(kept, total)
    assert torch.equal(same, total)
    assert torch.equal(first, normed)
    assert_within_rounding(normed, wanted, exact, 2 * ULP[dtype])  # the normed value and the product are rounded


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cpu_class", CLASSES)
def test_activation(cpu_class: CpuClass, dtype: torch.dtype, seed: int) -> None:
    rng, ops = random.Random(seed), ops_of(cpu_class)
    rows, size = rng.choice((1, 3, 17, 70)), rng.choice((1, 7, 16, 37, 1200))
    gate_up = draw(rng, rows, 2 * size, dtype=dtype)
    gate_up[:, :size] *= 8
    gate, up = gate_up.chunk(2, dim=-1)
    exact = F.silu(gate.double()) * up.double()
    wanted = F.silu(gate) * up

    assert_within_rounding(ops.silu_mul(gate_up), wanted, exact, 2 * ULP[dtype])


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_activation_at_the_ends(cpu_class: CpuClass) -> None:
    gate = torch.tensor([-torch.inf, -1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 1e30, torch.inf, torch.nan])
    got = ops_of(cpu_class).silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]

    assert torch.allclose(got[1:-1], F.silu(gate)[1:-1], rtol=1e-6, atol=1e-8)
    assert got[-1].isnan()


def scattered(rng: random.Random, block_size: int) -> ForwardState:
    """Return slices of some sequences, in blocks in random order."""
    count = rng.choice((1, 2, 5))
    starts = [rng.randrange(30) for _ in range(count)]
    ends = [start + rng.choice((1, 1, 2, 19)) for start in starts]
    blocks = -(-max(ends) // block_size)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(rng.randrange(1 << 31))) + 1
    return ForwardState.of_slices(order.view(count, blocks), starts, ends, block_size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cpu_class", CLASSES)
def test_heads(cpu_class: CpuClass, dtype: torch.dtype, kv_dtype: torch.dtype, seed: int) -> None:
    rng, ops = random.Random(seed), ops_of(cpu_class)
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 3, 7))
    head_dim, block_size = rng.choice((2, 16, 20, 38, 64, 128)), rng.choice((1, 4, 16))
    state = scattered(rng, block_size)
    rotary = Rotary(RopeConfig(kind="default", theta=10_000.0, attention_factor=1.3), head_dim, dtype, CPU)
    qkv = draw(rng, len(state.positions), (group + 2) * kv_heads * head_dim, dtype=dtype)
    norms = None
    if rng.random() < 0.5:
        norms = RMSNorm(head_dim, 1e-5, dtype, CPU), RMSNorm(head_dim, 1e-6, dtype, CPU)
        for norm in norms:
            norm.weight = draw(rng, head_dim, dtype=dtype)
    shape = (int(state.block_tables.max()) + 1, 2, block_size, kv_heads, 2 * head_dim)
    kv, wanted_kv = (torch.full(shape, torch.nan, dtype=kv_dtype) for _ in range(2))
    query, key, value = qkv.view(len(qkv), -1, head_dim).split((group * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query, key = norms[0].forward(query), norms[1].forward(key)
    angles = rotary.angles(state.positions)
    wanted = rotate(query, *angles)
    write_rows(rotate(key, *angles).to(kv_dtype), value.to(kv_dtype), wanted_kv[:, 1], state)

    got = ops.attend(qkv, norms, ops.angles(rotary, state.positions), kv[:, 1], state, PARAMS)

    assert got.is_contiguous()
    assert torch.equal(kv.isnan(), wanted_kv.isnan())  # nothing but the slots of this layer
    assert torch.equal(kv[..., head_dim:].nan_to_num(), wanted_kv[..., head_dim:].nan_to_num())
    for mine, theirs in ((got, wanted), (kv.nan_to_num(), wanted_kv.nan_to_num())):
        if norms is None:
            assert torch.equal(mine, theirs)
        else:  # the sums of squares are computed in another order
            rounding = 2 * max(ULP[dtype], ULP[theirs.dtype])
            assert ((mine.double() - theirs.double()).abs() <= rounding * theirs.abs().max().double()).all()


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_two_forwards_in_turn_do_not_share_places(cpu_class: CpuClass) -> None:
    ops, rng = ops_of(cpu_class), random.Random(4)
    rotary = Rotary(RopeConfig(kind="default", theta=10_000.0), 8, torch.float32, CPU)
    states = [
        ForwardState.of_slices(torch.tensor([[slot]]), (start,), (start + 1,), 4) for slot, start in ((1, 2), (3, 0))
    ]
    kv = torch.full((4, 4, 1, 16), torch.nan)
    for state in (*states, *states):
        ops.attend(draw(rng, 1, 24), None, ops.angles(rotary, state.positions), kv, state, PARAMS)

    assert (~kv.isnan()).nonzero()[:, :2].unique(dim=0).tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_slots_beyond_two_billion_elements_are_reached(cpu_class: CpuClass) -> None:
    far = 2**31 + 64
    memory = torch.empty(far + 64, dtype=torch.bfloat16)  # only written pages are allocated
    kv = memory.as_strided((2, 2, 1, 16), (far, 16, 16, 1))
    state = ForwardState.of_slices(torch.tensor([[1]]), (1,), (2,), 2)
    ops, qkv = ops_of(cpu_class), draw(random.Random(1), 1, 24)
    rotary = Rotary(RopeConfig(kind="default", theta=10_000.0), 8, torch.float32, CPU)

    ops.attend(qkv, None, ops.angles(rotary, state.positions), kv, state, PARAMS)

    assert torch.equal(kv[1, 1, 0, 8:], qkv[0, 16:].bfloat16())
