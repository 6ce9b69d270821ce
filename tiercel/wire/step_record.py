"""The record of what the engine computes, in memory that outlives it.

The engine writes the sequences of a step before it launches the step, and clears them when the step is committed. When
the engine has died, the HTTP process reads which sequences it was working on: one of them may be the cause.
"""

import mmap
import os
import struct
from array import array
from collections.abc import Sequence

from msgspec import Struct

from tiercel.values.ids import SeqId
from tiercel.values.plan import Slice

_STEPS = 4  # more than are ever in flight
_HEAD = struct.Struct("<QQ")  # of a step: its number, its number of sequences; number 0: no step
_FRONT = struct.Struct("<QdQ")  # request being taken in, time limit for a step to end, request being compiled
_ROW_BYTES = 16  # sequence id, tokens at the end of its slice
ANY_SEQ = SeqId((1 << 64) - 1)  # entered while the next step is planned for all sequences


class EngineTrail(Struct, frozen=True):
    """The work of an engine at its death."""

    # The request whose grammar it was compiling or that it was taking in, or the suspect or ANY_SEQ that it was
    # planning.
    entering: SeqId | None = None
    end_by_seq: dict[SeqId, int] = {}  # tokens at the end of the slice, of each sequence in a step in flight

    @property
    def is_empty(self) -> bool:
        """Whether no request can be the cause of the death."""
        return self.entering is None and not self.end_by_seq


class StepRecord:
    """The sequences of the steps in flight. One process writes; another one reads when the first is dead.

    A process that is killed loses no store to shared memory, so each record is complete once its number is written.
    """

    def __init__(self, pages: mmap.mmap, max_rows: int) -> None:
        self._pages = pages
        self._max_rows = max_rows
        self._step_bytes = _HEAD.size + max_rows * _ROW_BYTES

    @staticmethod
    def open(max_rows: int, fd: int | None = None) -> "StepRecord":
        """Map a memfd for steps of up to `max_rows` sequences; None: private memory.

        Errors: OSError, ValueError if it cannot be mapped.
        """
        size = _FRONT.size + _STEPS * (_HEAD.size + max_rows * _ROW_BYTES)
        if fd is None:
            return StepRecord(mmap.mmap(-1, size), max_rows)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        return StepRecord(mmap.mmap(fd, size), max_rows)

    def enter(self, seq: SeqId) -> None:
        """Note that a request is being taken in, or the next step is being planned for it or for ANY_SEQ; 0: none."""
        struct.pack_into("<Q", self._pages, 0, seq)

    def allow(self, limit_s: float) -> None:
        """Note how long the steps in flight may take until the engine counts as hung."""
        struct.pack_into("<d", self._pages, 8, limit_s)

    def compile(self, seq: SeqId) -> None:
        """Note that the grammar of a request is being compiled, on a thread beside the loop's; 0: none."""
        struct.pack_into("<Q", self._pages, 16, seq)

    @property
    def limit_s(self) -> float:
        """The time that the steps in flight may take; 0 before the first step."""
        return _FRONT.unpack_from(self._pages, 0)[1]

    def launch(self, step: int, slices: Sequence[Slice]) -> None:
        """Note the slices of a step that is about to be launched. Steps are numbered from 1."""
        pieces = slices[: self._max_rows]
        start = self._start(step)
        rows_start = start + _HEAD.size
        _HEAD.pack_into(self._pages, start, 0, 0)
        # All ids, then all ends: two short loops, because every step of the engine does this.
        rows = array("Q", [piece.seq for piece in pieces])
        rows.extend([piece.start + piece.length for piece in pieces])
        self._pages[rows_start : rows_start + 8 * len(rows)] = rows.tobytes()
        _HEAD.pack_into(self._pages, start, step, len(pieces))

    def end(self, step: int) -> None:
        """Note that a step is over and its results are on their way."""
        start = self._start(step)
        if _HEAD.unpack_from(self._pages, start)[0] == step:
            _HEAD.pack_into(self._pages, start, 0, 0)

    def read(self) -> EngineTrail:
        """Return what the record holds. The record may hold anything: a dying process may have overwritten it."""
        entering, _, compiled = _FRONT.unpack_from(self._pages, 0)
        ends: dict[SeqId, int] = {}
        for number in range(_STEPS):
            start = self._start(number)
            step, count = _HEAD.unpack_from(self._pages, start)
            if not step:
                continue
            rows = array("Q")
            rows_start = start + _HEAD.size
            rows.frombytes(self._pages[rows_start : rows_start + _ROW_BYTES * min(count, self._max_rows)])
            half = len(rows) // 2
            for seq, end in zip(rows[:half], rows[half:], strict=True):
                ends[SeqId(seq)] = max(end, ends.get(SeqId(seq), 0))
        # A compilation is far more likely to be the cause than the planning of a step.
        cause = compiled or entering
        return EngineTrail(SeqId(cause) if cause else None, ends)

    def clear(self) -> None:
        """Forget everything, for the next engine."""
        _FRONT.pack_into(self._pages, 0, 0, 0.0, 0)
        for number in range(_STEPS):
            _HEAD.pack_into(self._pages, self._start(number), 0, 0)

    def _start(self, step: int) -> int:
        return _FRONT.size + step % _STEPS * self._step_bytes
