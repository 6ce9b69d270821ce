"""Attention backends against attention written out over plain histories, and against each other."""

import math
import mmap
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.attention import Attention, AttentionParams, ForwardState, open_attention
from engine.attention.grouped import GroupedAttention
from engine.attention.sdpa import SdpaAttention

BLOCK = 16
BACKENDS = [SdpaAttention, GroupedAttention]
TOLERANCE_BY_DTYPE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Scene:
    """Sequences with histories in an arena of several layers; everything that nobody wrote is NaN."""

    def __init__(
        self, pieces: Sequence[tuple[int, int]], dtype: torch.dtype, seed: int = 0, kv_heads: int = 2, group: int = 3
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        head_dim, layers, layer = 32, 3, 1
        lengths = [start + length for start, length in pieces]
        blocks = max(-(-length // BLOCK) for length in lengths)
        order = torch.randperm(len(pieces) * blocks, generator=draw) + 1
        tables = order.view(len(pieces), blocks)
        for index, length in enumerate(lengths):
            tables[index, -(-length // BLOCK) :] = 0  # the sink
        self.kv = torch.full((len(order) + 1, layers, BLOCK, kv_heads, 2 * head_dim), float("nan"), dtype=dtype)[
            :, layer
        ]
        self.histories = [torch.randn(2, length, kv_heads, head_dim, generator=draw).to(dtype) for length in lengths]
        for (start, _), table, history in zip(pieces, tables, self.histories, strict=True):
            for position in range(start):
                row = history[:, position].transpose(0, 1).flatten(1)
                self.kv[table[position // BLOCK], position % BLOCK] = row
        self.query = torch.randn(sum(length for _, length in pieces), kv_heads * group, head_dim, generator=draw).to(
            dtype
        )
        self.key, self.value = torch.cat(
            [history[:, start:] for (start, _), history in zip(pieces, self.histories, strict=True)], dim=1
        )
        self.state = ForwardState.of_slices(tables, [start for start, _ in pieces], lengths, BLOCK)

    def attend(self, backend: Attention, params: AttentionParams) -> Tensor:
        return backend.attend(self.query, self.key, self.value, self.kv, self.state, params)

    def expected(self, params: AttentionParams) -> Tensor:
        """Attention written out in float64, one query and one head at a time."""
        rows = []
        for index, history in enumerate(self.histories):
            first, last = self.state.query_starts[index : index + 2]
            for row in range(first, last):
                position = int(self.state.positions[row])
                rows.append(
                    torch.stack([self._head(row, head, position, history, params) for head in range(self.heads)])
                )
        return torch.stack(rows).to(self.query.dtype)

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def _head(self, row: int, head: int, position: int, history: Tensor, params: AttentionParams) -> Tensor:
        kv_head = head // (self.heads // history.shape[2])
        first = 0 if params.window is None else max(0, position + 1 - params.window)
        keys, values = history[:, first : position + 1, kv_head].double()
        scores = keys @ self.query[row, head].double() * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        sink = torch.exp(params.sinks[head].double()) if params.sinks is not None else 0.0
        weights = torch.exp(scores) / (torch.exp(scores).sum() + sink)
        return weights @ values


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("pieces", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_computes_what_attention_is(
    backend: type[Attention], pieces: list[tuple[int, int]], params: AttentionParams
) -> None:
    scene = Scene(pieces, torch.float32)

    out = scene.attend(backend(), params)

    torch.testing.assert_close(out, scene.expected(params), atol=TOLERANCE_BY_DTYPE[torch.float32], rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_stays_within_the_tolerance_of_its_dtype(
    backend: type[Attention], params: AttentionParams, dtype: torch.dtype
) -> None:
    scene = Scene(STEPS["mixed"], dtype)

    out = scene.attend(backend(), params)

    torch.testing.assert_close(out, scene.expected(params), atol=TOLERANCE_BY_DTYPE[dtype], rtol=0)


@pytest.mark.parametrize("seed", range(12))
def test_grouped_agrees_with_the_reference_on_random_ragged_steps(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [
        (draw.choice([0, draw.randrange(200)]), draw.choice([1, 1, 1, draw.randrange(1, 60)]))
        for _ in range(draw.randrange(1, 20))
    ]
    kv_heads, group = draw.choice([(1, 1), (2, 3), (4, 1), (1, 6)])
    dtype = draw.choice(list(TOLERANCE_BY_DTYPE))
    window = draw.choice([None, None, draw.randrange(1, 100)])
    params = AttentionParams(scale=1 / math.sqrt(32), window=window)
    one, two = (Scene(pieces, dtype, seed, kv_heads, group) for _ in range(2))

    torch.testing.assert_close(
        one.attend(GroupedAttention(), params),
        two.attend(SdpaAttention(), params),
        atol=TOLERANCE_BY_DTYPE[dtype],
        rtol=0,
    )
    assert torch.equal(one.kv.nan_to_num(7), two.kv.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_slots_of_the_step_are_written(backend: type[Attention]) -> None:
    scene = Scene(STEPS["mixed"], torch.float32)
    before = scene.kv.clone()

    scene.attend(backend(), PARAMS["plain"])

    after = scene.kv.clone()
    after[scene.state.slot_ids, scene.state.slot_offsets] = before[scene.state.slot_ids, scene.state.slot_offsets]
    assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))


def test_grouped_layers_of_one_step_may_differ_in_window() -> None:
    scene, backend = Scene(STEPS["decode"], torch.float32), GroupedAttention()

    for name in ("plain", "window", "plain", "window_of_a_block"):
        torch.testing.assert_close(scene.attend(backend, PARAMS[name]), scene.expected(PARAMS[name]), atol=2e-5, rtol=0)


def test_grouped_keeps_nothing_from_one_step_to_the_next() -> None:
    backend = GroupedAttention()

    for seed, name in enumerate(("decode", "one", "mixed", "decode_of_like_lengths", "decode")):
        scene = Scene(STEPS[name], torch.float32, seed)
        torch.testing.assert_close(
            scene.attend(backend, PARAMS["plain"]), scene.expected(PARAMS["plain"]), atol=2e-5, rtol=0
        )


def test_grouped_works_in_and_out_of_inference_mode() -> None:
    scene, backend = Scene(STEPS["decode"], torch.float32), GroupedAttention()

    with torch.inference_mode():
        inside = scene.attend(backend, PARAMS["plain"])

    assert torch.equal(scene.attend(backend, PARAMS["plain"]), inside)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_may_lie_beyond_two_to_the_31_elements(backend: type[Attention]) -> None:
    scene = Scene(STEPS["mixed"], torch.bfloat16)
    slots = scene.kv.shape[0]
    highest = int(scene.state.slot_ids.max())
    stride = 2**31 // highest + scene.kv[0].numel()
    no_reserve = 0x4000  # Linux's MAP_NORESERVE: 4 GiB of addresses, a few pages of memory
    memory = mmap.mmap(-1, 2 * slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    far = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(scene.kv.shape, (stride, *scene.kv.stride()[1:]))
    far.copy_(scene.kv)
    assert far.stride(0) * highest > 2**31
    expected = scene.attend(backend(), PARAMS["window"])

    out = backend().attend(scene.query, scene.key, scene.value, far, scene.state, PARAMS["window"])

    assert torch.equal(out, expected)
    assert torch.equal(far.nan_to_num(7), scene.kv.nan_to_num(7))


def test_auto_is_grouped_on_the_cpu() -> None:
    cpu = torch.device("cpu")

    assert isinstance(open_attention("auto", cpu), GroupedAttention)
    assert isinstance(open_attention("sdpa", cpu), SdpaAttention)
    assert isinstance(open_attention("grouped", cpu), GroupedAttention)
    assert isinstance(open_attention("auto", torch.device("cuda")), SdpaAttention)
