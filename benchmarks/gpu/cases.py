"""Shapes on which kernels are checked, and their tensors: random, ragged, and NaN where no kernel may read."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState

LAYER = 1  # the layer that is used; the others must not change


@dataclass(frozen=True, slots=True)
class Case:
    """The attention of a model. `longest`: the longest context in tokens."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    longest: int = 2500
    layers: int = 2
    spare_slots: int = 3  # unused slots, below all others

    def params(self, device: torch.device, dtype: torch.dtype) -> AttentionParams:
        """The parameters of the model's layer."""
        sinks = torch.randn(self.heads, device=device, dtype=dtype) if self.has_sinks else None
        return AttentionParams(self.head_dim**-0.5, self.window, self.softcap, sinks)


CASES = (
    Case("llama-3-8b", 32, 8, 128),
    Case("far", 32, 8, 128, longest=600, layers=32, spare_slots=2200),  # beyond 2**31 elements
    Case("qwen3-0.6b", 16, 8, 128),
    Case("qwen2-0.5b", 14, 2, 64),
    Case("blocks-128", 32, 8, 128, block_size=128),
    Case("window", 6, 2, 80, block_size=32, window=137),
    Case("sinks", 64, 8, 64, window=128, has_sinks=True),
    Case("softcap", 8, 1, 256, softcap=50.0),
    Case("one-to-one", 12, 12, 96, block_size=48),
)


def draw_slices(longest: int, seed: int, kind: str) -> list[tuple[int, int]]:
    """Return (tokens before, tokens of the slice) per sequence. `kind`: decode, prefill or mixed."""
    rng = random.Random(seed)
    found: list[tuple[int, int]] = []
    if kind != "prefill":
        found += [(0, 1), (longest - 1, 1), *((rng.randrange(longest), 1) for _ in range(4))]
    if kind != "decode":
        for _ in range(4):
            length = rng.randrange(2, max(3, longest // 4))
            found.append((rng.choice((0, rng.randrange(longest - length))), length))
    rng.shuffle(found)
    return found


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a forward of one layer.

    Shapes: qkv [T, (heads + 2 * kv_heads) * head_dim]; query [T, heads, head_dim], key, value [T, kv_heads, head_dim]
            are views of it; arena [slots, layers, block_size, kv_heads, 2 * head_dim], NaN in rows without a token.
    """

    state: ForwardState
    qkv: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    arena: Tensor

    def widened(self) -> "Inputs":
        """Return a copy in float32."""
        parts = (self.qkv, self.query, self.key, self.value, self.arena)
        return Inputs(self.state, *(part.float().clone() for part in parts))


def make_inputs(
    case: Case, slices: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    """Return sequences whose blocks are scattered over the last slots, in tables that end in the null block."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    ends = [start + length for start, length in slices]
    counts = [-(-end // case.block_size) for end in ends]
    slots = 1 + case.spare_slots + sum(counts)
    free = slots - 1 - torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(slices), max(counts) + 1, dtype=torch.int64)
    width = 2 * case.head_dim
    shape = (slots, case.layers, case.block_size, case.kv_heads, width)
    arena = torch.full(shape, torch.nan, dtype=dtype, device=device)
    used = 0
    for row, ((start, _), count) in enumerate(zip(slices, counts, strict=True)):
        own = free[used : used + count]
        tables[row, :count] = own
        used += count
        positions = torch.arange(start)
        at, offsets = own[positions // case.block_size].to(device), (positions % case.block_size).to(device)
        arena[at, LAYER, offsets] = normal(start, case.kv_heads, width)
    state = ForwardState.of_slices(tables.to(device), [start for start, _ in slices], ends, case.block_size)
    tokens = state.query_starts[-1]
    qkv = normal(tokens, (case.heads + 2 * case.kv_heads) * case.head_dim)
    heads = qkv.view(tokens, -1, case.head_dim)
    query, key, value = heads.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    return Inputs(state, qkv, query, key, value, arena)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN during the block, so that rows that a kernel does not write are detected."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest relative error of a row: the norm of the difference over that of `wanted`; infinite for a NaN.

    Shapes: both [..., size]; a row is the last axis.
    """
    got, wanted = got.float(), wanted.float()
    lengths = wanted.norm(dim=-1).clamp_min(1e-20)
    worst = ((got - wanted).norm(dim=-1) / lengths).nan_to_num(nan=torch.inf).max()
    return float(worst)


def changed_elsewhere(arena: Tensor, before: Tensor, state: ForwardState) -> int:
    """Return the number of elements that changed without holding a token of this forward; NaN equals NaN."""
    kept = torch.ones(arena.shape[:3], dtype=torch.bool, device=arena.device)
    kept[state.slot_ids, LAYER, state.slot_offsets] = False
    same = (arena == before) | (arena.isnan() & before.isnan())
    return int((~same & kept[..., None, None]).sum())
