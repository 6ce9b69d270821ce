"""The inputs of a step are the same in every bit, whichever way they take to the device."""

from array import array

import numpy as np
import pytest
import torch
from torch import Tensor

from tiercel.device.cpu import InlineLane
from tiercel.engine.sampling import DrawColumn
from tiercel.engine.step.graphs import StaticInputs
from tiercel.engine.step.inputs import BatchInputs, DeviceInputs, build_inputs
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.staging import Carrier, CopyCarrier, HostRing, KernelCarrier, Staging, open_staging
from tiercel.engine.step.tables import DeviceTables
from tiercel.scheduler.account import Account
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.plan import NanoBatch, Slice, TableUpdate
from tiercel.values.request import Request, SamplingParams

CPU = torch.device("cpu")
BLOCK, BLOCKS, SEQS = 4, 12, 23

in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
CARRIERS = [CopyCarrier, pytest.param(KernelCarrier, marks=in_interpreter)]


class Scene:
    """Sequences with tokens and block tables, on the host and on a device that gets them by patches."""

    def __init__(self, rng: np.random.Generator, carrier: Carrier) -> None:
        self._rng = rng
        self.rows = RowBook(SEQS + 3, BLOCKS)
        self.tables = DeviceTables.open(*self.rows.tables.shape, CPU)
        self.staging = Staging(CPU, InlineLane(), HostRing(is_pinned=False), carrier)
        self.sequences: dict[SeqId, SequenceProgress] = {}
        for seq in map(SeqId, range(1, SEQS + 1)):
            tokens = array(
                "I", rng.integers(0, 1 << 31, rng.integers(1, BLOCK * BLOCKS - 1)).astype(np.uint32).tobytes()
            )
            request = Request(id=seq, prompt=tokens.tobytes(), params=SamplingParams(), arrival_s=0.0)
            self.sequences[seq] = SequenceProgress(request, Account(request.band, request.tenant), 8)

    def update(self) -> None:
        """Change some tables, on the host and among the unsent patches."""
        chosen = self._rng.permutation(SEQS)[: self._rng.integers(1, SEQS)]
        updates = [
            TableUpdate(SeqId(int(seq) + 1), 0, tuple(map(SlotId, self._rng.integers(1, 1 << 40, BLOCKS).tolist())))
            for seq in chosen
        ]
        self.rows.update(updates)
        self.tables.note(self.rows.patches(updates))

    def batch(self, decodes: bool) -> NanoBatch:
        """Return random slices, or the last tokens of random sequences."""
        slices: list[Slice] = []
        known = sorted(self.rows.row_by_seq)
        for seq in self._rng.permutation(known)[: self._rng.integers(1, len(known) + 1)].tolist():
            length = len(self.sequences[SeqId(seq)].tokens)
            start = length - int(self._rng.integers(0, 2)) if decodes else int(self._rng.integers(0, length))
            end = start + 1 if decodes else int(self._rng.integers(start + 1, length + 1))
            slices.append(Slice(SeqId(seq), start, end - start, decodes or end == length))
        return NanoBatch(tuple(slices))

    def built(self, batch: NanoBatch, has_tables: bool) -> BatchInputs:
        return build_inputs(
            *(batch, self.sequences, self.rows.row_by_seq, self.rows.tables, BLOCK), has_tables=has_tables
        )

    def draws(self, batch: BatchInputs) -> np.ndarray:
        return self._rng.integers(-(1 << 31), 1 << 31, (len(batch.rows), len(DrawColumn))).astype(np.int32)


def tensors(inputs: DeviceInputs) -> dict[str, Tensor | None]:
    state = inputs.state
    names = ("block_tables", "positions", "slot_ids", "slot_offsets", "device_query_starts", "device_context_lengths")
    found = {
        name: getattr(inputs, name) for name in ("tokens", "is_unknown", "token_rows", "sample_at", "rows", "draws")
    }
    return found | {name: getattr(state, name) for name in names}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("seed", range(8))
def test_ragged_steps_have_the_same_inputs_as_on_the_cpu(seed: int, carrier: type[Carrier]) -> None:
    rng = np.random.default_rng(seed)
    scene, direct = Scene(rng, carrier()), open_staging(CPU, InlineLane())
    for _ in range(12):
        scene.update()
        batch = scene.batch(decodes=False)
        wanted = scene.built(batch, has_tables=True)
        draws = scene.draws(wanted)
        found = scene.built(batch, has_tables=False).upload_no_sync(scene.staging, scene.tables, draws)
        there = wanted.upload_no_sync(direct, draws=draws)
        assert found.state.query_starts == there.state.query_starts
        for (name, one), other in zip(tensors(found).items(), tensors(there).values(), strict=True):
            assert one is not None and other is not None
            assert one.dtype == other.dtype and torch.equal(one, other), name


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("seed", range(8))
def test_graphs_have_the_same_inputs_as_single_launches(seed: int, carrier: type[Carrier]) -> None:
    rng = np.random.default_rng(seed)
    scene, inputs = Scene(rng, carrier()), StaticInputs.open(SEQS, BLOCKS, CPU)
    last_tokens = torch.from_numpy(rng.integers(0, 1 << 31, SEQS + 3))
    for _ in range(12):
        scene.update()
        batch = scene.batch(decodes=True)
        wanted, built = scene.built(batch, has_tables=True), scene.built(batch, has_tables=False)
        draws, count = scene.draws(wanted), len(wanted.tokens)
        inputs.fill_no_sync(built, scene.staging, scene.tables, draws)
        state = inputs.state(count)
        said = np.where(wanted.is_unknown, last_tokens.numpy()[wanted.rows], wanted.tokens)
        assert inputs.tokens(count, last_tokens).tolist() == said.tolist()
        assert (
            state.block_tables[:, : wanted.num_blocks].tolist()
            == scene.rows.tables[wanted.rows, : wanted.num_blocks].tolist()
        )
        assert state.positions.tolist() == wanted.token_positions.tolist()
        assert state.slot_ids.tolist() == wanted.slot_ids.tolist()
        assert state.slot_offsets.tolist() == wanted.slot_offsets.tolist()
        assert state.device_context_lengths.tolist() == wanted.context_lengths.tolist()
        assert inputs.draws[:count].tolist() == draws.tolist()
        assert inputs.lengths[count:].tolist() == [1] * (len(inputs.lengths) - count)  # of padding
