"""The partition of a decode's contexts, and how long it is valid."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.attention.scene import CPU, KERNEL_DEVICE, Scene
from tests.engine.kernels.checking import relative_error
from tests.engine.recording import FakeRecorder
from tiercel.device.cpu import InlineLane
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_partition import partition_contexts
from tiercel.engine.kernels.tiles import DecodeForm, Tile
from tiercel.engine.models.precision import Precision
from tiercel.engine.step.graphs import record_graphs
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.staging import HostRing, Staging
from tiercel.engine.step.tables import DeviceTables
from tiercel.values.ids import SeqId

KEYS = 16
TILE = Tile(rows=16, keys=KEYS, warps=4, stages=2)
in_interpreter = pytest.mark.skipif(KERNEL_DEVICE != CPU, reason="the interpreter is for machines without a GPU")


def state_of(pieces: list[tuple[int, int]]) -> ForwardState:
    """Return the state of a step with these (tokens before, tokens of the slice)."""
    tables = torch.zeros(len(pieces), 1, dtype=torch.int64, device=KERNEL_DEVICE)
    ends = [start + length for start, length in pieces]
    return ForwardState.of_slices(tables, [start for start, _ in pieces], ends, 16, writes_null_block=True)


def in_sight(start: int, length: int, window: int | None) -> set[int]:
    """Return the tiles that a slice of one token sees."""
    if length > 1:
        return set()
    return {key // KEYS for key in range(0 if window is None else max(0, start + 1 - window), start + 1)}


def check_partition(pieces: list[tuple[int, int]], window: int | None, shares: int, at_once: int) -> list[int]:
    """Check the properties of a partition. Return the number of tiles of each part."""
    partition = partition_contexts(state_of(pieces), window, shares, TILE, 3, at_once)
    sight = [in_sight(start, length, window) for start, length in pieces]
    bound = max(1, math.ceil(sum(map(len, sight)) / shares))
    sequences, firsts, ends = partition.parts.tolist()
    starts, divided = partition.part_starts.tolist(), partition.divided.tolist()
    given = starts[-1]
    assert starts[0] == 0
    assert given <= len(sequences) == len(pieces) + shares
    assert sequences[given:] == [-1] * (len(sequences) - given)
    for sequence, tiles in enumerate(sight):
        parts = range(starts[sequence], starts[sequence + 1])
        assert all(sequences[part] == sequence for part in parts)
        assert [tile for part in parts for tile in range(firsts[part], ends[part])] == sorted(tiles)
        assert all(0 < ends[part] - firsts[part] <= bound for part in parts)
        assert len(parts) == math.ceil(len(tiles) / bound) <= shares
    several = [sequence for sequence in range(len(pieces)) if starts[sequence + 1] - starts[sequence] > 1]
    assert partition.ended.tolist() == [[0, 0, 0]] * len(pieces)
    assert divided == several + [-1] * (min(len(pieces), shares) - len(several))
    return [ends[part] - firsts[part] for part in range(given)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(3)
def test_every_tile_in_sight_lies_in_one_part_and_no_part_is_too_long(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([1, 2, draw.randrange(3, 40), draw.randrange(3, 40)])
    longest = draw.choice([1, KEYS, 100, 5000])
    contexts = [draw.choice([0, KEYS - 1, KEYS, draw.randrange(longest)]) for _ in range(count)]
    pieces = [(context, draw.choice([1, 1, 1, 1, 7])) for context in contexts]
    shares = draw.choice([1, 2, 3, draw.randrange(1, 50), 256])

    check_partition(
        pieces, draw.choice([None, None, 1, KEYS, draw.randrange(1, 900)]), shares, draw.choice([2, 8, 32, 512])
    )


def test_a_long_context_among_short_ones_is_walked_by_many_programs() -> None:
    pieces = [(1023, 1)] * 95 + [(131_071, 1)]

    lengths = check_partition(pieces, None, shares=132, at_once=512)

    total = (95 * 1024 + 131_072) // KEYS
    assert sum(lengths) == total
    assert max(lengths) <= math.ceil(total / 132)
    assert sum(length == max(lengths) for length in lengths) > 70


def test_many_contexts_of_similar_length_are_not_cut() -> None:
    assert check_partition([(1023, 1)] * 600, None, shares=132, at_once=512) == [64] * 600


def test_a_step_without_single_tokens_has_no_parts() -> None:
    assert check_partition([(0, 40), (7, 2)], None, shares=5, at_once=512) == []


# ---- a partition is valid for one step only


@in_interpreter
@pytest.mark.slow
def test_a_step_is_cut_once_for_all_layers_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: Counter[str] = Counter()
    run = InterpretedFunction.run

    def count(kernel: InterpretedFunction, *args: object, **given: object) -> object:
        launches[kernel.fn.__name__] += 1
        return run(kernel, *args, **given)

    monkeypatch.setattr(InterpretedFunction, "run", count)
    backend = TritonAttention(1, decode_tile=TILE)
    layers = [AttentionParams(scale=0.25, window=window) for window in (None, 20, None, 20, None)]
    for seed in range(2):
        scene = Scene([(40, 1), (3, 1)], torch.float32, seed)
        for params in layers:
            assert relative_error(scene.attend(backend, params), scene.expected(params)) < 1e-3
    assert launches["partition_kernel"] == 2 * 2
    assert launches["decode_kernel"] == 2 * len(layers)


class AttentionAlone:
    """A model whose tokens are rows of a scene, and whose logits are the result of attention."""

    layers, kv_heads, head_dim, max_model_len = 1, 2, 32, 1000
    precision = Precision.of(torch.float32)
    impl, weights_bytes, fingerprint, is_capturable = "native", 0, bytes(32), True

    def __init__(self, scene: Scene, form: DecodeForm) -> None:
        self.vocab_size = scene.query[0].numel()
        self._scene = scene
        self._attention = TritonAttention(1, decode_tile=TILE, form=form)

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        rows = (self._scene.query[tokens], self._scene.key[tokens], self._scene.value[tokens])
        return self._attention.attend(*rows, kv, state, AttentionParams(scale=0.25)).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@in_interpreter
@pytest.mark.parametrize("form", [DecodeForm(), DecodeForm(folds_merge=True)])
@torch.inference_mode()
@pytest.mark.sampled(1)
def test_a_graph_cuts_contexts_at_every_replay(form: DecodeForm) -> None:
    scene = Scene([(0, 1), (5, 1), (230, 1), (90, 1)], torch.float32)
    model, recorder = AttentionAlone(scene, form), FakeRecorder()
    blocks = scene.state.block_tables.shape[1]
    graphs = record_graphs(model, scene.kv, 4, blocks, InlineLane(), recorder, (2,), lambda done, total: None)
    assert graphs is not None
    staging = Staging(CPU, InlineLane(), HostRing(is_pinned=False))
    expected = scene.expected(AttentionParams(scale=0.25))
    for rows in ([0, 1], [2, 3], [1, 2], [3, 0]):
        batch = decode_of(scene, rows)
        assert graphs.size_of(batch) == 2

        out, *_ = graphs.run_no_sync(batch, 2, staging, DeviceTables(scene.state.block_tables))

        assert relative_error(out.view(2, -1, 32), expected[rows]) < 1e-3


def decode_of(scene: Scene, rows: list[int]) -> BatchInputs:
    """Return one decode step of these sequences."""
    state, count, at = scene.state, len(rows), np.array(rows)
    lengths = np.array(state.context_lengths, np.int32)[at]
    return BatchInputs(
        tokens=at,
        is_unknown=np.zeros(count, np.bool_),
        token_rows=at,
        token_positions=lengths.astype(np.int64) - 1,
        slot_ids=state.slot_ids.numpy()[at],
        slot_offsets=state.slot_offsets.numpy()[at],
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lengths=lengths,
        slice_rows=at,
        num_blocks=state.block_tables.shape[1],
        block_tables=None,
        sample_at=np.arange(count),
        rows=at,
        positions=lengths.astype(np.int64),
        output_index=np.zeros(count, np.int64),
        seqs=tuple(SeqId(row) for row in rows),
        slice_seqs=tuple(SeqId(row) for row in rows),
    )
