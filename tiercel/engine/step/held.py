"""Draws that wait for the tokens of the step before, because the host computes what they may draw."""

from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.device.base import Lane, Pending
from tiercel.engine.sampling import Failures, GrammarRow, Sampled, Sampler, advance
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.last_tokens import LastTokens
from tiercel.values.ids import SeqId


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a nano-batch that sample. Shapes: rows, positions, output_index [N]: see `Sampler.sample_no_sync`."""

    seqs: tuple[SeqId, ...]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    output_index: NDArray[np.int64]

    @staticmethod
    def of(batch: BatchInputs) -> "SampledRows":
        """Return all rows of a nano-batch that sample."""
        return SampledRows(batch.seqs, batch.rows, batch.positions, batch.output_index)

    def where(self, mask: NDArray[np.bool_]) -> "SampledRows":
        """Return the rows where the mask is true. Shapes: mask [N]."""
        seqs = tuple(compress(self.seqs, mask))
        return SampledRows(seqs, self.rows[mask], self.positions[mask], self.output_index[mask])


@dataclass(slots=True)
class Drawn:
    """The tokens of some sequences of a nano-batch, on the host when the lane has passed them."""

    seqs: tuple[SeqId, ...]
    sampled: Sampled
    failures: Failures = ()  # indices into `seqs`


@dataclass(slots=True)
class HeldDraw:
    """The rows of one nano-batch that have grammars.

    Shapes: logits [H, vocab], a copy; device_rows [H] int64.
    """

    rows: SampledRows
    logits: Tensor | None  # None: drawn
    device_rows: Tensor
    grammars: list[GrammarRow | None]  # the rows may belong to other sequences when the tokens are known
    drawn: Drawn | None = None


class HeldStep:
    """The held draws of one step.

    They are queued at the beginning of the next launch, or when the result of their step is requested, whichever comes
    first. The tokens of the step before are known by then if at most one step is launched ahead of the commit. If more
    are, queueing waits for those tokens.
    """

    def __init__(self, sampler: Sampler, last_tokens: LastTokens, lane: Lane, before: "HeldStep | None") -> None:
        """`before`: of the step launched before."""
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._lane = lane
        self._before = before
        self._draws: list[HeldDraw] = []
        self._pending: Pending[None] | None = None
        self._is_settled = False
        self.is_complete = False  # the lane's thread has passed the step, so that nothing more is held

    def hold_no_sync(self, logits: Tensor, rows: SampledRows, device_rows: Tensor) -> HeldDraw:
        """Keep the logits of rows until they can be drawn. Shapes: logits [H, vocab], a copy; device_rows [H]."""
        held = HeldDraw(rows, logits, device_rows, self._sampler.grammars.take(rows.rows))
        self._draws.append(held)
        return held

    def draw(self) -> None:
        """Queue the draws, once. Waits for the device only as described above."""
        if self._pending is not None or (self.is_complete and not self._draws):
            return
        self._settle_before()
        self._pending = self._lane.run(self._draw_no_sync)

    def settle(self) -> None:
        """Wait for the tokens and give them to their grammars, once."""
        if self._is_settled:
            return
        self._settle_before()
        self.draw()
        if self._pending is not None:
            self._pending.result()
        for held in self._draws:
            if held.drawn is not None:
                held.drawn.failures = advance(held.grammars, held.drawn.sampled.tokens.tolist())
        self._is_settled = True

    def _settle_before(self) -> None:
        if self._before is not None:
            self._before.settle()
            self._before = None

    @torch.inference_mode()
    def _draw_no_sync(self) -> None:
        for held in self._draws:
            if held.logits is None:
                continue
            rows = held.rows
            sampled = self._sampler.sample_no_sync(held.logits, rows.rows, rows.positions, rows.output_index)
            on_host = self._last_tokens.note_no_sync(rows.rows, held.device_rows, sampled)
            held.drawn, held.logits = Drawn(rows.seqs, on_host), None
