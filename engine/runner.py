"""The runner: launches sealed steps on the device and hands back flights."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from device.base import Lane, Pending
from engine.inputs import BatchInputs, SequenceReader, build_inputs
from engine.models.base import Model
from engine.rows import RowBook
from engine.sampling import Sampled, Sampler, token_logprobs
from tiercel.clock import Clock, MonotonicClock
from tiercel.errors import DeviceError, DeviceLostError
from tiercel.ids import SeqId
from tiercel.outcome import StepOutcome, TokenLogprobs
from tiercel.plan import StepPlan
from tiercel.request import SamplingParams

_NO_TOKEN = 0  # of a slice that was not computed, as its sequence had ended: the book discards it


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A sampler row to fill, in lane order."""

    row: int
    params: SamplingParams
    prompt: bytes
    outputs: bytes


@dataclass(frozen=True, slots=True)
class Ran:
    """One nano-batch that has run."""

    batch: BatchInputs  # without the sequences that had gone by then
    sampled: Sampled
    ms: float | None  # None on a lane that only queues: nothing has ended yet when the next is queued


class Flight:
    """A launched step."""

    def __init__(
        self, plan: StepPlan, batches: tuple[BatchInputs, ...], pending: Pending[list[Ran | None]], lane: Lane
    ) -> None:
        self.plan = plan
        self._batches = batches
        self._pending = pending
        self._lane = lane

    def result(self) -> StepOutcome:
        """Wait, with the GIL free, for what the step sampled.

        Errors: DeviceError when the device failed the step; nothing of it counts then. DeviceLostError when it will
                fail all others too.
        """
        try:
            ran = self._pending.result()
        except Exception as exc:  # the boundary round everything that request data can break in a forward
            raise _failure(self._lane, exc, self.plan.step) from exc
        tokens: list[int] = []
        bad: list[int] = []
        logprobs: tuple[TokenLogprobs, ...] = ()
        for planned, one in zip(self._batches, ran, strict=True):
            seqs: tuple[SeqId, ...] = () if one is None else one.batch.seqs
            drawn: list[int] = [] if one is None else one.sampled.tokens.tolist()
            place_by_seq = {seq: len(tokens) + index for index, seq in enumerate(planned.seqs)}
            token_by_seq = dict(zip(seqs, drawn, strict=True))
            tokens += [token_by_seq.get(seq, _NO_TOKEN) for seq in planned.seqs]
            if one is not None:
                bad_rows: list[int] = one.sampled.bad_rows.nonzero().flatten().tolist()
                bad += [place_by_seq[seqs[index]] for index in bad_rows]
                logprobs += token_logprobs(one.sampled, seqs)
        times = tuple(0.0 if one is None else one.ms for one in ran)
        return StepOutcome(tuple(tokens), logprobs, tuple(bad), tuple(ms for ms in times if ms is not None))


def _failure(lane: Lane, error: Exception, step: int) -> DeviceError | DeviceLostError:
    kind = DeviceLostError if lane.is_lost(error) else DeviceError
    return kind("device.step_failed", f"{type(error).__name__}: {error}", step=step)


class Runner:
    """Model, arena, sampler and lane behind one call: `launch`.

    Sampled tokens stay on the device between steps: `_last_tokens[row]` is the token that the row's sequence said
    last, so step n + 1 is launched before the host has seen what step n sampled.
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
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._lane = lane
        self._rows = rows
        self._sequences = sequences
        self._end_tokens = end_tokens
        self._block_size = kv.shape[2]
        self._last_tokens = torch.zeros(rows.tables.shape[0], dtype=torch.int64, device=kv.device)

    def launch(self, plan: StepPlan) -> Flight:
        """Queue one step on the compute lane. Never waits for the device.

        Errors: DeviceError when the lane cannot take it (a CUDA lane runs out of memory here, not in the flight).
        """
        self._rows.release(plan.gone)
        fresh = [self._fresh_row(seq) for seq in self._rows.update(plan.table_updates)]
        batches = tuple(
            build_inputs(batch, self._sequences, self._rows.row_by_seq, self._rows.tables, self._block_size)
            for batch in plan.nano_batches
        )
        try:
            pending = self._lane.run(lambda: self._run(fresh, batches))
        except Exception as exc:  # as in `Flight.result`: the boundary round what request data can break
            raise _failure(self._lane, exc, plan.step) from exc
        return Flight(plan, batches, pending, self._lane)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Steps of these sequences were voided: their rows are filled anew with the next table update."""
        self._rows.release(seqs)

    def _fresh_row(self, seq: SeqId) -> FreshRow:
        sequence = self._sequences[seq]
        said = sequence.tokens[sequence.num_prompt :].tobytes()
        return FreshRow(self._rows.row_by_seq[seq], sequence.request.params, sequence.request.prompt, said)

    @torch.inference_mode()
    def _run(self, fresh: list[FreshRow], batches: tuple[BatchInputs, ...]) -> list[Ran | None]:
        """The step itself, on the lane."""
        for row in fresh:
            self._sampler.set_row(row.row, row.params, row.prompt, row.outputs, self._end_tokens)
        return [self._run_batch(batch) for batch in batches]

    def _run_batch(self, batch: BatchInputs) -> Ran | None:
        """One nano-batch for those of its sequences that the book still knows; None when it knows none.

        Whoever has ended since the launch is not computed. Its blocks stay in limbo until the step has committed, none
        that this step would have filled is ever published, and its row is filled anew before anybody else has it; so
        nobody reads what was not written. Its token would be a ghost's, which the book discards.
        """
        gone = frozenset(seq for seq in batch.slice_seqs if seq not in self._sequences)
        left = batch.without(gone) if gone else batch
        if left is None:
            return None
        start_s = self._clock.now_s()
        sampled = self._forward(left)
        ms = 1e3 * (self._clock.now_s() - start_s) if self._kv.device.type == "cpu" else None
        return Ran(left, sampled, ms)

    def _forward(self, batch: BatchInputs) -> Sampled:
        device = self._kv.device
        tokens = torch.from_numpy(batch.tokens).to(device, non_blocking=True)
        if len(batch.unknown):
            rows = torch.from_numpy(batch.unknown_rows).to(device, non_blocking=True)
            tokens[torch.from_numpy(batch.unknown).to(device, non_blocking=True)] = self._last_tokens[rows]
        hidden = self._model.forward(tokens, self._kv, batch.state(device))
        sample_at = torch.from_numpy(batch.sample_at).to(device, non_blocking=True)
        logits = self._model.logits(hidden[sample_at])
        sampled = self._sampler.sample_no_sync(logits, batch.rows, batch.positions, batch.output_index)
        self._last_tokens[torch.from_numpy(batch.rows).to(device, non_blocking=True)] = sampled.tokens
        return sampled.to_host_no_sync()
