"""The runner with a real sampler and real rows, and a model that adds numbers."""

from collections.abc import Callable
from itertools import islice
from typing import TypeVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.precision import Precision
from tiercel.engine.sampling import Sampler
from tiercel.engine.step.inputs import build_inputs
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import Runner
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.policy import open_policy
from tiercel.values.errors import DeviceError, DeviceLostError, InvariantError, OutOfDeviceMemoryError
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.outcome import FinishReason
from tiercel.values.plan import NanoBatch, Plan, Slice, StepPlan, TableUpdate
from tiercel.values.request import Request, SamplingParams, pack_tokens

R = TypeVar("R")
BLOCK = 4
VOCAB = 50


class NextNumber:
    """A model whose next token is the last one plus 1. It raises on token 13, and returns NaN after token 14."""

    layers, kv_heads, head_dim, vocab_size, max_model_len = 1, 1, 1, VOCAB, 100
    precision = Precision.of(torch.float32)
    impl, weights_bytes, fingerprint = "native", 0, bytes(32)

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        if (tokens == 13).any():
            raise RuntimeError("13")
        return tokens[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        rows = torch.nn.functional.one_hot(hidden[:, 0].long() + 1, VOCAB).float()
        return torch.where(hidden == 14, torch.nan, rows)


class FullLane(InlineLane):
    """A lane that refuses every job."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self._is_dead = is_dead

    def run(self, job: Callable[[], R]) -> "torch.futures.Future[R]":  # type: ignore[override]
        raise MemoryError("full")

    def is_lost(self, error: Exception) -> bool:
        return self._is_dead


class Held:
    """A job that runs when its result is requested."""

    def __init__(self, job: Callable[[], R]) -> None:
        self._job = job

    def result(self) -> object:
        return self._job()


class HeldLane(InlineLane):
    """A lane that runs jobs when their results are requested."""

    def run(self, job: Callable[[], R]) -> Held:  # type: ignore[override]
        return Held(job)


class Watched(NextNumber):
    """A model that keeps its tokens, and calls a function during a forward."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.seen: list[list[int]] = []
        self._meanwhile = meanwhile

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        assert len(state.context_lengths) == len(state.query_starts) - 1 == len(state.block_tables)
        assert state.query_starts[-1] == len(tokens) == len(state.positions) == len(state.slot_ids)
        self.seen.append(tokens.tolist())
        self._meanwhile()
        return super().forward(tokens, kv, state)


class Bench:
    """A runner and the book that it reads."""

    def __init__(self, lane: object | None = None, rows: int = 3, model: object | None = None) -> None:
        self.book = SequenceBook(open_policy("fcfs"), 100, ())
        self.rows = RowBook(rows, 25)
        kv = torch.zeros(30, 1, BLOCK, 1, 2)
        sampler = Sampler(rows, VOCAB, kv.device)
        self.lane = lane or CpuDevice(threads=1).open_lane()
        self.runner = Runner(model or NextNumber(), kv, sampler, self.lane, self.rows, self.book, ())  # type: ignore[arg-type]
        self.step = 0

    def add(self, seq: int, prompt: list[int], **params: object) -> None:
        asked = SamplingParams(temperature=0.0, max_tokens=50, **params)  # type: ignore[arg-type]
        self.book.add(Request(id=SeqId(seq), prompt=pack_tokens(prompt), params=asked, arrival_s=0.0))

    def plan(self, *slices: tuple[int, int, int], gone: tuple[int, ...] = (), fresh: tuple[int, ...] = ()) -> StepPlan:
        self.step += 1
        pieces = tuple(Slice(SeqId(seq), start, length, True) for seq, start, length in slices)
        updates = tuple(TableUpdate(SeqId(seq), 0, (SlotId(2 * seq), SlotId(2 * seq + 1))) for seq in fresh)
        plan = Plan((NanoBatch(pieces),), admitted=tuple(SeqId(seq) for seq in fresh))
        self.book.launch(plan, 0.0)
        return StepPlan(self.step, plan.nano_batches, updates, tuple(SeqId(seq) for seq in gone))


def in_nano_batches(plan: StepPlan, *counts: int) -> StepPlan:
    """Return the plan with nano-batches of this many slices."""
    slices = iter(plan.nano_batches[0].slices)
    return replace(plan, nano_batches=tuple(NanoBatch(tuple(islice(slices, count))) for count in counts))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_next_step_is_launched_before_the_host_has_seen_the_token() -> None:
    bench = Bench()
    bench.add(1, [3, 4, 5])
    bench.add(2, [20])
    first = bench.runner.launch(bench.plan((1, 0, 3), (2, 0, 1), fresh=(1, 2)))
    second = bench.runner.launch(bench.plan((2, 1, 1), (1, 3, 1)))
    assert first.result().tokens == (6, 21)
    assert second.result().tokens == (22, 7)


def test_a_row_is_free_for_another_when_its_sequence_is_gone() -> None:
    bench = Bench(rows=1)
    bench.add(1, [3])
    bench.add(2, [8])
    assert bench.runner.launch(bench.plan((1, 0, 1), fresh=(1,))).result().tokens == (4,)
    assert bench.runner.launch(bench.plan((2, 0, 1), gone=(1,), fresh=(2,))).result().tokens == (9,)
    bench.add(3, [8])
    with pytest.raises(InvariantError, match="rows"):
        bench.runner.launch(bench.plan((3, 0, 1), fresh=(3,)))


def test_an_exception_of_a_forward_fails_the_step() -> None:
    bench = Bench()
    bench.add(1, [13])
    with pytest.raises(DeviceError, match="RuntimeError: 13"):
        bench.runner.launch(bench.plan((1, 0, 1), fresh=(1,))).result()


def test_a_row_with_logits_that_are_not_finite_is_named() -> None:
    bench = Bench()
    bench.add(1, [5])
    bench.add(2, [14])
    outcome = bench.runner.launch(bench.plan((1, 0, 1), (2, 0, 1), fresh=(1, 2))).result()
    assert outcome.tokens[0] == 6
    assert outcome.bad == (1,)


def test_log_probabilities_are_returned_for_rows_that_requested_them() -> None:
    bench = Bench()
    bench.add(1, [5])
    bench.add(2, [6], logprobs=2)
    found = bench.runner.launch(bench.plan((1, 0, 1), (2, 0, 1), fresh=(1, 2))).result().logprobs
    assert [(one.seq, one.token, one.rank, len(one.top_tokens)) for one in found] == [(2, 7, 1, 2)]


def test_refused_launches_hold_no_row_once_forgotten() -> None:
    bench = Bench(FullLane(), rows=2)
    for seq in range(1, 8):
        bench.add(seq, [1])
        with pytest.raises(DeviceError, match="MemoryError: full"):
            bench.runner.launch(bench.plan((seq, 0, 1), fresh=(seq,)))
        bench.runner.forget([SeqId(seq)])


def test_a_row_whose_step_failed_before_it_was_filled_is_filled_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(InlineLane())
    bench.add(1, [3, 4])
    bench.add(2, [5, 6], logit_bias=((2, 100.0),))
    set_row, asked = Sampler.set_row, []

    def fill(sampler: Sampler, row: int, *wishes: object) -> None:
        asked.append(row)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        set_row(sampler, row, *wishes)  # type: ignore[arg-type]

    # Patched: the runner creates its sampler itself, and only a full GPU fails here.
    monkeypatch.setattr(Sampler, "set_row", fill)
    plan = bench.plan((1, 0, 2), fresh=(1, 2))
    with pytest.raises(OutOfDeviceMemoryError):
        bench.runner.launch(plan)
    bench.runner.forget([SeqId(1)])
    assert bench.runner.launch(plan).result().tokens == (5,)
    assert bench.runner.launch(bench.plan((2, 0, 2))).result().tokens == (2,)  # because of its logit bias


class BrokenOffLane(InlineLane):
    """A lane that refuses a job after taking a part of it; the part ends when its mark is awaited."""

    def __init__(self) -> None:
        self.is_busy = False

    def run(self, job: Callable[[], R]) -> "torch.futures.Future[R]":  # type: ignore[override]
        self.is_busy = True
        raise RuntimeError("refused")

    def mark(self) -> "BrokenOffLane":  # type: ignore[override]
        return self

    def wait(self) -> None:
        self.is_busy = False


def test_queued_work_of_a_refused_launch_has_ended_before_its_slots_are_reused() -> None:
    lane = BrokenOffLane()
    bench = Bench(lane)
    bench.add(1, [1])
    with pytest.raises(DeviceError, match="refused"):
        bench.runner.launch(bench.plan((1, 0, 1), fresh=(1,)))
    assert not lane.is_busy


def test_a_lost_device_is_not_blamed_on_a_request() -> None:
    bench = Bench(FullLane(is_dead=True))
    bench.add(1, [1])
    with pytest.raises(DeviceLostError):
        bench.runner.launch(bench.plan((1, 0, 1), fresh=(1,)))


def test_inputs_contain_the_place_of_every_token() -> None:
    bench = Bench()
    bench.add(1, [3, 4, 5, 6, 7, 8])
    bench.add(2, [9])
    plan = bench.plan((1, 2, 4), (2, 0, 1), fresh=(1, 2))
    bench.rows.update(plan.table_updates)
    inputs = build_inputs(plan.nano_batches[0], bench.book, bench.rows.row_by_seq, bench.rows.tables, BLOCK)
    assert inputs.tokens.tolist() == [5, 6, 7, 8, 9]
    assert inputs.query_starts.tolist() == [0, 4, 5]
    assert inputs.context_lengths.tolist() == [6, 1]
    assert inputs.token_positions.tolist() == [2, 3, 4, 5, 0]
    assert inputs.slot_ids.tolist() == [2, 2, 3, 3, 4]
    assert inputs.slot_offsets.tolist() == [2, 3, 0, 1, 0]
    assert inputs.sample_at.tolist() == [3, 4]
    assert inputs.positions.tolist() == [6, 1]
    assert inputs.output_index.tolist() == [0, 0]
    assert inputs.block_tables.tolist() == [[2, 3], [4, 5]]
    assert np.array_equal(inputs.rows, [0, 1])


def test_tokens_of_nano_batches_are_in_the_order_of_their_slices() -> None:
    bench = Bench()
    for seq, first in ((1, 3), (2, 20), (3, 30)):
        bench.add(seq, [first])
    plan = bench.plan((1, 0, 1), (2, 0, 1), (3, 0, 1), fresh=(1, 2, 3))
    outcome = bench.runner.launch(in_nano_batches(plan, 1, 2)).result()
    assert outcome.tokens == (4, 21, 31)
    assert len(outcome.nano_batch_ms) == 2
    assert all(ms > 0 for ms in outcome.nano_batch_ms)


def test_a_sequence_that_has_ended_before_its_nano_batch_is_not_computed() -> None:
    model = Watched()
    bench = Bench(HeldLane(), model=model)
    bench.add(1, [5, 6, 7])
    bench.add(2, [20], logprobs=1)
    bench.add(3, [30], logprobs=1)
    plan = bench.plan((1, 0, 3), (2, 0, 1), (3, 0, 1), fresh=(1, 2, 3))
    flight = bench.runner.launch(in_nano_batches(plan, 1, 2))
    for seq in (1, 2):
        bench.book.finish(SeqId(seq), FinishReason.ABORT, 0.0)
    outcome = flight.result()
    assert model.seen == [[30]]
    assert outcome.tokens == (0, 0, 31)  # tokens of ended sequences are ghosts
    assert [found.seq for found in outcome.logprobs] == [3]
    assert outcome.nano_batch_ms[0] == 0.0
    commit = bench.book.commit(plan.nano_batches, list(outcome.tokens), 0.0)
    assert commit.sampled == [(3, 31)]


def test_an_abort_while_a_step_runs_ends_it_at_the_next_nano_batch() -> None:
    model = Watched(lambda: bench.book.finish(SeqId(2), FinishReason.ABORT, 0.0) if 2 in bench.book else None)  # type: ignore[func-returns-value]
    bench = Bench(model=model)
    bench.add(1, [5])
    bench.add(2, [20, 21, 22, 23])
    bench.add(3, [14])
    plan = bench.plan((1, 0, 1), (2, 0, 4), (3, 0, 1), fresh=(1, 2, 3))
    outcome = bench.runner.launch(in_nano_batches(plan, 1, 2)).result()
    assert model.seen == [[5], [14]]
    assert outcome.tokens[:2] == (6, 0)
    assert outcome.bad == (2,)


def test_the_next_step_knows_the_token_of_a_later_nano_batch() -> None:
    model = Watched()
    bench = Bench(HeldLane(), model=model)
    bench.add(1, [3])
    bench.add(2, [20])
    first = bench.runner.launch(in_nano_batches(bench.plan((1, 0, 1), (2, 0, 1), fresh=(1, 2)), 1, 1))
    second = bench.runner.launch(bench.plan((1, 1, 1), (2, 1, 1)))
    assert first.result().tokens == (4, 21)
    bench.book.finish(SeqId(1), FinishReason.ABORT, 0.0)
    assert second.result().tokens == (0, 22)
    assert model.seen[-1] == [21]
