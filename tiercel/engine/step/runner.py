"""The runner: launches sealed steps on the device."""

import traceback
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from tiercel.device.base import Lane, Pending
from tiercel.device.shortage import is_shortage
from tiercel.device.timer import Timer
from tiercel.engine.models.base import Model
from tiercel.engine.models.phases import PhasedModel
from tiercel.engine.sampling import DrawPlan, Grammar, Sampled, Sampler, Subset, token_logprobs
from tiercel.engine.step.graphs import DecodeGraphs
from tiercel.engine.step.halves import Overlap
from tiercel.engine.step.held import Drawn, HeldDraw, HeldStep, SampledRows
from tiercel.engine.step.inputs import BatchInputs, SequenceReader, build_inputs
from tiercel.engine.step.last_tokens import LastTokens
from tiercel.engine.step.mixed_graphs import FinalStates, MixedGraphs
from tiercel.engine.step.prompt_reads import ReadStates, read_states_no_sync
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.staging import Staging, open_staging
from tiercel.engine.step.tables import NO_PATCHES, DeviceTables, Patches
from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.errors import DeviceError, DeviceLostError, OutOfDeviceMemoryError
from tiercel.values.grammar import GRAMMAR_FAILED, NOTHING_LEFT
from tiercel.values.ids import SeqId
from tiercel.values.outcome import StepOutcome, TokenLogprobs
from tiercel.values.plan import StepPlan
from tiercel.values.request import Request, SamplingParams

_NO_TOKEN = 0  # of a slice that was not computed because its sequence had ended; the book discards it


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A sampler row to fill, in the order of the lane."""

    row: int
    params: SamplingParams
    prompt: bytes
    outputs: bytes
    grammar: Grammar | None


class CompiledGrammars(Protocol):
    """The compiled grammars of the unfinished sequences."""

    def get(self, request: Request, /) -> Grammar | None: ...


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of one nano-batch."""

    drawn: Drawn | None  # None: every row that samples is held
    held: HeldDraw | None
    timer: Timer
    read: tuple[ReadStates, ...] = ()  # of prompts

    def parts(self) -> list[Drawn]:
        """Return the draws of the sequences that had not ended before the nano-batch ran."""
        held = None if self.held is None else self.held.drawn
        return [part for part in (self.drawn, held) if part is not None]


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of the forward of one nano-batch, on the device.

    Shapes: logits [N, vocab] and rows [N] int64 of the slices that sample; draws [N, len(DrawColumn)] int32, the
            parameters of their draws, if the plan of the draws has them.
    """

    logits: Tensor
    rows: Tensor
    draws: Tensor | None
    read: list[ReadStates]  # of prompts


class DeviceFlight:
    """A step that was launched on a device."""

    def __init__(
        self,
        plan: StepPlan,
        batches: tuple[BatchInputs, ...],
        pending: Pending[list[BatchResult | None]],
        lane: Lane,
        held: HeldStep | None,
    ) -> None:
        self.plan = plan
        self._batches = batches
        self._pending = pending
        self._lane = lane
        self._held = held

    def result(self) -> StepOutcome:
        """Wait for the sampled tokens; the GIL is released meanwhile.

        Errors: DeviceError if the step failed; none of its results count. DeviceLostError if all further steps will
                fail, too.
        """
        try:
            ran = self._pending.result()
            if self._held is not None:
                self._held.settle()
        except Exception as exc:  # request data can make a forward raise any exception
            raise _failure(self._lane, exc, self.plan.step) from exc
        tokens: list[int] = []
        bad: list[int] = []
        failures: list[tuple[int, str]] = []
        logprobs: tuple[TokenLogprobs, ...] = ()
        for planned, one in zip(self._batches, ran, strict=True):
            parts = [] if one is None else one.parts()
            for part in parts:
                is_bad: list[bool] = part.sampled.bad_rows.tolist()
                if any(is_bad):
                    bad += [len(tokens) + planned.seqs.index(seq) for seq in compress(part.seqs, is_bad)]
                if part.sampled.is_empty is not None:
                    empty = compress(part.seqs, part.sampled.is_empty.tolist())
                    failures += [(len(tokens) + planned.seqs.index(seq), NOTHING_LEFT) for seq in empty]
                failures += [
                    (len(tokens) + planned.seqs.index(part.seqs[index]), f"{GRAMMAR_FAILED}: {why}")
                    for index, why in part.failures
                ]
                logprobs += token_logprobs(part.sampled, part.seqs)
            tokens += _in_order(planned.seqs, parts)
        prompts = tuple(read.part() for one in ran if one is not None for read in one.read)
        times = tuple(0.0 if one is None else one.timer.ms() for one in ran)
        return StepOutcome(tuple(tokens), logprobs, tuple(bad), times, tuple(failures), prompts)


def _in_order(seqs: tuple[SeqId, ...], parts: list[Drawn]) -> list[int]:
    """Return the tokens in the order of these sequences."""
    if len(parts) == 1 and len(parts[0].seqs) == len(seqs):
        return parts[0].sampled.tokens.tolist()
    # A sequence with proposed tokens occurs several times.
    tokens_by_seq: dict[SeqId, list[int]] = {}
    for part in parts:
        for seq, token in zip(part.seqs, part.sampled.tokens.tolist(), strict=True):
            tokens_by_seq.setdefault(seq, []).append(token)
    found = {seq: iter(tokens) for seq, tokens in tokens_by_seq.items()}
    return [next(found[seq]) if seq in found else _NO_TOKEN for seq in seqs]


def _failure(lane: Lane, error: Exception, step: int) -> DeviceError | DeviceLostError:
    if isinstance(error, DeviceLostError):
        return error
    kind = DeviceLostError if lane.is_lost(error) else DeviceError
    if kind is DeviceError and is_shortage(error):
        kind = OutOfDeviceMemoryError
        traceback.clear_frames(error.__traceback__)  # the frames hold the tensors that filled the device
    return kind("device.step_failed", f"{type(error).__name__}: {error}", step=step)


class Runner:
    """Runs steps on a model, an arena, a sampler and a lane.

    Sampled tokens stay on the device between steps (`LastTokens`), so step n + 1 is launched before the host has seen
    the tokens of step n. Only `DeviceFlight.result` waits for the device.

    A row with a grammar needs the host, which computes the tokens that it may draw from the tokens before. A lane that
    runs its jobs on a thread has them when it comes to sampling. On a device whose lane only queues work, such rows are
    *held*: drawn after the commit of the step before (`HeldStep`). Other rows are drawn with their forward.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        sampler: Sampler,
        lane: Lane,
        rows: RowBook,
        sequences: SequenceReader,
        end_tokens: tuple[int, ...],
        clock: Clock | None = None,
        staging: Staging | None = None,
        graphs: DecodeGraphs | None = None,
        grammars: CompiledGrammars | None = None,
        holds: bool | None = None,
        mixed: MixedGraphs | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """`graphs`: recorded on the same model, arena, rows and lane. `holds`: whether rows with grammars are held; by
        default on devices other than the CPU. `mixed`: recorded with the last tokens of `graphs`. `overlap`: of steps
        without a graph."""
        self._clock = clock or MonotonicClock()
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._lane = lane
        self._rows = rows
        self._sequences = sequences
        self._end_tokens = end_tokens
        self._block_size = kv.shape[2]
        self._staging = staging or open_staging(kv.device, lane)
        max_rows, max_blocks = rows.tables.shape
        last = torch.zeros(max_rows, dtype=torch.int64, device=kv.device) if graphs is None else graphs.last_tokens
        self._last_tokens = LastTokens(last, self._staging)
        self._graphs = graphs
        self._mixed = mixed
        self._overlap = overlap
        # A device that reads host memory directly gets the tables of a step with its other arrays, except for graphs.
        has_tables = graphs is not None or not self._staging.is_direct
        self._tables = DeviceTables.open(max_rows, max_blocks, kv.device) if has_tables else None
        self._grammars = grammars
        self._holds = kv.device.type != "cpu" if holds is None else holds
        self._held: HeldStep | None = None  # of the step launched last
        self._unfilled: deque[FreshRow] = deque()  # rows of failed steps that were not filled yet come first

    def launch(self, plan: StepPlan) -> DeviceFlight:
        """Queue one step on the compute lane, without waiting for the device unless the launch fails.

        Errors: DeviceError if the lane cannot take the step (a CUDA lane runs out of memory here, not in the flight).
        """
        self._rows.release(plan.gone)
        fresh = [self._fresh_row(seq) for seq in self._rows.update(plan.table_updates)]
        patches = NO_PATCHES if self._tables is None else self._rows.patches(plan.table_updates)
        book = (self._sequences, self._rows.row_by_seq, self._rows.tables, self._block_size)
        batches = tuple(build_inputs(one, *book, has_tables=self._tables is None) for one in plan.nano_batches)
        held = HeldStep(self._sampler, self._last_tokens, self._lane, self._held) if self._holds else None
        try:
            if self._held is not None:
                self._held.draw()  # before rows get other sequences, and before this step reads the tokens
            pending = self._lane.run(lambda: self._run(fresh, patches, batches, held))
        except Exception as exc:  # as in `DeviceFlight.result`
            with suppress(RuntimeError):  # raised by a lost device
                self._lane.mark().wait()  # half of the step may be queued, and its slots may be reused after this call
            raise _failure(self._lane, exc, plan.step) from exc
        self._held = held
        return DeviceFlight(plan, batches, pending, self._lane, held)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Release the rows of sequences whose steps were voided; the next table update fills new ones."""
        self._rows.release(seqs)
        self._held = None

    def _fresh_row(self, seq: SeqId) -> FreshRow:
        sequence = self._sequences[seq]
        said = sequence.tokens[sequence.num_prompt :].tobytes()
        params = sequence.request.params
        grammar = self._grammars.get(sequence.request) if self._grammars is not None and params.grammar else None
        return FreshRow(self._rows.row_by_seq[seq], params, sequence.request.prompt, said, grammar)

    @torch.inference_mode()
    def _run(
        self, fresh: list[FreshRow], patches: Patches, batches: tuple[BatchInputs, ...], held: HeldStep | None
    ) -> list[BatchResult | None]:
        """Run the step, on the lane."""
        if self._tables is not None:
            self._tables.note(patches)
        self._unfilled.extend(fresh)
        while self._unfilled:
            row = self._unfilled[0]
            self._sampler.set_row(row.row, row.params, row.prompt, row.outputs, self._end_tokens, row.grammar)
            self._unfilled.popleft()
        results = [self._run_batch(batch, held) for batch in batches]
        if held is not None:
            held.is_complete = True
        return results

    def _run_batch(self, batch: BatchInputs, held: HeldStep | None) -> BatchResult | None:
        """Run one nano-batch for the sequences that the book still knows; return None if it knows none of them.

        A sequence that has ended since the launch is not computed. Its blocks stay in deferred free until the step has
        committed, blocks that this step would have filled are never published, and its row is filled again before
        another sequence gets it. So data that was not written is never read, and the book would discard the token.
        """
        gone = frozenset(seq for seq in batch.slice_seqs if seq not in self._sequences)
        left = batch.without(gone) if gone else batch
        if left is None:
            return None
        timer = self._lane.start_timer(self._clock)
        sampling = SampledRows.of(left)
        plan = self._sampler.plan(sampling.rows, sampling.positions, sampling.output_index)
        ran = self._decode(left, plan) or self._forward(left, plan)
        result = self._sample(ran, sampling, plan, held, timer)
        if ran.read:
            result = replace(result, read=tuple(one.to_host_no_sync(self._staging) for one in ran.read))
        timer.stop()
        return result

    def _sample(
        self, ran: Forward, sampling: SampledRows, plan: DrawPlan, held: HeldStep | None, timer: Timer
    ) -> BatchResult:
        """Draw the rows of a nano-batch, or hold them."""
        if held is None or not (is_held := self._sampler.constrained(sampling.rows)).any():
            sampled = self._sampler.draw_no_sync(ran.logits, plan, ran.draws)
            return BatchResult(self._note(sampled, sampling, ran.rows), None, timer)
        logits, device_rows = ran.logits, ran.rows
        late = Subset(is_held, self._staging)
        # Copies: the next replay of a graph overwrites the logits.
        draw = held.hold_no_sync(late.copy(logits), sampling.where(is_held), late.copy(device_rows))
        if is_held.all():
            return BatchResult(None, draw, timer)
        rest = Subset(~is_held, self._staging)
        others = sampling.where(~is_held)
        sampled = self._sampler.sample_no_sync(rest.take(logits), others.rows, others.positions, others.output_index)
        return BatchResult(self._note(sampled, others, rest.take(device_rows)), draw, timer)

    def _note(self, sampled: Sampled, sampling: SampledRows, device_rows: Tensor) -> Drawn:
        """Note tokens that were drawn for the steps after this one, and move them to the host."""
        on_host = self._last_tokens.note_no_sync(sampling.rows, device_rows, sampled)
        failures = () if self._holds else self._sampler.advance(sampling.rows, on_host.tokens)
        return Drawn(sampling.seqs, on_host, failures)

    def _decode(self, batch: BatchInputs, plan: DrawPlan) -> Forward | None:
        """Run a nano-batch in a graph; return None if no graph fits."""
        size = None if self._graphs is None else self._graphs.size_of(batch)
        if self._graphs is None or self._tables is None or size is None:
            return None
        logits, rows, draws = self._graphs.run_no_sync(batch, size, self._staging, self._tables, plan.draws)
        return Forward(logits, rows, draws, [])

    def _forward(self, batch: BatchInputs, plan: DrawPlan) -> Forward:
        """Run a nano-batch of which the head is launched singly."""
        hidden, sample_at, rows, draws = self._states(batch, plan)
        sampling = hidden if len(hidden) == len(batch.sample_at) else hidden.index_select(0, sample_at)
        read = (
            read_states_no_sync(hidden, batch.reads, self._model.logits, self._model.vocab_size, self._staging)
            if batch.reads
            else []
        )
        return Forward(self._model.logits(sampling), rows, draws, read)

    def _states(self, batch: BatchInputs, plan: DrawPlan) -> FinalStates:
        """Run a nano-batch without its head, in a graph or launched kernel by kernel.

        In a graph, states of padding follow those of the batch.
        """
        size = None if self._mixed is None else self._mixed.size_of(batch)
        if self._mixed is not None and self._tables is not None and size is not None:
            return self._mixed.run_no_sync(batch, size, self._staging, self._tables, plan.draws)
        model, overlap = self._model, self._overlap
        if overlap is not None and isinstance(model, PhasedModel) and overlap.overlaps(batch):
            return overlap.forward_no_sync(
                model, batch, self._kv, self._last_tokens, self._staging, self._tables, plan.draws
            )
        on_device = batch.upload_no_sync(self._staging, self._tables, plan.draws)
        tokens = self._last_tokens.fill_no_sync(batch, on_device)
        hidden = model.forward(tokens, self._kv, on_device.state)
        return FinalStates(hidden, on_device.sample_at, on_device.rows, on_device.draws)
