"""Caches of 8 bits: every writer stores the same bytes, and every backend attends over what the reference reads."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.engine.attention.native_classes import CLASSES, open_native
from tests.engine.attention.scene import CPU, KERNEL_DEVICE, LAYER, Scene, open_arena
from tests.engine.attention.test_backends import BACKENDS, DEVICES, PARAMS, STEPS, assert_agrees, params_on
from tests.engine.kernels.checking import relative_error
from tests.engine.native.classes import library_of
from tests.seeds import fresh_seeds
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.forward.kv_cache import LIMIT_BY_DTYPE
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_store import store_rows
from tiercel.engine.kernels.rotary import store_heads
from tiercel.engine.models.config import RopeConfig
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.rope import Rotary, rotate
from tiercel.engine.native.table import CpuClass

CACHES = list(LIMIT_BY_DTYPE)
NAMES = [str(dtype).removeprefix("torch.") for dtype in CACHES]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Placing = Callable[[Tensor, Rotary, Tensor, ForwardState], object]
"""Rotates keys of a qkv and stores keys and values."""


def special_rows(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return vectors of many magnitudes; some are zero or have a bad number. Shapes: [tokens, heads, head_dim]."""
    draw = random.Random(seed)
    rows = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed))
    for token in range(tokens):
        head, at = draw.randrange(heads), draw.randrange(head_dim)
        rows[token, head] *= draw.choice([1e-30, 1e-7, 1e-3, 1.0, 1.0, 100.0, 6e4])
        kind = draw.choice(["zero", "nan", "inf", "-inf", "-0", *["plain"] * 4])
        if kind == "zero":
            rows[token, head] = 0
        elif kind != "plain":
            rows[token, head, at] = float(kind)
    return rows.to(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter: infinity minus infinity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", CACHES, ids=NAMES)
@pytest.mark.parametrize("seed", [0, *fresh_seeds(1)])
@pytest.mark.sampled(5)
def test_the_triton_store_writes_the_bytes_of_the_reference(cache: torch.dtype, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, head_dim, block_size = draw.choice([1, 2, 3]), draw.choice([2, 20, 64]), draw.choice([1, 4, 16])
    state = ragged_state(draw, block_size)
    tokens = state.query_starts[-1]
    key, value = (special_rows(tokens, kv_heads, head_dim, dtype, seed + half) for half in range(2))
    slots = int(state.block_tables.max()) + 1
    wanted, got = (open_arena(slots, block_size, kv_heads, head_dim, cache) for _ in range(2))
    write_rows(key, value, wanted[:, LAYER], state)

    store_rows(key, value, got[:, LAYER], state)

    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def ragged_state(draw: random.Random, block_size: int) -> ForwardState:
    count = draw.choice([1, 3])
    starts = [draw.randrange(20) for _ in range(count)]
    ends = [start + draw.choice([1, 1, 2, 13]) for start in starts]
    blocks = -(-max(ends) // block_size)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(draw.randrange(1 << 31))) + 1
    return ForwardState.of_slices(order.view(count, blocks), starts, ends, block_size)


def place_by_torch(qkv: Tensor, rotary: Rotary, kv: Tensor, state: ForwardState, kv_heads: int) -> None:
    _, key, value = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    write_rows(rotate(key, *rotary.angles(state.positions)), value, kv, state)


def place_by_triton(qkv: Tensor, rotary: Rotary, kv: Tensor, state: ForwardState) -> None:
    # The angles of torch, because those of the kernel may differ in the last bit.
    angles = tuple(part[:, 0, : part.shape[-1] // 2].contiguous() for part in rotary.angles(state.positions))
    store_heads(qkv.flatten(1), None, (angles[0], angles[1]), kv, state)


def place_by(cpu_class: CpuClass) -> Placing:
    def place(qkv: Tensor, rotary: Rotary, kv: Tensor, state: ForwardState) -> None:
        library = library_of(cpu_class)
        ops = NativeOps(library, NativeAttention(library))
        ops.attend(qkv.flatten(1), None, ops.angles(rotary, state.positions), kv, state, PARAMS["plain"])

    return place


# Without AMX, whose class has the code of AVX-512 here, and would only be emulated.
CPU_CLASSES = (CpuClass.PORTABLE, CpuClass.AVX2, CpuClass.AVX512)
PLACINGS: dict[str, Placing] = {"triton": place_by_triton, **{one.name.lower(): place_by(one) for one in CPU_CLASSES}}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter: infinity minus infinity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", CACHES, ids=NAMES)
@pytest.mark.parametrize("writer", PLACINGS)
@pytest.mark.parametrize("seed", [1980757723, *fresh_seeds(1)])
@pytest.mark.sampled(5)
def test_rotated_heads_are_stored_with_the_bytes_of_the_reference(
    writer: str, cache: torch.dtype, dtype: torch.dtype, seed: int
) -> None:
    draw = random.Random(seed)
    kv_heads, group, block_size = draw.choice([1, 2, 3]), draw.choice([1, 3]), draw.choice([1, 4, 16])
    head_dim = draw.choice([2, 16, 38, 64, 128])
    state = ragged_state(draw, block_size)
    rotary = Rotary(RopeConfig(kind="default", theta=10_000.0), head_dim, dtype, CPU)
    qkv = special_rows(len(state.positions), (group + 2) * kv_heads, head_dim, dtype, seed)
    slots = int(state.block_tables.max()) + 1
    wanted, got = (open_arena(slots, block_size, kv_heads, head_dim, cache) for _ in range(2))
    place_by_torch(qkv, rotary, wanted[:, LAYER], state, kv_heads)

    PLACINGS[writer](qkv, rotary, got[:, LAYER], state)

    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


# The interpreter is slow, so the kernels run few cases in it.
CASES = [
    (backend, step, name)
    for backend in BACKENDS
    for step, name in (
        *((step, "everything") for step in STEPS),
        *(("mixed", name) for name in PARAMS),
    )
    if backend != "triton" or KERNEL_DEVICE != CPU or (step, name) in (("prefix_hit", "everything"), ("mixed", "plain"))
]


@pytest.mark.parametrize("cache", CACHES, ids=NAMES)
@pytest.mark.parametrize(("backend", "step", "name"), CASES)
@pytest.mark.sampled(12)
def test_a_backend_attends_over_8_bits(backend: str, step: str, name: str, cache: torch.dtype) -> None:
    device = DEVICES[backend]
    scene = Scene(STEPS[step], torch.float32, device=device, cache=cache)

    out = scene.attend(BACKENDS[backend](), params_on(name, device))

    assert_agrees(out, scene.expected(PARAMS[name]))


@pytest.mark.parametrize("cache", CACHES, ids=NAMES)
@pytest.mark.parametrize(
    ("backend", "seed"),
    [
        (backend, seed)
        for backend in BACKENDS
        for seed in ([3, *fresh_seeds(1)] if backend == "triton" else [0, *fresh_seeds(1)])
    ],
)
@pytest.mark.sampled(10)
def test_a_backend_agrees_with_the_reference_on_random_ragged_steps(
    backend: str, cache: torch.dtype, seed: int
) -> None:
    draw = random.Random(seed)
    device = DEVICES[backend]
    is_slow = backend == "triton" and device == CPU
    longest, sequences = (90, 4) if is_slow else (700, 12)
    pieces = [
        (draw.choice([0, draw.randrange(longest)]), draw.choice([1, 1, 1, draw.randrange(1, 60)]))
        for _ in range(draw.randrange(1, sequences))
    ]
    kv_heads, group = draw.choice([(1, 1), (2, 3), (4, 1), (1, 7)])
    head_dim, block_size = draw.choice([8, 34, 64, 80]), draw.choice([1, 5, 16])
    if is_slow:
        head_dim, block_size = 32, 16
    dtype = draw.choice(DTYPES)
    params = AttentionParams(1 / math.sqrt(head_dim), window=draw.choice([None, None, draw.randrange(1, 100)]))
    given = (pieces, dtype, seed, kv_heads, group, head_dim, block_size)
    one, two = Scene(*given, device=device, cache=cache), Scene(*given, cache=cache)
    torch.set_num_threads(draw.choice([1, 2, 3]))

    out, reference = one.attend(BACKENDS[backend](), params), two.attend(SdpaAttention(), params)

    assert_agrees(out, one.expected(params))
    assert_agrees(reference, one.expected(params))
    assert torch.equal(one.kv.view(torch.uint8).cpu(), two.kv.view(torch.uint8))


@pytest.mark.parametrize("cache", CACHES, ids=NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_key_spoils_its_own_sequence_alone(backend: str, cache: torch.dtype) -> None:
    device = DEVICES[backend]
    scene = Scene([(20, 1), (17, 1), (5, 8)], torch.float32, device=device, cache=cache)
    expected = scene.expected(PARAMS["plain"])
    scene.key[1, 0, 3] = math.inf

    out = scene.attend(BACKENDS[backend](), PARAMS["plain"]).cpu()

    assert out[1, :3].isnan().all()  # the heads that share the bad key
    for row in (out[:1], out[2:]), (expected[:1], expected[2:]):
        assert all(part.isfinite().all() for part in row)
    assert relative_error(out[2:], expected[2:]) < 1e-3


@pytest.mark.parametrize("cache", CACHES, ids=NAMES)
@pytest.mark.parametrize("seed", [0, *fresh_seeds(1)])
@pytest.mark.parametrize("name", CLASSES)
def test_company_chunks_and_threads_change_no_bit(name: str, seed: int, cache: torch.dtype) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    params = AttentionParams(0.15, window=draw.choice([None, 50, 700]))
    scene = Scene([(3, 40), (1100, 1), (600, 50), (0, 7)], dtype, seed, 2, 7, 40, cache=cache)
    backend = open_native(name)
    torch.set_num_threads(2)
    together = scene.attend(backend, params)
    for sequence in range(scene.state.num_sequences):
        first, last = scene.state.query_starts[sequence : sequence + 2]
        context = scene.state.context_lengths[sequence]
        table = scene.state.block_tables[sequence : sequence + 1]
        cuts = sorted({0, last - first, *(draw.randrange(last - first) for _ in range(3))})
        torch.set_num_threads(draw.choice([1, 2, 4]))
        for start, end in pairwise(cuts):
            before = context - (last - first)
            state = ForwardState.of_slices(table, [before + start], [before + end], scene.kv.shape[1])

            alone = backend.read(scene.query[first + start : first + end], scene.kv, state, params)

            assert torch.equal(alone, together[first + start : first + end])


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_count(backend: str) -> None:
    """The control: a backend that ignored a scale would not notice one that is changed."""
    device = DEVICES[backend]
    scene = Scene([(40, 1)], torch.float32, device=device, cache=torch.int8)
    before = scene.attend(BACKENDS[backend](), PARAMS["plain"])
    scene.key, scene.value = 2 * scene.key, scene.value  # the same numbers, and twice the scale

    key_scaled = scene.attend(BACKENDS[backend](), PARAMS["plain"])
    scene.key, scene.value = scene.key / 2, 2 * scene.value
    value_scaled = scene.attend(BACKENDS[backend](), replace(PARAMS["plain"], window=1))
    scene.value = scene.value / 2
    unscaled = scene.attend(BACKENDS[backend](), replace(PARAMS["plain"], window=1))

    assert relative_error(key_scaled, before) > 1e-3
    torch.testing.assert_close(value_scaled, 2 * unscaled, rtol=1e-5, atol=1e-5)
