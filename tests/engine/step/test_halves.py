"""Halves of a step that overlap: no races between the two queues, and the bits of the serial step."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.recording import VOCAB, FakeRecorder, StepBench, WeighedSum, small_decoder
from tests.engine.step.two_queues import RaceError, TwoQueues
from tiercel.device.cpu import InlineLane
from tiercel.device.fork import Fork
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.phases import AttentionCall, PhasedModel, Phases, run_in_turn
from tiercel.engine.step.graphs import StaticInputs, graph_sizes
from tiercel.engine.step.halves import Overlap, cut_batch, rows_of, run_overlapped
from tiercel.engine.step.mixed_graphs import trial_batch
from tiercel.engine.step.runner import DeviceFlight
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.plan import Slice, TableUpdate
from tiercel.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
LENGTH, BLOCKS = 40, 11  # tokens of a prompt, blocks of a sequence


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class PhasedSum(WeighedSum):
    """Three layers that each read all earlier tokens of the sequence, exact in integers. The calls are the phases."""

    layers = 3

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        self.forwards += 1
        return run_in_turn(self.phases(tokens, kv, state))

    def phases(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Phases:
        x = tokens + state.positions
        for layer in range(self.layers):
            multiplied = (3 * x + layer + 1) % VOCAB
            call = self.call(multiplied, kv, layer, state)
            yield call
            x = (multiplied + call.take()) % VOCAB
        return (x % VOCAB).float()[:, None]

    def call(self, x: Tensor, kv: Tensor, layer: int, state: ForwardState) -> AttentionCall:
        return AttentionCall(lambda: attend(x, kv, layer, state))


def attend(x: Tensor, kv: Tensor, layer: int, state: ForwardState) -> Tensor:
    """Write x to the cache and return sums over the context of each token. Shapes: x [T] int64 -> same."""
    kv[state.slot_ids, layer, state.slot_offsets, 0] = torch.stack((x, state.positions), -1).float()
    order = torch.arange(len(x), dtype=torch.int32)
    sequence = torch.searchsorted(state.device_query_starts, order, right=True) - 1
    sequence = sequence.clamp(max=len(state.device_context_lengths) - 1)  # tokens of no sequence are padding
    rows = kv[:, layer, :, 0].index_select(0, state.block_tables.flatten()).view(len(state.block_tables), -1, 2)
    at = torch.arange(rows.shape[1])
    weighed = torch.where(at < state.device_context_lengths[:, None], (rows[..., 0] + 1) * (rows[..., 1] + 1), 0)
    seen = torch.where(at <= state.positions[:, None], weighed.index_select(0, sequence), 0)
    return seen.sum(-1).long()


class SkippingQueues(TwoQueues):
    """Two queues that leave out one of their meetings."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self._skipped = skipped

    def meet(self) -> None:
        if self.meetings == self._skipped:
            self.meetings += 1
            return
        super().meet()


def always(*_: object) -> bool:
    return True


def never(*_: object) -> bool:
    return False


class HalvesBench(StepBench):
    """Random mixes of prompts and decodes of six sequences."""

    def __init__(self, model: PhasedSum, seed: int, queues: TwoQueues | None, recorder: FakeRecorder | None) -> None:
        overlap = None if queues is None else Overlap(queues, always, always)
        sizes = (2, 3, 5, 6)  # of decodes; odd sizes have halves of different lengths
        super().__init__(model, 6, recorder, InlineLane(), sizes=sizes, blocks=BLOCKS, overlap=overlap)
        self._rng = random.Random(seed)
        self._done = dict.fromkeys(range(1, 7), 0)
        self.open([[self._rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in self._done], GREEDY)
        self._updates = tuple(
            TableUpdate(SeqId(n), 0, tuple(SlotId(BLOCKS * n - at) for at in range(BLOCKS))) for n in self._done
        )

    def run(self, steps: int) -> list[tuple[int, ...]]:
        """Return the tokens of each step."""
        return [self._step().result().tokens for _ in range(steps)]

    def _step(self) -> DeviceFlight:
        rng, done = self._rng, self._done
        longest = rng.choice([1, 1, 3, 12])
        slices: list[Slice] = []
        for number in rng.sample(sorted(done), rng.randrange(1, 7)):
            length = min(rng.randrange(1, longest + 1), LENGTH - done[number])
            if length:
                slices.append(Slice(SeqId(number), done[number], length, True))
                done[number] += length
        if not slices:
            slices = [Slice(SeqId(1), LENGTH - 1, 1, True)]
        updates, self._updates = self._updates, ()
        return self.launch(slices, updates)


# ---- tokens


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(8)
def test_halves_give_the_bits_of_the_serial_step_without_races(seed: int, has_graphs: bool) -> None:
    serial = HalvesBench(PhasedSum(), seed, None, None)
    expected = serial.run(10)
    with TwoQueues() as queues:
        bench = HalvesBench(PhasedSum(), seed, queues, FakeRecorder() if has_graphs else None)
        assert bench.run(10) == expected
        queues.assert_joined()
    assert torch.equal(bench.kv[1:], serial.kv[1:])
    assert queues.aside_operators > 0 and queues.beside_operators > 0


@pytest.mark.parametrize("rows", [2, 3, 4, 7])
def test_a_decode_graph_replays_both_halves(rows: int) -> None:
    output: list[tuple[int, ...]] = []
    for is_halved in (False, True):
        recorder = FakeRecorder()
        with TwoQueues() as queues:
            overlap = Overlap(queues, always, never) if is_halved else None
            bench = StepBench(
                PhasedSum(), 8, recorder, InlineLane(), sizes=(4, 7), blocks=2, overlap=overlap
            )  # fmt: skip
            bench.prefill([[n, n + 1, n] for n in range(8)], GREEDY)
            meetings, replays = queues.meetings, recorder.replays
            output.append(bench.decode({n + 1: 3 for n in range(rows)}).result().tokens)
            queues.assert_joined()
        assert recorder.replays == replays + 1
        assert queues.meetings == meetings + (2 * PhasedSum.layers + 1 if is_halved else 0)
    assert output[0] == output[1]


def test_a_decode_of_one_row_and_a_step_of_one_token_have_no_halves() -> None:
    with TwoQueues() as queues:
        bench = StepBench(
            PhasedSum(), 4, FakeRecorder(), InlineLane(), sizes=(1,), overlap=Overlap(queues, always, always)
        )  # fmt: skip
        bench.prefill([[5]], GREEDY)
        bench.decode({1: 1})
    assert queues.meetings == 0


@pytest.mark.parametrize("has", [(never, never), (always, never), (never, always)])
def test_what_the_table_does_not_name_is_serial(has: tuple[Callable[..., bool], Callable[..., bool]]) -> None:
    with TwoQueues() as queues:
        recorder = FakeRecorder()
        bench = StepBench(
            PhasedSum(), 4, recorder, InlineLane(), sizes=(4,), overlap=Overlap(queues, *has)
        )  # fmt: skip
        recorded = queues.meetings
        bench.prefill([[1, 2, 3], [4, 5], [6]], GREEDY)
        in_prefill = queues.meetings - recorded
        bench.decode({1: 3, 2: 2, 3: 1})
        in_decode = queues.meetings - recorded - in_prefill
    assert (in_decode > 0, in_prefill > 0) == (has[0] is always, has[1] is always)


# ---- the checks find what they look for


def overlapped(model: PhasedModel, fork: Fork) -> Tensor:
    """Run nine tokens of three sequences as halves of five and four tokens."""
    kv = torch.zeros(4, 3, 4, 1, 2)
    tables = torch.tensor([[1], [2], [3]])
    state = ForwardState.of_slices(tables, [0, 0, 0], [3, 2, 4], 4)
    parts = [ForwardState.of_slices(tables[:2], [0, 0], [3, 2], 4), ForwardState.of_slices(tables[2:], [0], [4], 4)]
    tokens = torch.arange(9)
    with fork if isinstance(fork, TwoQueues) else TwoQueues():
        phases = [model.phases(tokens[a:b], kv, part) for (a, b), part in zip(((0, 5), (5, 9)), parts, strict=True)]
        found = run_overlapped(phases[0], phases[1], fork)
    assert torch.equal(found, run_in_turn(model.phases(tokens, torch.zeros_like(kv), state)))
    return found


def test_every_meeting_is_needed() -> None:
    queues = TwoQueues()
    overlapped(PhasedSum(), queues)
    assert queues.meetings == 2 * PhasedSum.layers + 1
    for skipped in range(queues.meetings):
        with pytest.raises(RaceError):
            overlapped(PhasedSum(), SkippingQueues(skipped))


class CarelessSum(PhasedSum):
    """Lets go of the operands of an attention as soon as it is queued."""

    def call(self, x: Tensor, kv: Tensor, layer: int, state: ForwardState) -> AttentionCall:
        operands = [x.clone()]
        return AttentionCall(lambda: attend(operands.pop(), kv, layer, state))


def test_operands_that_are_let_go_too_early_are_found() -> None:
    with pytest.raises(RaceError, match="an allocation gets memory"):
        overlapped(CarelessSum(), TwoQueues())


class SharingSum(PhasedSum):
    """Has one buffer for the operands of both halves."""

    buffer = torch.zeros(5, dtype=torch.int64)

    def call(self, x: Tensor, kv: Tensor, layer: int, state: ForwardState) -> AttentionCall:
        shared = self.buffer[: len(x)]
        shared.copy_(x)
        return AttentionCall(lambda: attend(shared, kv, layer, state))


def test_a_buffer_of_both_halves_is_found() -> None:
    with pytest.raises(RaceError, match="still uses"):
        overlapped(SharingSum(), TwoQueues())


class FailingSum(PhasedSum):
    """Fails in the products of the second layer of the second half."""

    def call(self, x: Tensor, kv: Tensor, layer: int, state: ForwardState) -> AttentionCall:
        if layer == 1 and len(x) == 4:
            raise RuntimeError("out of memory")
        return super().call(x, kv, layer, state)


def test_an_error_leaves_nothing_in_the_side_queue() -> None:
    queues = TwoQueues()
    with pytest.raises(RuntimeError, match="out of memory"):
        overlapped(FailingSum(), queues)
    queues.assert_joined()


# ---- inputs


def test_halves_of_a_decode_have_disjoint_inputs() -> None:
    for size in (2, 3, 8, 33):
        inputs = StaticInputs.open(size, 4, torch.device("cpu"))
        state, middle = inputs.state(size), -(-size // 2)
        parts = (rows_of(state, 0, middle), rows_of(state, middle, size))
        for name in ("block_tables", "positions", "slot_ids", "slot_offsets", "device_context_lengths"):
            whole = getattr(state, name)
            for number, part in enumerate(parts):
                getattr(part, name).fill_(number + 1)
            assert whole.flatten().tolist() == [1] * (whole[:middle].numel()) + [2] * whole[middle:].numel()
        for part in parts:
            count = part.num_sequences
            assert part.device_query_starts.tolist() == list(part.query_starts) == list(range(count + 1))
            assert part.is_decode and len(part.positions) == count


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_batch_has_the_tokens_of_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    lengths, starts = rng.choice([1, 1, 2, 9], count), rng.integers(0, 20, count)
    total = int(lengths.sum())
    batch = trial_batch(starts, lengths, 8, rng.integers(0, VOCAB, total))
    batch = replace(batch, slot_ids=rng.integers(1, 99, total), slot_offsets=rng.integers(0, 4, total))
    for at in range(1, total):
        parts = cut_batch(batch, at)
        assert [len(part.tokens) for part in parts] == [at, total - at]
        for name in ("tokens", "token_rows", "token_positions", "slot_ids", "slot_offsets", "is_unknown", "positions"):
            assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(batch, name).tolist()
        sampled = [*parts[0].sample_at.tolist(), *(parts[1].sample_at + at).tolist()]
        assert sampled == batch.sample_at.tolist()
        for part in parts:
            ends = np.diff(part.query_starts)
            assert (ends > 0).all() and ends.sum() == len(part.tokens)
            for row, (begin, end) in enumerate(pairwise(part.query_starts.tolist())):
                # The last token of a slice is the last one that its sequence sees.
                assert part.token_positions[end - 1] + 1 == part.context_lengths[row]
                whole = batch.slice_seqs.index(part.slice_seqs[row])
                assert part.slice_rows[row] == whole
                assert set(part.token_rows[begin:end].tolist()) == {whole}


# ---- the kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.slow
def test_the_kernels_give_the_same_in_halves() -> None:
    from tiercel.engine.attention.triton import TritonAttention  # lazy: the interpreter must have been chosen
    from tiercel.engine.models.triton_ops import TritonOps  # lazy: as above

    prompts = [[3, 1, 4], [1, 5], [9], [2, 6, 5]]
    output: list[list[tuple[int, ...]]] = []
    for is_halved in (True, False):
        queues = TwoQueues()
        overlap = Overlap(queues, always, always) if is_halved else None
        model = small_decoder(TritonOps(TritonAttention(4)), "cpu", layers=2)
        bench = StepBench(model, 4, FakeRecorder(), InlineLane(), sizes=graph_sizes(4), overlap=overlap)
        flights = [bench.prefill(prompts, GREEDY)]
        flights += [bench.decode({1: 3 + at, 2: 2 + at, 4: 3 + at}) for at in range(3)]
        output.append([flight.result().tokens for flight in flights])
        assert (queues.meetings > 0) == is_halved
    assert output[0] == output[1]
