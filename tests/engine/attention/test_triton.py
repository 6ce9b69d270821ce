"""The paged kernels: shapes, layouts, parts, and rows that must be neither read nor written."""

import mmap
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.attention.scene import KERNEL_DEVICE, Scene, open_triton
from tests.engine.kernels.checking import relative_error
from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_decode import attend_singles, merge_kernel
from tiercel.engine.kernels.paged_partition import partition_contexts
from tiercel.engine.kernels.paged_prefill import attend_slices, tile_rows
from tiercel.engine.kernels.paged_slices import tile_slices
from tiercel.engine.kernels.paged_store import store_rows
from tiercel.engine.kernels.tiles import (
    DECODE_TILES,
    MAX_SHARES,
    PREFILL_TILES,
    Tile,
    choose_shares,
    choose_tile,
)

PLAIN = AttentionParams(scale=0.25)
RELATIVE_BY_DTYPE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 2e-2}
RAGGED = [(30, 1), (0, 21), (17, 4)]
MAP_NORESERVE = 0x4000  # of Linux; the mmap module may lack it


WIDE = Tile(rows=64, keys=32, warps=4, stages=2)


def error_of(scene: Scene, params: AttentionParams = PLAIN, backend: TritonAttention | None = None) -> float:
    out = scene.attend(backend or open_triton(), params)
    return relative_error(out.cpu(), scene.expected(params))


def nan_like(query: Tensor) -> Tensor:
    return torch.full(query.shape, torch.nan, dtype=query.dtype, device=query.device)


def test_it_reads_rows_of_other_writers_and_can_be_captured() -> None:
    backend = open_triton()

    assert isinstance(backend, PagedReader)
    assert backend.is_capturable


@pytest.mark.parametrize("block_size", [1, 8, 24, 256])
@pytest.mark.sampled(2)
def test_a_block_may_have_any_number_of_tokens(block_size: int) -> None:
    scene = Scene(RAGGED, torch.float32, block_size=block_size, device=KERNEL_DEVICE)

    assert error_of(scene, replace(PLAIN, window=13)) < 1e-3


@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [(8, 1, 5), (80, 2, 1), (24, 3, 7), (64, 1, 71)])
@pytest.mark.sampled(2)
def test_heads_may_have_any_size_and_share_a_key_in_any_number(head_dim: int, kv_heads: int, group: int) -> None:
    scene = Scene(RAGGED[:2], torch.float32, kv_heads=kv_heads, group=group, head_dim=head_dim, device=KERNEL_DEVICE)

    assert error_of(scene) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.sampled(2)
def test_the_tiles_of_the_table_compute_the_same(head_dim: int, dtype: torch.dtype) -> None:
    scene = Scene([(190, 1), (70, 41)], dtype, kv_heads=1, group=4, head_dim=head_dim, device=KERNEL_DEVICE)

    assert error_of(scene, backend=TritonAttention(processors=1)) < RELATIVE_BY_DTYPE[dtype]


def test_queries_keys_and_values_may_be_views_of_one_projection() -> None:
    scene = Scene(RAGGED, torch.float32, device=KERNEL_DEVICE)
    qkv = torch.cat((scene.query, scene.key, scene.value), dim=1)
    kv_heads = scene.key.shape[1]
    scene.query, scene.key, scene.value = qkv.split((scene.heads, kv_heads, kv_heads), dim=1)
    assert not scene.query.is_contiguous()

    assert error_of(scene) < 1e-3


SMALL = Tile(16, 32, 4, 2)
UNEVEN = [(0, 1), (31, 1), (400, 1), (32, 1), (62, 1), (63, 1), (5, 1)]  # short ones, tile edges, and a long one
SINKS = torch.linspace(-1, 2, 6, device=KERNEL_DEVICE)
PARTITIONS = {  # contexts, most shares: fewer than there are tiles, as many, more
    "uneven_1": (UNEVEN, 1),
    "uneven_2": (UNEVEN, 2),
    "uneven_7": (UNEVEN, 7),
    "uneven_22": (UNEVEN, 22),
    "uneven_60": (UNEVEN, 60),
    "one_1": ([(300, 1)], 1),
    "one_3": ([(300, 1)], 3),
    "one_64": ([(300, 1)], 64),
    "first_token_8": ([(0, 1)], 8),
    "longest_first_5": ([(511, 1), (2, 1), (31, 1)], 5),
    "longest_last_5": ([(2, 1), (31, 1), (511, 1)], 5),
    "mixed_6": ([(0, 9), (300, 1), (40, 3), (0, 1), (63, 1), (7, 2), (130, 1), (1, 30)], 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_contexts_may_be_cut_anywhere(name: str, dtype: torch.dtype) -> None:
    pieces, shares = PARTITIONS[name]
    scene = Scene(pieces, dtype, device=KERNEL_DEVICE)
    store_rows(scene.key, scene.value, scene.kv, scene.state)
    for params in (
        PLAIN,
        AttentionParams(scale=0.3, softcap=2.0, sinks=SINKS),
        AttentionParams(scale=0.3, window=37, softcap=2.0, sinks=SINKS),
        AttentionParams(scale=0.25, window=128),
    ):
        out = nan_like(scene.query)

        attend_singles(
            scene.query,
            scene.kv,
            scene.state,
            params,
            out,
            partition_contexts(scene.state, params.window, shares, SMALL, scene.kv.shape[2]),
        )

        is_single = torch.tensor([length == 1 for _, length in pieces for _ in range(length)])
        assert torch.equal(out.isnan().any(-1).any(-1).cpu(), ~is_single)
        assert relative_error(out.cpu()[is_single], scene.expected(params)[is_single]) < RELATIVE_BY_DTYPE[dtype]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(3)
def test_random_steps_equal_attention_wherever_they_are_cut(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice([(1, 1), (2, 3), (4, 1), (1, 6), (1, 17)])
    pieces = [
        (draw.choice([0, 31, 32, draw.randrange(60), draw.randrange(600)]), draw.choice([1, 1, 1, 5]))
        for _ in range(draw.randrange(2, 9))
    ]
    dtype = draw.choice(list(RELATIVE_BY_DTYPE))
    sinks = torch.linspace(-2, 3, kv_heads * group, device=KERNEL_DEVICE).to(dtype)
    params = AttentionParams(
        scale=0.2,
        window=draw.choice([None, draw.randrange(1, 300)]),
        softcap=draw.choice([None, 3.0]),
        sinks=draw.choice([None, sinks]),
    )
    scene = Scene([*pieces, (40, 1)], dtype, seed, kv_heads, group, device=KERNEL_DEVICE)
    store_rows(scene.key, scene.value, scene.kv, scene.state)
    out = nan_like(scene.query)

    partition = partition_contexts(
        scene.state, params.window, draw.randrange(1, 40), SMALL, kv_heads, draw.choice([2, 4, 512])
    )
    attend_singles(scene.query, scene.kv, scene.state, params, out, partition)

    is_single = ~out.isnan().any(-1).any(-1).cpu()
    assert is_single.sum() == 1 + sum(length == 1 for _, length in pieces)
    assert relative_error(out.cpu()[is_single], scene.expected(params)[is_single]) < RELATIVE_BY_DTYPE[dtype]


@pytest.mark.slow
def test_a_long_context_among_many_short_ones() -> None:
    crowd = [(index % 7, 1) for index in range(530)]  # more sequences than are processed at once
    crowd[520] = (700, 1)
    scene = Scene(crowd, torch.float32, kv_heads=1, group=2, head_dim=16, device=KERNEL_DEVICE)

    assert error_of(scene, backend=TritonAttention(1, decode_tile=SMALL)) < 1e-3


@pytest.mark.skipif(KERNEL_DEVICE.type != "cpu", reason="of 16 GiB of parts only those that are touched become real")
def test_parts_lie_further_apart_than_32_bits_can_count() -> None:
    head_dim, first = 512, 1 << 22  # the part that begins after 2^31 numbers
    half = head_dim * first
    pages = mmap.mmap(-1, 8 * half + 8 * head_dim, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    values = torch.frombuffer(pages, dtype=torch.float32)[half:]  # an index that wraps around reads a zero before it
    values[half : half + 2 * head_dim] = 1
    out = torch.full((2, 1, head_dim), torch.nan)

    merge_kernel[(1, 2)](
        *(values, torch.zeros(first + 2), torch.tensor([1, -1], dtype=torch.int32)),
        *(torch.tensor([0, first, first + 2], dtype=torch.int32), torch.arange(3, dtype=torch.int32)),
        *(out, head_dim, head_dim),
        HEAD_DIM=head_dim,
        DIMS=head_dim,
        MAX_PARTS=64,
        AT_ONCE=8,
        STARTS_EARLY=False,
    )

    assert out[0].isnan().all()
    assert out[1].eq(1).all()


def test_each_kernel_writes_its_own_slices_alone() -> None:
    scene = Scene(RAGGED, torch.float32, device=KERNEL_DEVICE)
    store_rows(scene.key, scene.value, scene.kv, scene.state)
    singles, slices, all_of_them = nan_like(scene.query), nan_like(scene.query), nan_like(scene.query)

    attend_singles(
        scene.query, scene.kv, scene.state, PLAIN, singles, partition_contexts(scene.state, None, 3, SMALL, 2)
    )
    _, tokens = tile_rows(WIDE, 3)
    for out, least in ((slices, 2), (all_of_them, 1)):
        tiles = tile_slices(scene.state, tokens, least)
        attend_slices(scene.query, scene.kv, scene.state, PLAIN, out, WIDE, tiles)

    assert torch.equal(singles.isnan().any(-1).any(-1), torch.arange(len(singles), device=KERNEL_DEVICE) > 0)
    assert torch.equal(slices.isnan().any(-1).any(-1), torch.arange(len(slices), device=KERNEL_DEVICE) < 1)
    expected = scene.expected(PLAIN)
    assert relative_error(torch.where(singles.isnan(), slices, singles).cpu(), expected) < 1e-3
    assert relative_error(all_of_them.cpu(), expected) < 1e-3


def test_blocks_that_a_window_has_left_are_not_read() -> None:
    params = replace(PLAIN, window=20)
    scene = Scene([(100, 1), (80, 9)], torch.float32, device=KERNEL_DEVICE)
    scene.state.block_tables[:, :3] = 0  # as if they had been freed; the null block holds NaN

    assert error_of(scene, params) < 1e-3


def test_padded_rows_of_a_graph_leave_the_others_alone() -> None:
    """Padded rows of a graph: one token each, in the null block, with a context of that token."""
    scene = Scene([(40, 1), (15, 1)], torch.float32, device=KERNEL_DEVICE)
    padding = 2
    state = scene.state
    wider = torch.zeros(2 + padding, state.block_tables.shape[1] + 3, dtype=torch.int64, device=KERNEL_DEVICE)
    wider[:2, : state.block_tables.shape[1]] = state.block_tables
    nothing = torch.zeros(padding, dtype=torch.int64, device=KERNEL_DEVICE)
    padded = ForwardState(
        query_starts=tuple(range(5)),
        context_lengths=(1,) * 4,  # a graph's host side knows no lengths
        block_tables=wider,
        positions=torch.cat((state.positions, nothing)),
        slot_ids=torch.cat((state.slot_ids, nothing)),
        slot_offsets=torch.cat((state.slot_offsets, nothing)),
        device_query_starts=torch.arange(5, dtype=torch.int32, device=KERNEL_DEVICE),
        device_context_lengths=torch.tensor([41, 16, 1, 1], dtype=torch.int32, device=KERNEL_DEVICE),
    )
    rows = [torch.cat((rows, rows[:padding])) for rows in (scene.query, scene.key, scene.value)]

    out = open_triton().attend(*rows, scene.kv, padded, PLAIN)

    assert relative_error(out[:2].cpu(), scene.expected(PLAIN)) < 1e-3
    assert out.isfinite().all()


@pytest.mark.parametrize(("kv_heads", "shares"), [(8, 132), (4, MAX_SHARES), (1, MAX_SHARES), (32, 33), (5000, 1)])
def test_few_heads_are_cut_into_more_parts(kv_heads: int, shares: int) -> None:
    assert choose_shares(kv_heads, processors=132) == shares


@pytest.mark.parametrize("table", [PREFILL_TILES, DECODE_TILES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256, 512])
def test_every_head_dim_has_a_tile(table: dict[tuple[int, int], Tile], dtype: torch.dtype, head_dim: int) -> None:
    tile = choose_tile(table, head_dim, dtype)

    assert tile.rows >= 16
    assert tile.keys >= 16


def test_layers_of_one_step_may_have_different_parameters() -> None:
    scene, backend = Scene(RAGGED, torch.float32, device=KERNEL_DEVICE), open_triton()
    sinks = torch.linspace(-1, 2, 6, device=KERNEL_DEVICE)

    for params in (PLAIN, AttentionParams(scale=0.3, window=9, softcap=2.0, sinks=sinks), PLAIN):
        assert error_of(scene, params, backend) < 1e-3


def test_it_continues_a_sequence_of_another_backend() -> None:
    scene = Scene([(0, 40)], torch.float32)
    whole = scene.attend(SdpaAttention(), PLAIN)
    tables = scene.state.block_tables.to(KERNEL_DEVICE)
    kv, query = scene.kv.to(KERNEL_DEVICE), scene.query.to(KERNEL_DEVICE)

    last = open_triton().read(query[37:], kv, ForwardState.of_slices(tables, [37], [40], 16), PLAIN)

    assert relative_error(last.cpu(), whole[37:]) < 1e-3
