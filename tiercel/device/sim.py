"""A simulated machine: runs the engine's loop in virtual time, without torch, and detects every wrong block.

The KV of a token is a number that depends on the sharing scope and on all tokens up to it, as real KV does. A step
compares every row that it reads with this number, so a wrong, stale or foreign block is detected at once. The sampled
token depends on the KV, too.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tiercel.values.clock import ManualClock
from tiercel.values.errors import DeviceError, InvariantError, OutOfDeviceMemoryError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import Slice, StepPlan
from tiercel.values.request import Request, unpack_tokens

_PRIME = (1 << 61) - 1
_EMPTY = -2  # a row that was never written
_GARBAGE = -1

StepTime = Callable[[Sequence[Slice]], float]
"""Returns the seconds of a step of these slices."""


def plain_step_s(slices: Sequence[Slice]) -> float:
    """Return the time of a step of an invented small model on a small machine."""
    return 1e-3 + 1e-5 * sum(piece.length for piece in slices)


def _mix(state: int, token: int) -> int:
    return ((state ^ (token + 0x9E3779B9)) * 0x2545F4914F6CDD1D + 0x632BE59BD9B4E019) % _PRIME


def expected_outputs(request: Request, vocab_size: int, end_tokens: frozenset[int], max_model_len: int) -> list[int]:
    """Return the tokens that the simulated model generates for a request."""
    tokens = list(unpack_tokens(request.prompt))
    limit = min(len(tokens) + request.params.max_tokens, max_model_len)
    state = int.from_bytes(request.scope[:4] or b"\0", "little")
    for token in tokens:
        state = _mix(state, token)
    outputs: list[int] = []
    while len(tokens) + len(outputs) < limit:
        outputs.append(state % vocab_size)
        state = _mix(state, outputs[-1])
        if outputs[-1] in end_tokens and not request.params.ignore_eos:
            break
    return outputs


class SimSequence(Protocol):
    """A sequence, as far as the machine reads it."""

    tokens: "array[int]"
    request: Request


class SimSequences(Protocol):
    """The book of sequences, read-only."""

    def __contains__(self, seq: object) -> bool: ...
    def __getitem__(self, seq: SeqId) -> SimSequence: ...


class SimFlight:
    """A launched step. It runs when its result is requested, in the order of a lane's queue."""

    def __init__(self, machine: "SimMachine", plan: StepPlan, steps: list["SimSlice"]) -> None:
        self.plan = plan
        self._machine = machine
        self._slices = steps

    def result(self) -> StepOutcome:
        """Run the step.

        Errors: DeviceError if the step has a poisoned sequence; OutOfDeviceMemoryError if it does not fit;
                InvariantError if a block is wrong.
        """
        return self._machine.run(self.plan, self._slices)


class SimSlice:
    """A slice with its block table and its known tokens at the time of the launch."""

    def __init__(self, piece: Slice, table: list[int], known: "array[int]", scope: int) -> None:
        self.piece = piece
        self.table = table
        self.known = known  # tokens [0, start + length), without tokens that are proposed or not sampled yet
        self.scope = scope


class _ExpectedKV:
    """The correct KV of one sequence, and which of its blocks were checked since they were last written."""

    def __init__(self, scope: int) -> None:
        self.tokens: array[int] = array("I")
        self.states: list[int] = []  # KV of each token
        self.checked: list[int | None] = []  # write stamps of the leading full blocks' slots when they were checked
        self._scope = scope

    def follow(self, tokens: "array[int]") -> list[int]:
        """Return the KV of these tokens, and of further known tokens."""
        known = min(len(self.tokens), len(tokens))
        if self.tokens[:known] != tokens[:known]:
            raise InvariantError("sim.tokens_changed", length=known)
        state = self.states[-1] if self.states else self._scope
        for token in tokens[len(self.tokens) :]:
            state = _mix(state, token)
            self.states.append(state)
        self.tokens.extend(tokens[len(self.tokens) :])
        return self.states


class SimMachine:
    """A simulated lane, arena and model; a `StepRunner`."""

    def __init__(
        self,
        sequences: SimSequences,
        block_size: int,
        vocab_size: int,
        clock: ManualClock,
        max_rows: int,
        step_s: StepTime = plain_step_s,
    ) -> None:
        self.poisoned: set[SeqId] = set()  # a step with one of these sequences fails
        self.failing_launches = 0  # number of the next launches that are refused
        self.begun: random.Random | None = None  # draws how far a refused launch comes; None: no slice runs
        self.memory_tokens: int | None = None  # larger nano-batches run out of memory; None: no limit
        self.hungry: set[SeqId] = set()  # a nano-batch with one of these sequences always runs out of memory
        self.is_short_at_launch = False  # memory runs out at launch, as on a stream, instead of when the step runs
        self.num_short = 0  # steps that ran out of memory
        self.num_failed = 0  # steps that failed because of a poisoned sequence
        self._sequences = sequences
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._clock = clock
        self._max_rows = max_rows
        self._launched = 0  # number of the last launched step
        self._void_until = 0  # number of the last step that was launched before a failure was known
        self._tables: dict[SeqId, list[int]] = {}
        self._sampled: dict[tuple[SeqId, int], int] = {}  # token by sequence and position
        self._row_positions: dict[SeqId, int] = {}  # of the row's last token, after all queued steps
        self._step_s = step_s
        self._expected: dict[SeqId, _ExpectedKV] = {}
        self._rows: dict[int, list[int]] = {}  # by slot: the KV of its tokens
        self._stamps: dict[int, int] = {}  # by slot: the number of the last write to it
        self._num_writes = 0

    def launch(self, plan: StepPlan) -> SimFlight:
        """Launch a step. Errors: DeviceError for `failing_launches` launches; OutOfDeviceMemoryError.

        A refused step may have come to nothing, to its tables, or to a part of its slices.
        """
        if self.begun is not None and self.begun.random() < 0.5:
            self._refuse(plan)
        self.forget(plan.gone)
        for seq in plan.gone:
            if seq not in self._sequences:
                self._expected.pop(seq, None)
        for update in plan.table_updates:
            table = self._tables.setdefault(update.seq, [])
            if update.first > len(table) or len(self._tables) > self._max_rows:
                raise InvariantError("sim.table", seq=update.seq, first=update.first, rows=len(self._tables))
            table[update.first : update.first + len(update.slots)] = update.slots
        slices = [self._slice(piece) for batch in plan.nano_batches for piece in batch.slices]
        try:
            self._refuse(plan)
        except DeviceError:
            self._begin(slices)
            raise
        self._sample(slices)
        self._launched = plan.step
        return SimFlight(self, plan, slices)

    def block(self, slot: int) -> tuple[int, ...]:
        """Return the KV in a slot, row by row; -2 for rows that were never written."""
        return tuple(self._rows.get(slot) or [_EMPTY] * self._block_size)

    def put_block(self, slot: int, rows: tuple[int, ...]) -> None:
        """Write KV that was copied into a slot."""
        self._rows[slot] = list(rows)
        self._stamp(slot)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Remove tables and rows of these sequences; the next plan contains new ones."""
        for seq in seqs:
            self._tables.pop(seq, None)
            self._row_positions.pop(seq, None)

    def run(self, plan: StepPlan, slices: list[SimSlice]) -> StepOutcome:
        """Run a step without the slices of sequences that have ended since the launch."""
        left = [item for item in slices if item.piece.seq in self._sequences]
        if len(left) < len(slices):
            tokens = iter(self._run(plan, left).tokens)
            known = {id(item) for item in left}
            return StepOutcome(
                tuple(
                    next(tokens) if id(item) in known else 0 for item in slices for _ in range(item.piece.num_sampled)
                )
            )
        return self._run(plan, slices)

    def _run(self, plan: StepPlan, slices: list[SimSlice]) -> StepOutcome:
        self._clock.advance(self._step_s([item.piece for item in slices]))
        if plan.step <= self._void_until:
            # Launched after a step that failed: the KV that it reads was not written, so its own KV is garbage.
            for item in slices:
                self._write(item, [_GARBAGE] * item.piece.length)
            return StepOutcome((0,) * sum(item.piece.num_sampled for item in slices))
        try:
            self._fail(plan, slices)
        except DeviceError:
            self._void_until = self._launched
            raise
        return StepOutcome(tuple(token for item in slices for token in self._compute(item)))

    def _refuse(self, plan: StepPlan) -> None:
        """Raise if this launch is to be refused. Steps launched before are not affected."""
        if self.failing_launches:
            self.failing_launches -= 1
            raise DeviceError("sim.launch")
        if self.is_short_at_launch:
            self._take_memory(plan)

    def _begin(self, slices: list[SimSlice]) -> None:
        """Run the first slices of a refused step; the KV that they write is garbage."""
        ran = slices[: self.begun.randrange(len(slices) + 1)] if self.begun is not None else []
        for item in ran:
            self._write(item, [_GARBAGE] * item.piece.length)
        self._sample(ran)

    def _sample(self, slices: list[SimSlice]) -> None:
        """Note the position of the token in each sampling row, which holds only the last token."""
        for item in slices:
            if item.piece.proposed:  # which of the sampled tokens count is not known yet
                self._row_positions.pop(item.piece.seq, None)
            elif item.piece.samples:
                self._row_positions[item.piece.seq] = item.piece.start + item.piece.length

    def _fail(self, plan: StepPlan, slices: list[SimSlice]) -> None:
        if not self.is_short_at_launch:
            self._take_memory(plan)
        if self.poisoned.intersection(item.piece.seq for item in slices):
            self.num_failed += 1
            raise DeviceError("sim.poisoned", step=plan.step)

    def _take_memory(self, plan: StepPlan) -> None:
        """Raise if a nano-batch, without sequences that have ended, does not fit into memory."""
        for batch in plan.nano_batches:
            left = [piece for piece in batch.slices if piece.seq in self._sequences]
            tokens = sum(piece.length for piece in left)
            is_over = self.memory_tokens is not None and tokens > self.memory_tokens
            if is_over or not self.hungry.isdisjoint(piece.seq for piece in left):
                self.num_short += 1
                raise OutOfDeviceMemoryError("sim.memory", step=plan.step, tokens=tokens)

    def _slice(self, piece: Slice) -> SimSlice:
        sequence = self._sequences[piece.seq]
        scope = int.from_bytes(sequence.request.scope[:4] or b"\0", "little")
        last = piece.start + piece.length - 1 - len(piece.proposed)
        known = sequence.tokens[: last + 1]
        if len(known) <= last and self._row_positions.get(piece.seq) != last:
            raise InvariantError("sim.wrong_token", seq=piece.seq, position=last)
        return SimSlice(piece, list(self._tables[piece.seq]), known, scope)

    def _stamp(self, slot: int) -> None:
        self._num_writes += 1
        self._stamps[slot] = self._num_writes

    def _write(self, item: SimSlice, states: list[int]) -> None:
        size, start = self._block_size, item.piece.start
        end = start + len(states)
        for block in range(start // size, -(-end // size)):
            slot, first, last = item.table[block], max(start, block * size), min(end, (block + 1) * size)
            rows = self._rows.setdefault(slot, [_EMPTY] * size)
            rows[first % size : first % size + last - first] = states[first - start : last - start]
            self._stamp(slot)

    def _check(self, item: SimSlice, expected: _ExpectedKV) -> None:
        """Check every row before the slice. Blocks that were checked and not written since are skipped."""
        size, start = self._block_size, item.piece.start
        full = start // size
        stamps = list(map(self._stamps.get, item.table[:full]))
        if stamps != expected.checked[:full]:
            known = expected.checked[:full] + [None] * (full - len(expected.checked))
            for block in range(full):
                if stamps[block] is None or stamps[block] != known[block]:
                    self._check_rows(item, expected, block * size, (block + 1) * size)
            expected.checked = stamps
        self._check_rows(item, expected, full * size, start)

    def _check_rows(self, item: SimSlice, expected: _ExpectedKV, start: int, end: int) -> None:
        """Check rows [start, end) of one block."""
        if start == end:
            return
        slot = item.table[start // self._block_size]
        rows = self._rows.get(slot) or [_EMPTY] * self._block_size
        if rows[: end - start] != expected.states[start:end]:
            wrong = next(row for row in range(end - start) if rows[row] != expected.states[start + row])
            raise InvariantError("sim.wrong_kv", seq=item.piece.seq, position=start + wrong, slot=slot)

    def _compute(self, item: SimSlice) -> list[int]:
        """Run a slice. Return the tokens that it samples."""
        piece = item.piece
        end = piece.start + piece.length - len(piece.proposed)
        sampled = [self._sampled[piece.seq, position] for position in range(len(item.known), end)]
        expected = self._expected.setdefault(piece.seq, _ExpectedKV(item.scope))
        states = expected.follow(item.known + array("I", sampled))
        self._check(item, expected)
        rows = states[piece.start : end]
        for token in piece.proposed:  # computed whether they are right or not
            rows.append(_mix(rows[-1], token))
        self._write(item, rows)
        if not piece.samples:
            return []
        drawn = [state % self._vocab_size for state in rows[-piece.num_sampled :]]
        for position, token in enumerate(drawn, end):
            self._sampled[piece.seq, position] = token
            if position - end < len(piece.proposed) and piece.proposed[position - end] != token:
                break
        return drawn
