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
from tiercel.errors import DeviceError, DeviceLostError
from tiercel.ids import SeqId
from tiercel.outcome import StepOutcome, TokenLogprobs
from tiercel.plan import StepPlan
from tiercel.request import SamplingParams


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A sampler row to fill, in lane order."""

    row: int
    params: SamplingParams
    prompt: bytes
    outputs: bytes


class Flight:
    """A launched step."""

    def __init__(
        self, plan: StepPlan, batches: tuple[BatchInputs, ...], pending: Pending[list[Sampled]], lane: Lane
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
            sampled = self._pending.result()
        except Exception as exc:  # the boundary round everything that request data can break in a forward
            raise _failure(self._lane, exc, self.plan.step) from exc
        tokens: list[int] = []
        bad: list[int] = []
        logprobs: tuple[TokenLogprobs, ...] = ()
        for batch, drawn in zip(self._batches, sampled, strict=True):
            bad += [len(tokens) + index for index in drawn.bad_rows.nonzero().flatten().tolist()]
            tokens += drawn.tokens.tolist()
            logprobs += token_logprobs(drawn, batch.seqs)
        return StepOutcome(tuple(tokens), logprobs, tuple(bad))


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
    ) -> None:
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
    def _run(self, fresh: list[FreshRow], batches: tuple[BatchInputs, ...]) -> list[Sampled]:
        """The step itself, on the lane."""
        for row in fresh:
            self._sampler.set_row(row.row, row.params, row.prompt, row.outputs, self._end_tokens)
        return [self._forward(batch) for batch in batches]

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
