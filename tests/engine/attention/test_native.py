"""The native backend: every class of processors against attention in float64, and the same bits in any company."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.attention.native_classes import CLASSES, open_native
from tests.engine.attention.scene import Scene
from tests.engine.kernels.checking import relative_error
from tests.seeds import fresh_seeds
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState

RELATIVE_BY_DTYPE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(not CLASSES, reason="the native library is not compiled")


def draw_pieces(draw: random.Random, longest: int) -> list[tuple[int, int]]:
    return [
        (draw.choice([0, draw.randrange(longest)]), draw.choice([1, 1, draw.randrange(1, 90)]))
        for _ in range(draw.randrange(1, 7))
    ]


@pytest.mark.parametrize("seed", [*range(6), *fresh_seeds(3)])
@pytest.mark.parametrize("name", CLASSES)
def test_random_ragged_steps_agree_with_float64(name: str, seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice([(1, 1), (2, 3), (1, 7), (2, 4), (1, 8), (1, 13), (3, 2), (1, 16)])
    head_dim = draw.choice([8, 16, 34, 64, 72, 80, 96, 128, 256])
    dtype, query_dtype = (draw.choice(list(RELATIVE_BY_DTYPE)) for _ in range(2))
    params = AttentionParams(
        1 / math.sqrt(head_dim),
        window=draw.choice([None, draw.randrange(1, 700)]),
        softcap=draw.choice([None, 4.0]),
        sinks=draw.choice([None, torch.linspace(-1, 2, kv_heads * group)]),
    )
    pieces = draw_pieces(draw, draw.choice([100, 1200]))
    scene = Scene(pieces, dtype, seed, kv_heads, group, head_dim, block_size=draw.choice([1, 5, 16, 32]))
    scene.query = scene.query.to(query_dtype)
    torch.set_num_threads(draw.choice([1, 2, 3]))

    out = scene.attend(open_native(name), params)

    assert out.dtype is query_dtype
    # Probabilities are rounded to bfloat16 for bfloat16 queries alone, so the dtype of the queries gives the tolerance.
    assert relative_error(out, scene.expected(params)) < RELATIVE_BY_DTYPE[query_dtype]


def attend_alone(
    backend: NativeAttention, scene: Scene, sequence: int, starts: list[int], params: AttentionParams
) -> Tensor:
    """Compute one sequence's slice again, cut at `starts`, in one forward each. Shapes: [length, heads, head_dim]."""
    first, last = scene.state.query_starts[sequence : sequence + 2]
    context = scene.state.context_lengths[sequence]
    before = context - (last - first)
    pieces = []
    for start, end in zip(starts, [*starts[1:], last - first], strict=True):
        table = scene.state.block_tables[sequence : sequence + 1]
        state = ForwardState.of_slices(table, [before + start], [before + end], scene.kv.shape[1])
        pieces.append(backend.read(scene.query[first + start : first + end], scene.kv, state, params))
    return torch.cat(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [*range(4), *fresh_seeds(2)])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.sampled(10)
def test_company_chunks_and_threads_change_no_bit(name: str, seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    params = AttentionParams(0.15, window=draw.choice([None, 50, 700]), sinks=draw.choice([None, torch.zeros(14)]))
    scene = Scene([*draw_pieces(draw, 1500), (1100, 1), (600, 50)], dtype, seed, 2, 7, 40)
    backend = open_native(name)
    torch.set_num_threads(2)
    together = scene.attend(backend, params)
    for sequence in range(scene.state.num_sequences):
        first, last = scene.state.query_starts[sequence : sequence + 2]
        cuts = sorted({0, *(draw.randrange(last - first) for _ in range(3))})
        torch.set_num_threads(draw.choice([1, 2, 4]))

        alone = attend_alone(backend, scene, sequence, cuts, params)

        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("name", CLASSES)
def test_queries_may_lie_apart(name: str) -> None:
    scene, params = Scene([(40, 1), (0, 33)], torch.float32), AttentionParams(0.2)
    expected = scene.attend(open_native(name), params)
    wide = torch.full((34, 10, 32), math.nan)
    wide[:, 2:8] = scene.query
    scene.query = wide[:, 2:8]

    assert torch.equal(scene.attend(open_native(name), params), expected)


def test_layers_of_one_step_may_differ() -> None:
    scene, backend = Scene([(70, 1), (3, 40)], torch.float32), open_native(CLASSES[-1])
    plain = AttentionParams(0.2)
    for params in (plain, replace(plain, window=9), replace(plain, softcap=2.0), plain, replace(plain, scale=0.4)):
        assert relative_error(scene.attend(backend, params), scene.expected(params)) < 1e-5


def test_a_cache_whose_blocks_are_in_pieces_is_refused() -> None:
    scene = Scene([(3, 1)], torch.float32)
    apart = torch.zeros(*scene.kv.shape[:2], 4, scene.kv.shape[3])[:, :, ::2]

    with pytest.raises(ValueError, match="the rows of a block must adjoin"):
        open_native(CLASSES[-1]).read(scene.query, apart, scene.state, AttentionParams(0.2))
