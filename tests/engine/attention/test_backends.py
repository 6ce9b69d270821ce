"""Attention backends against attention written out over plain histories, and against each other."""

import math
import mmap
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.engine.attention.native_classes import CLASSES, open_native
from tests.engine.attention.scene import CPU, KERNEL_DEVICE, Scene, open_triton
from tests.engine.kernels.checking import relative_error
from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.forward.state import AttentionParams

BACKENDS: dict[str, Callable[[], Attention]] = {
    "sdpa": SdpaAttention,
    "grouped": GroupedAttention,
    "triton": open_triton,
    **{name: partial(open_native, name) for name in CLASSES},
}
DEVICES = {name: KERNEL_DEVICE if name == "triton" else CPU for name in BACKENDS}
TOLERANCE_BY_DTYPE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of one number
RELATIVE_BY_DTYPE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 2e-2}  # of all of them

# (tokens computed before, tokens of this step) for each sequence
STEPS = {
    "prefill": [(0, 1), (0, 15), (0, 16), (0, 17), (0, 70)],
    "chunk": [(1, 7), (15, 2), (16, 16), (33, 40)],
    "decode": [(0, 1), (14, 1), (15, 1), (16, 1), (31, 1), (90, 1)],
    "decode_of_like_lengths": [(63 + index % 5, 1) for index in range(12)],
    "mixed": [(40, 1), (0, 33), (17, 1), (8, 5), (95, 1), (64, 3)],
    "prefix_hit": [(48, 9), (64, 1), (16, 30)],
    "one": [(77, 1)],
}
PARAMS = {
    "plain": AttentionParams(scale=0.25),
    "window": AttentionParams(scale=0.25, window=20),
    "window_of_a_block": AttentionParams(scale=0.25, window=16),
    "window_of_one": AttentionParams(scale=0.25, window=1),
    "wide_window": AttentionParams(scale=0.25, window=1000),
    "softcap": AttentionParams(scale=0.25, softcap=1.5),
    "sinks": AttentionParams(scale=0.25, sinks=torch.linspace(-1, 2, 6)),
    "everything": AttentionParams(scale=0.3, window=24, softcap=2.0, sinks=torch.linspace(-1, 2, 6)),
}


# The interpreter is slow, so the kernels run every step and every parameter only once in it.
CASES = [
    (backend, step, name)
    for backend in BACKENDS
    for step in STEPS
    for name in PARAMS
    if backend != "triton" or KERNEL_DEVICE != CPU or step == "prefix_hit" or name == "everything"
]


def params_on(name: str, device: torch.device) -> AttentionParams:
    params = PARAMS[name]
    return params if params.sinks is None else replace(params, sinks=params.sinks.to(device))


def assert_agrees(out: Tensor, expected: Tensor) -> None:
    """Check every element by the tolerance of its dtype, and the whole tensor by the relative tolerance."""
    dtype = out.dtype
    out = out.cpu().double()
    torch.testing.assert_close(out, expected, atol=TOLERANCE_BY_DTYPE[dtype], rtol=0)
    assert relative_error(out, expected) < RELATIVE_BY_DTYPE[dtype]


@pytest.mark.parametrize(("backend", "step", "name"), CASES)
@pytest.mark.sampled(12)
def test_a_backend_computes_attention(backend: str, step: str, name: str) -> None:
    device = DEVICES[backend]
    scene = Scene(STEPS[step], torch.float32, device=device)

    out = scene.attend(BACKENDS[backend](), params_on(name, device))

    assert_agrees(out, scene.expected(PARAMS[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for backend in BACKENDS
        for name in PARAMS
        if backend != "triton" or KERNEL_DEVICE != CPU or name in ("plain", "window", "everything")
    ],
)
@pytest.mark.sampled(5)
def test_a_backend_stays_within_the_tolerance_of_its_dtype(backend: str, name: str, dtype: torch.dtype) -> None:
    device = DEVICES[backend]
    scene = Scene(STEPS["mixed"], dtype, device=device)

    out = scene.attend(BACKENDS[backend](), params_on(name, device))

    assert_agrees(out, scene.expected(PARAMS[name]))


@pytest.mark.parametrize(
    ("backend", "seed"), [*(("grouped", seed) for seed in range(12)), *(("triton", seed) for seed in range(12, 17))]
)
def test_a_backend_agrees_with_the_reference_on_random_ragged_steps(backend: str, seed: int) -> None:
    draw = random.Random(seed)
    device = DEVICES[backend]
    is_slow = backend == "triton" and device == CPU
    longest, sequences = (90, 5) if is_slow else (200, 20)
    pieces = [
        (draw.choice([0, draw.randrange(longest)]), draw.choice([1, 1, 1, draw.randrange(1, 60)]))
        for _ in range(draw.randrange(1, sequences))
    ]
    kv_heads, group = draw.choice([(1, 1), (2, 3), (4, 1), (1, 6)])
    dtype = draw.choice(list(TOLERANCE_BY_DTYPE))
    window = draw.choice([None, None, draw.randrange(1, 100)])
    params = AttentionParams(scale=1 / math.sqrt(32), window=window)
    one = Scene(pieces, dtype, seed, kv_heads, group, device=device)
    two = Scene(pieces, dtype, seed, kv_heads, group)

    out, reference = one.attend(BACKENDS[backend](), params), two.attend(SdpaAttention(), params)

    torch.testing.assert_close(out.cpu(), reference, atol=TOLERANCE_BY_DTYPE[dtype], rtol=0)
    assert relative_error(out.cpu(), one.expected(params)) < RELATIVE_BY_DTYPE[dtype]
    assert torch.equal(one.kv.cpu().nan_to_num(7), two.kv.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_slots_of_the_step_are_written(backend: str) -> None:
    scene = Scene(STEPS["mixed"], torch.float32, device=DEVICES[backend])
    before = scene.kv.clone()

    scene.attend(BACKENDS[backend](), PARAMS["plain"])

    after = scene.kv.clone()
    after[scene.state.slot_ids, scene.state.slot_offsets] = before[scene.state.slot_ids, scene.state.slot_offsets]
    assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))


def test_grouped_layers_of_one_step_may_differ_in_window() -> None:
    scene, backend = Scene(STEPS["decode"], torch.float32), GroupedAttention()

    for name in ("plain", "window", "plain", "window_of_a_block"):
        assert_agrees(scene.attend(backend, PARAMS[name]), scene.expected(PARAMS[name]))


def test_grouped_keeps_nothing_from_one_step_to_the_next() -> None:
    backend = GroupedAttention()

    for seed, name in enumerate(("decode", "one", "mixed", "decode_of_like_lengths", "decode")):
        scene = Scene(STEPS[name], torch.float32, seed)
        assert_agrees(scene.attend(backend, PARAMS["plain"]), scene.expected(PARAMS["plain"]))


def test_grouped_works_in_and_out_of_inference_mode() -> None:
    scene, backend = Scene(STEPS["decode"], torch.float32), GroupedAttention()

    with torch.inference_mode():
        inside = scene.attend(backend, PARAMS["plain"])

    assert torch.equal(scene.attend(backend, PARAMS["plain"]), inside)


def far_memory(elements: int, device: torch.device) -> Tensor:
    """Return float16 elements in reserved address space without physical memory. Shapes: returns [elements]."""
    if device != CPU:
        return torch.empty(elements, dtype=torch.float16, device=device)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE: 4 GiB of addresses, a few pages of memory
    memory = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.float16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_may_lie_beyond_two_to_the_31_elements(backend: str) -> None:
    device, open_backend = DEVICES[backend], BACKENDS[backend]
    scene = Scene([(40, 1), (17, 9)], torch.float16, device=device)
    highest = int(scene.state.slot_ids.max())
    stride = 2**31 // highest // 16 * 16 + scene.kv[0].numel()
    memory = far_memory(scene.kv.shape[0] * stride, device)
    far = memory.as_strided(scene.kv.shape, (stride, *scene.kv.stride()[1:]))
    far.copy_(scene.kv)
    assert far.stride(0) * highest > 2**31
    expected = scene.attend(open_backend(), PARAMS["window"])

    out = open_backend().attend(scene.query, scene.key, scene.value, far, scene.state, PARAMS["window"])

    assert torch.equal(out, expected)
    assert torch.equal(far.nan_to_num(7), scene.kv.nan_to_num(7))
