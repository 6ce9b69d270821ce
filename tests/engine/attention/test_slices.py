"""The tiles of a prefill: every token of a longer slice has one, and a slice of one token has none."""

import random
from itertools import pairwise

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.attention.scene import CPU, KERNEL_DEVICE, Scene, open_triton
from tests.engine.attention.test_partition import in_interpreter, state_of
from tests.engine.kernels.checking import relative_error
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.forward.state import AttentionParams
from tiercel.engine.kernels.paged_slices import tile_slices

RELATIVE_BY_DTYPE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("seed", range(20))
def test_every_token_of_a_long_slice_lies_in_one_tile(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([1, 2, draw.randrange(3, 40)])
    pieces = [(draw.randrange(50), draw.choice([1, 1, 2, draw.randrange(1, 100)])) for _ in range(count)]
    tokens, least = draw.choice([1, 4, 16, 21, 32]), draw.choice([1, 2, 2, 5])

    tiles = tile_slices(state_of(pieces), tokens, least, draw.choice([2, 8, 512]))

    long = [(sequence, length) for sequence, (_, length) in enumerate(pieces) if length >= least]
    assert tiles.tokens == tokens
    assert tiles.sequences.tolist() == [sequence for sequence, _ in long]
    starts = tiles.starts.tolist()
    assert starts[0] == 0
    assert [end - start for start, end in pairwise(starts)] == [-(-length // tokens) for _, length in long]
    assert tiles.count == starts[-1]


@in_interpreter
def test_a_mixed_step_launches_no_prefill_program_for_its_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, list[tuple[int, ...]]] = {}
    run = InterpretedFunction.run

    def note(kernel: InterpretedFunction, *args: object, **given: object) -> object:
        grid = given["grid"]
        assert isinstance(grid, tuple)
        grids.setdefault(kernel.fn.__name__, []).append(grid)
        return run(kernel, *args, **given)

    monkeypatch.setattr(InterpretedFunction, "run", note)
    scene = Scene([(9, 1), (0, 50), (40, 1), (3, 1), (5, 2)], torch.float32, kv_heads=2, group=4)
    backend, layers = open_triton(), (AttentionParams(scale=0.25), AttentionParams(scale=0.25, window=20))
    for params in layers:
        assert relative_error(scene.attend(backend, params), scene.expected(params)) < 1e-3

    tiles_of_16_tokens = 4 + 1  # of 50 and of 2 tokens, with 64 rows and groups of 4 heads
    assert grids["prefill_kernel"] == [(tiles_of_16_tokens, 2)] * len(layers)
    assert len(grids["slice_kernel"]) == 1  # for all layers of the step


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(2)
def test_random_mixed_steps_equal_those_of_plain_torch(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice([(1, 1), (2, 3), (1, 7), (2, 4)])
    pieces = [
        (draw.choice([0, 15, 16, draw.randrange(200)]), draw.choice([1, 1, 2, 17, draw.randrange(1, 60)]))
        for _ in range(draw.randrange(1, 9))
    ]
    dtype = draw.choice(list(RELATIVE_BY_DTYPE))
    sinks = torch.linspace(-2, 3, kv_heads * group).to(dtype)
    params = AttentionParams(
        scale=0.2,
        window=draw.choice([None, draw.randrange(1, 120)]),
        softcap=draw.choice([None, 3.0]),
        sinks=draw.choice([None, sinks]),
    )
    plain = Scene(pieces, dtype, seed, kv_heads, group)
    scene = Scene(pieces, dtype, seed, kv_heads, group, device=KERNEL_DEVICE)
    on_device = params if KERNEL_DEVICE == CPU or params.sinks is None else None
    if on_device is None:
        on_device = AttentionParams(params.scale, params.window, params.softcap, sinks.to(KERNEL_DEVICE))

    out = scene.attend(open_triton(), on_device)

    assert out.isfinite().all()
    assert relative_error(out.cpu(), plain.attend(SdpaAttention(), params)) < RELATIVE_BY_DTYPE[dtype]
