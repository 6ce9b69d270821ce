"""The runner: launches sealed steps on the device."""

import traceback
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from tiercel.clock import Clock, MonotonicClock
from tiercel.device.base import Lane, Pending
from tiercel.device.shortage import is_shortage
from tiercel.device.timer import Timer
from tiercel.engine.models.base import Model
from tiercel.engine.sampling import Sampled, Sampler, token_logprobs
from tiercel.engine.step.graphs import DecodeGraphs
from tiercel.engine.step.inputs import BatchInputs, SequenceReader, build_inputs
from tiercel.engine.step.last_tokens import LastTokens
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.staging import Staging, open_staging
from tiercel.errors import DeviceError, DeviceLostError, OutOfDeviceMemoryError
from tiercel.ids import SeqId
from tiercel.outcome import StepOutcome, TokenLogprobs
from tiercel.plan import StepPlan
from tiercel.request import SamplingParams

_NO_TOKEN = 0  # of a slice that was not computed because its sequence had ended; the book discards it


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A sampler row to fill, in the order of the lane."""

    row: int
    params: SamplingParams
    prompt: bytes
    outputs: bytes


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of one nano-batch."""

    batch: BatchInputs  # without the sequences that had ended before it ran
    sampled: Sampled
    timer: Timer


class DeviceFlight:
    """A step that was launched on a device."""

    def __init__(
        self, plan: StepPlan, batches: tuple[BatchInputs, ...], pending: Pending[list[BatchResult | None]], lane: Lane
    ) -> None:
        self.plan = plan
        self._batches = batches
        self._pending = pending
        self._lane = lane

    def result(self) -> StepOutcome:
        """Wait for the sampled tokens; the GIL is released meanwhile.

        Errors: DeviceError if the step failed; none of its results count. DeviceLostError if all further steps will
                fail, too.
        """
        try:
            ran = self._pending.result()
        except Exception as exc:  # request data can make a forward raise any exception
            raise _failure(self._lane, exc, self.plan.step) from exc
        tokens: list[int] = []
        bad: list[int] = []
        logprobs: tuple[TokenLogprobs, ...] = ()
        for planned, one in zip(self._batches, ran, strict=True):
            if one is None:
                tokens += [_NO_TOKEN] * len(planned.seqs)
                continue
            seqs = one.batch.seqs
            drawn: list[int] = one.sampled.tokens.tolist()
            is_bad: list[bool] = one.sampled.bad_rows.tolist()
            if any(is_bad):
                bad += [len(tokens) + planned.seqs.index(seq) for seq in compress(seqs, is_bad)]
            if len(seqs) < len(planned.seqs):
                token_by_seq = dict(zip(seqs, drawn, strict=True))
                drawn = [token_by_seq.get(seq, _NO_TOKEN) for seq in planned.seqs]
            tokens += drawn
            logprobs += token_logprobs(one.sampled, seqs)
        times = tuple(0.0 if one is None else one.timer.ms() for one in ran)
        return StepOutcome(tuple(tokens), logprobs, tuple(bad), times)


def _failure(lane: Lane, error: Exception, step: int) -> DeviceError | DeviceLostError:
    kind = DeviceLostError if lane.is_lost(error) else DeviceError
    if kind is DeviceError and is_shortage(error):
        kind = OutOfDeviceMemoryError
        traceback.clear_frames(error.__traceback__)  # the frames hold the tensors that filled the device
    return kind("device.step_failed", f"{type(error).__name__}: {error}", step=step)


class Runner:
    """Runs steps on a model, an arena, a sampler and a lane.

    Sampled tokens stay on the device between steps (`LastTokens`), so step n + 1 is launched before the host has seen
    the tokens of step n. Only `DeviceFlight.result` waits for the device.
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
    ) -> None:
        """`graphs`: recorded on the same model, arena, rows and lane."""
        self._clock = clock or MonotonicClock()
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._lane = lane
        self._rows = rows
        self._sequences = sequences
        self._end_tokens = end_tokens
        self._block_size = kv.shape[2]
        self._last_tokens = LastTokens(
            torch.zeros(len(rows.tables), dtype=torch.int64, device=kv.device) if graphs is None else graphs.last_tokens
        )
        self._staging = staging or open_staging(kv.device, lane)
        self._graphs = graphs
        self._unfilled: deque[FreshRow] = deque()  # rows of failed steps that were not filled yet come first

    def launch(self, plan: StepPlan) -> DeviceFlight:
        """Queue one step on the compute lane, without waiting for the device unless the launch fails.

        Errors: DeviceError if the lane cannot take the step (a CUDA lane runs out of memory here, not in the flight).
        """
        self._rows.release(plan.gone)
        fresh = [self._fresh_row(seq) for seq in self._rows.update(plan.table_updates)]
        batches = tuple(
            build_inputs(batch, self._sequences, self._rows.row_by_seq, self._rows.tables, self._block_size)
            for batch in plan.nano_batches
        )
        try:
            pending = self._lane.run(lambda: self._run(fresh, batches))
        except Exception as exc:  # as in `DeviceFlight.result`
            with suppress(RuntimeError):  # raised by a lost device
                self._lane.mark().wait()  # half of the step may be queued, and its slots may be reused after this call
            raise _failure(self._lane, exc, plan.step) from exc
        return DeviceFlight(plan, batches, pending, self._lane)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Release the rows of sequences whose steps were voided; the next table update fills new ones."""
        self._rows.release(seqs)

    def _fresh_row(self, seq: SeqId) -> FreshRow:
        sequence = self._sequences[seq]
        said = sequence.tokens[sequence.num_prompt :].tobytes()
        return FreshRow(self._rows.row_by_seq[seq], sequence.request.params, sequence.request.prompt, said)

    @torch.inference_mode()
    def _run(self, fresh: list[FreshRow], batches: tuple[BatchInputs, ...]) -> list[BatchResult | None]:
        """Run the step, on the lane."""
        self._unfilled.extend(fresh)
        while self._unfilled:
            row = self._unfilled[0]
            self._sampler.set_row(row.row, row.params, row.prompt, row.outputs, self._end_tokens)
            self._unfilled.popleft()
        return [self._run_batch(batch) for batch in batches]

    def _run_batch(self, batch: BatchInputs) -> BatchResult | None:
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
        logits, rows = self._decode(left) or self._forward(left)
        sampled = self._sampler.sample_no_sync(logits, left.rows, left.positions, left.output_index)
        self._last_tokens.note_no_sync(left, rows, sampled.tokens)
        on_host = sampled.to_host_no_sync()
        timer.stop()
        return BatchResult(left, on_host, timer)

    def _decode(self, batch: BatchInputs) -> tuple[Tensor, Tensor] | None:
        """Return logits and rows of the sampling slices, from a graph; None if no graph fits."""
        size = None if self._graphs is None else self._graphs.size_of(batch)
        if self._graphs is None or size is None:
            return None
        return self._graphs.run_no_sync(batch, size, self._staging)

    def _forward(self, batch: BatchInputs) -> tuple[Tensor, Tensor]:
        """Return logits and rows of the sampling slices, launched kernel by kernel."""
        on_device = batch.upload_no_sync(self._staging)
        tokens = self._last_tokens.fill_no_sync(batch, on_device)
        hidden = self._model.forward(tokens, self._kv, on_device.state)
        sampling = hidden if batch.is_decode else hidden.index_select(0, on_device.sample_at)
        return self._model.logits(sampling), on_device.rows
