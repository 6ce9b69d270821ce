"""All layers in one native call give the same as one call for each operator, bit for bit."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conformance.models import DENSE_NATIVE_FAMILIES, VOCAB_SIZE, Family, make_checkpoint
from tests.engine.native.classes import CLASSES, library_of
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.forward.kv_cache import LIMIT_BY_DTYPE, width_of
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.layers import Linear
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.ops import Angles, LayerParts, Ops
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.engine.models.rope import Rotary
from tiercel.engine.models.weights import ContentDigest, load_weights, open_checkpoint
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.linear import PackedLinear
from tiercel.engine.native.table import CpuClass

CPU = torch.device("cpu")
BLOCK = 8  # tokens
LONG = 600  # tokens; more than the MLP computes at once
PRECISIONS = {
    "bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bf16-fp32": Precision(torch.bfloat16, torch.float32, torch.bfloat16),
    "fp16-fp32": Precision(torch.float16, torch.float32, torch.float16),
    "bf16-int8": Precision(torch.bfloat16, torch.bfloat16, torch.int8),
    "bf16-fp32-fp8": Precision(torch.bfloat16, torch.float32, torch.float8_e4m3fn),
}


class SeparateOps(NativeOps):
    """The same operators, called one by one."""

    def join_layers(self, layers: object) -> None:
        """Join nothing."""
        return


@pytest.fixture(scope="module", params=DENSE_NATIVE_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with all biases, with norms of heads, or with a sliding window, by family."""
    family: Family = request.param
    made = tmp_path_factory.mktemp(family)
    make_checkpoint(family, made, seed=3, dtype=torch.bfloat16)
    return made


def open_decoder(folder: Path, precision: Precision, ops: Ops, library: NativeLibrary) -> Decoder:
    decoder = Decoder(parse_decoder(read_config(folder)), ops, precision, CPU)
    load_weights(dict(decoder.targets()), open_checkpoint(folder), ContentDigest(), None)
    decoder.pack(library)
    return decoder


def draw_cache(slots: int, decoder: Decoder, seed: int) -> Tensor:
    """Return a cache full of random keys and values."""
    kind, generator = decoder.precision.kv, torch.Generator().manual_seed(seed)
    shape = (slots, decoder.layers, BLOCK, decoder.kv_heads, width_of(decoder.head_dim, kind))
    if kind not in LIMIT_BY_DTYPE:
        return torch.randn(shape, generator=generator).to(kind)
    kv = torch.zeros(shape, dtype=kind)
    whole = ForwardState.of_slices(torch.arange(slots)[None], [0], [slots * BLOCK], BLOCK)
    for layer in range(decoder.layers):
        key, value = torch.randn(2, slots * BLOCK, decoder.kv_heads, decoder.head_dim, generator=generator)
        write_rows(key, value, kv[:, layer], whole)
    return kv


def compute(decoder: Decoder, cache: Tensor, starts: list[int], ends: list[int]) -> list[Tensor]:
    """Return logits and the cache after one forward of slices [start, end)."""
    blocks = max(-(-end // BLOCK) for end in ends)
    tables = 1 + torch.arange(len(ends) * blocks).view(len(ends), blocks)
    tokens = torch.arange(sum(ends) - sum(starts)) * 7 % VOCAB_SIZE
    kv = cache.clone()
    with torch.inference_mode():
        state = ForwardState.of_slices(tables, starts, ends, BLOCK)
        return [decoder.logits(decoder.forward(tokens, kv, state)), kv]


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.sampled(9)
def test_joined_layers_equal_single_operators(folder: Path, cpu_class: CpuClass, kind: str) -> None:
    library, precision = library_of(cpu_class), PRECISIONS[kind]
    joined = open_decoder(folder, precision, NativeOps(library, NativeAttention(library)), library)
    single = open_decoder(folder, precision, SeparateOps(library, NativeAttention(library)), library)
    for seed in (1, *fresh_seeds(1)):
        rng = random.Random(seed)
        starts = [rng.randrange(40) for _ in range(4)]
        ends = [start + length for start, length in zip(starts, (1, rng.randrange(1, 30), 1, 5), strict=True)]
        slots = 1 + len(ends) * max(-(-end // BLOCK) for end in ends)
        cache = draw_cache(slots, joined, seed)
        got, expected = compute(joined, cache, starts, ends), compute(single, cache, starts, ends)
        assert torch.equal(got[0], expected[0]), f"seed {seed}"
        assert torch.equal(got[1].view(torch.uint8), expected[1].view(torch.uint8)), f"seed {seed}"


def test_a_long_slice_goes_through_the_mlp_in_pieces(folder: Path) -> None:
    library, precision = library_of(CpuClass.PORTABLE), PRECISIONS["bf16-fp32"]
    joined = open_decoder(folder, precision, NativeOps(library, NativeAttention(library)), library)
    single = open_decoder(folder, precision, SeparateOps(library, NativeAttention(library)), library)
    shape = (1 + LONG // BLOCK, joined.layers, BLOCK, joined.kv_heads, 2 * joined.head_dim)
    cache = torch.zeros(shape, dtype=precision.kv)
    got, expected = compute(joined, cache, [0], [LONG]), compute(single, cache, [0], [LONG])
    assert all(map(torch.equal, got, expected))


def test_sinks_count(folder: Path) -> None:
    library, precision = library_of(CpuClass.PORTABLE), PRECISIONS["bf16-fp32"]
    ops = NativeOps(library, NativeAttention(library))
    decoder = open_decoder(folder, precision, ops, library)
    config = parse_decoder(read_config(folder))
    state = ForwardState.of_slices(torch.tensor([[1]]), [0], [BLOCK], BLOCK)
    angles = ops.angles(Rotary(config.rope, config.head_dim, torch.float32, CPU), state.positions)
    kv = torch.zeros(2, config.layers, BLOCK, config.kv_heads, 2 * config.head_dim, dtype=precision.kv)

    def compute_with(sinks: Tensor | None) -> Tensor:
        parts = [
            replace(one, attention=replace(one.attention, params=replace(one.attention.params, sinks=sinks)))
            for one in decoder.parts
        ]
        runner = ops.join_layers(parts)
        assert runner is not None
        x = torch.randn(BLOCK, config.hidden_size, generator=torch.Generator().manual_seed(1))
        return torch.add(*runner.forward(x, angles, kv, state))

    none, vanishing, large = (
        compute_with(sinks) for sinks in (None, *torch.tensor([[-1e4], [3.0]]).expand(2, config.heads))
    )
    assert torch.equal(vanishing, none)
    assert not torch.allclose(large, none, atol=1e-3)


def test_layers_are_joined_only_if_all_their_parts_are_native(folder: Path) -> None:
    library, precision = library_of(CpuClass.PORTABLE), PRECISIONS["bf16"]

    def joins(ops: Ops, packed: NativeLibrary | None) -> bool:
        decoder = Decoder(parse_decoder(read_config(folder)), ops, precision, CPU)
        if packed is not None:
            decoder.pack(packed)
        return ops.join_layers(decoder.parts) is not None

    assert joins(NativeOps(library, NativeAttention(library)), library)
    assert not joins(NativeOps(library, NativeAttention(library)), None)
    assert not joins(NativeOps(library, GroupedAttention()), library)


class RandomQuantized(Linear):
    """A layer with a packed weight of 4 or 8 bits of a random kind."""

    def __init__(self, library: NativeLibrary, like: Linear, rng: random.Random, precision: Precision) -> None:
        packed = like.native
        assert packed is not None
        outputs, inputs = packed.outputs, packed.inputs
        super().__init__(inputs, (outputs,), False, precision, CPU)
        bits, draw = rng.choice((4, 8)), torch.Generator().manual_seed(rng.randrange(1 << 30))
        group = rng.choice([size for size in (16, 32, inputs) if inputs % size == 0])
        values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (outputs, inputs), generator=draw, dtype=torch.int8)
        scales = 2 * torch.rand(outputs, inputs // group, generator=draw) / inputs / (1 << bits - 1)
        offsets = torch.randn(scales.shape, generator=draw) / inputs if rng.random() < 0.5 else None
        order = torch.randperm(inputs, generator=draw) if rng.random() < 0.5 else None
        activations = "int8" if rng.random() < 0.3 else None
        weight = QuantizedWeight(values, scales, offsets, order, group, bits, activations)
        self._quantized = PackedLinear.quantized(library, weight, torch.randn(outputs, generator=draw) / 8)

    @property
    def native(self) -> PackedLinear | None:
        return self._quantized

    def forward(self, x: Tensor) -> Tensor:
        assert self._quantized is not None
        return self._quantized.forward(x)


def run_one_by_one(
    ops: Ops, layers: list[LayerParts], x: Tensor, angles: Angles, kv: Tensor, state: ForwardState
) -> tuple[Tensor, Tensor | None]:
    residual = None
    for index, one in enumerate(layers):
        normed, residual = ops.add_norm(x, residual, one.attention_norm.weight, one.attention_norm.eps)
        part = one.attention
        out = ops.attend(part.qkv.forward(normed), part.norms, angles, kv[:, index], state, part.params)
        x = part.output.forward(out.view(len(out), -1))
        normed, residual = ops.add_norm(x, residual, one.mlp_norm.weight, one.mlp_norm.eps)
        x = one.down.forward(ops.silu_mul(one.gate_up.forward(normed)))
    return x, residual


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize("seed", fast_and_slow(fresh_seeds(1), [1]))
@pytest.mark.sampled(2)
def test_quantized_layers_are_joined_beside_those_of_16_bits(
    folder: Path, cpu_class: CpuClass, kind: str, seed: int
) -> None:
    rng, library, precision = random.Random(seed), library_of(cpu_class), PRECISIONS[kind]
    ops, config = NativeOps(library, NativeAttention(library)), parse_decoder(read_config(folder))
    decoder = open_decoder(folder, precision, ops, library)

    def changed(linear: Linear) -> Linear:
        return RandomQuantized(library, linear, rng, precision) if rng.random() < 0.8 else linear

    layers = [
        replace(
            one,
            attention=replace(one.attention, qkv=changed(one.attention.qkv), output=changed(one.attention.output)),
            gate_up=changed(one.gate_up),
            down=changed(one.down),
        )
        for one in decoder.parts
    ]
    joined = ops.join_layers(layers)
    assert joined is not None
    tokens = rng.choice((1, 5, LONG))
    blocks = -(-tokens // BLOCK)
    state = ForwardState.of_slices(torch.arange(1, blocks + 1)[None], [0], [tokens], BLOCK)
    angles = ops.angles(Rotary(config.rope, config.head_dim, precision.activations, CPU), state.positions)
    kv = draw_cache(1 + blocks, decoder, seed)
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    x, kv_beside = x.to(precision.activations), kv.clone()

    got = joined.forward(x.clone(), angles, kv, state)

    expected = run_one_by_one(ops, layers, x.clone(), angles, kv_beside, state)
    assert all(one.isfinite().all() for one in got), seed
    assert torch.equal(got[0], expected[0]), seed
    assert expected[1] is not None
    assert torch.equal(got[1], expected[1]), seed
    assert torch.equal(kv.view(torch.uint8), kv_beside.view(torch.uint8)), seed
