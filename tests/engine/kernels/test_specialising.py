"""A kernel that was compiled for a model is not compiled again because a step has another size: launches are keyed as
Triton keys its compilations, by types, by arguments that are 1 and by those that are multiples of 16."""

import inspect
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, native_specialize_impl

from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.experts import GroupedExperts
from tiercel.engine.kernels.host_memory import report_no_sync, take_inputs_no_sync
from tiercel.engine.kernels.product_tiles import PRODUCT_TILES
from tiercel.engine.kernels.sampling import draw_no_sync, search_no_sync
from tiercel.engine.models.activation_rounding import quantize_weight
from tiercel.engine.models.device_linear import DeviceFacts, DeviceLinear
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.engine.models.triton_ops import TritonOps
from tiercel.engine.sampling import Sampler
from tiercel.values.request import SamplingParams

CPU = torch.device("cpu")
VOCAB = 5000
BLOCK = 4


class Launches:
    """Return the keys of the launches by kernel and compile-time arguments. Nothing is computed."""

    def __init__(self) -> None:
        self.keys: dict[tuple[object, ...], set[tuple[object, ...]]] = defaultdict(set)

    def add(self, kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        jit = JITFunction(kernel.fn, **kernel.kwargs)
        names = {param.name for param in jit.params}
        given = {name: value for name, value in options.items() if name in names}
        values = inspect.signature(kernel.fn).bind(*args, **given).arguments
        constants = tuple(values[param.name] for param in jit.params if param.is_constexpr)
        key = tuple(
            (param.name, *native_specialize_impl(BaseBackend, values[param.name], False, *specialised(param)))
            for param in jit.params
            if not param.is_constexpr
        )
        self.keys[kernel.fn.__name__, constants].add(key)

    def assert_one_each(self, *kernels: str) -> None:
        assert {str(name) for name, _ in self.keys} == set(kernels)
        for (name, _), keys in self.keys.items():
            assert len(keys) == 1, (name, [set(key) - set.intersection(*map(set, keys)) for key in keys])


def specialised(param: Any) -> tuple[bool, bool]:
    return not param.do_not_specialize, not param.do_not_specialize_on_alignment


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *args, **given: found.add(kernel, *args, **given))
    return found


def test_rows_that_ask_for_top_p_alone_need_one_compilation_however_many_they_are(launches: Launches) -> None:
    sampler = Sampler(8, VOCAB, CPU, draw_no_sync, search_no_sync)
    for row in range(8):
        sampler.set_row(row, SamplingParams(top_p=0.9 if row < 4 else 1.0), b"", b"", ())
    for rows in ([0], [0, 1], [0, 1, 2], [3, 4], [5, 2, 7, 1]):
        sampler.sample_no_sync(torch.zeros(len(rows), VOCAB), rows, [3] * len(rows), np.zeros(len(rows), np.int64))
    launches.assert_one_each("draw_kernel", "choose_kernel", "search_kernel")


def test_steps_of_every_size_need_one_compilation_to_take_inputs_and_to_report(launches: Launches) -> None:
    tables, last_tokens = torch.zeros(64, 40, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    source, target = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1 << 15, dtype=torch.uint8)
    for count, patches in ((1, 0), (1, 1), (2, 5), (3, 16), (16, 40), (64, 3)):
        take_inputs_no_sync(source, target, 64 * count, tables, patches)
        numbers, flags = torch.zeros(count + 1, dtype=torch.int64)[1:], torch.zeros(count + 3, dtype=torch.bool)[3:]
        report_no_sync(numbers, flags, numbers, last_tokens, numbers, flags)
    launches.assert_one_each("take_inputs_kernel", "report_kernel")


def shifted(values: Tensor, by: int) -> Tensor:
    """Return a copy at another address."""
    return torch.cat((values.new_zeros(by), values))[by:]


def state_of(starts: list[int], ends: list[int], shift: int) -> ForwardState:
    """Return a step whose arrays have arbitrary addresses."""
    tables = torch.zeros(len(ends), -(-max(ends) // BLOCK), dtype=torch.int64)
    state = ForwardState.of_slices(tables, starts, ends, BLOCK)
    names = ("positions", "slot_ids", "slot_offsets", "device_query_starts", "device_context_lengths")
    return replace(state, **{name: shifted(getattr(state, name), shift) for name in names})


@pytest.mark.parametrize("head_dim", [64, 24])
def test_layers_compile_once_for_all_step_sizes(launches: Launches, head_dim: int) -> None:
    heads, kv_heads = 4, 2
    attention = TritonAttention(132)
    ops = TritonOps(attention)
    kv = torch.zeros(9, BLOCK, kv_heads, 2 * head_dim)
    params = AttentionParams(scale=1.0)
    rotary = SimpleNamespace(frequencies=torch.ones(head_dim // 2), scale=1.0, dtype=torch.float32)
    steps = [([5] * rows, [6] * rows) for rows in (1, 2, 3, 31, 77, 132)]
    steps += [([0], [7]), ([0, 3], [40, 4]), ([0, 16, 2], [1, 35, 3])]
    for shift, (starts, ends) in enumerate(steps):
        state = state_of(starts, ends, shift % 3)
        tokens = state.query_starts[-1]
        angles = ops.angles(rotary, state.positions)  # type: ignore[arg-type]
        ops.attend(torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim), None, angles, kv, state, params)
        key, value = torch.zeros(2, tokens, kv_heads, head_dim)
        attention.attend(torch.zeros(tokens, heads, head_dim), key, value, kv, state, params)
        ops.add_norm(torch.zeros(tokens, 96), torch.zeros(tokens, 96), torch.ones(96), 1e-5)
        ops.silu_mul(torch.zeros(tokens, 192))
    launches.assert_one_each(
        "angles_kernel", "store_heads_kernel", "store_kernel", "partition_kernel", "decode_kernel", "merge_kernel",
        "slice_kernel", "prefill_kernel", "add_norm_kernel", "silu_mul_kernel",
    )  # fmt: skip


def test_products_of_experts_compile_once_for_few_tokens_and_once_for_many(launches: Launches) -> None:
    experts = GroupedExperts([torch.zeros(64, 48)] * 6, [torch.zeros(48, 32)] * 6)
    for tokens in (1, 2, 3, 16, 31, 48, 49, 77, 200):
        experts.forward(torch.zeros(tokens, 48), torch.zeros(tokens, 2, dtype=torch.int64))
    launches.assert_one_each("expert_product_kernel", "silu_mul_kernel")
    assert {constants for name, constants in launches.keys if name == "expert_product_kernel"} == {
        (16, 64, 32, "ieee"), (64, 64, 32, "ieee")
    }  # fmt: skip


@pytest.mark.parametrize("rounds", [False, True])
def test_quantised_products_compile_once_for_each_tile_and_for_rows_that_need_the_last_one_twice(
    launches: Launches, rounds: bool
) -> None:
    weight = quantize_weight(torch.randn(96, 1024), 8 if rounds else 4)
    compact = CompactWeight.of(replace(weight, activations="int8") if rounds else weight)
    layer = DeviceLinear.pack(compact, torch.zeros(96), DeviceFacts(132, has_float8=False, scales_rows=False))
    assert layer is not None
    for rows in (1, 2, 3, 15, 16, 17, 32, 63, 64, 65, 77, 128, 129, 200, 1111):
        layer.forward(torch.zeros(rows, 1024, dtype=torch.bfloat16))
    others = {"round_rows_kernel"} if rounds else set()
    launches.assert_one_each("quantized_product_kernel", "merge_parts_kernel", *others)
    found = [constants for name, constants in launches.keys if name == "quantized_product_kernel"]
    assert len(found) == len(PRODUCT_TILES) + 1
