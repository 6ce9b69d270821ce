"""A simulated machine: the engine's loop runs on it in virtual time, without torch, and every cache bug shows.

The KV of a token is a number that depends on the sharing scope and on all tokens up to it, as real KV does. A step
checks every row it reads against that number, so a wrong, stale or foreign block is caught at once, and the token it
draws depends on them too.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tiercel.clock import ManualClock
from tiercel.errors import DeviceError, InvariantError, OutOfDeviceMemoryError
from tiercel.ids import SeqId
from tiercel.outcome import StepOutcome
from tiercel.plan import Slice, StepPlan
from tiercel.request import Request, unpack_tokens

_PRIME = (1 << 61) - 1
_EMPTY = -2  # a row that was never written
_GARBAGE = -1

StepTime = Callable[[Sequence[Slice]], float]
"""Seconds that a step of these slices takes."""


def plain_step_s(slices: Sequence[Slice]) -> float:
    """A small model on a small machine: no figure of anything that exists."""
    return 1e-3 + 1e-5 * sum(piece.length for piece in slices)


def _mix(state: int, token: int) -> int:
    return ((state ^ (token + 0x9E3779B9)) * 0x2545F4914F6CDD1D + 0x632BE59BD9B4E019) % _PRIME


def expected_outputs(request: Request, vocab_size: int, end_tokens: frozenset[int], max_model_len: int) -> list[int]:
    """What the simulated model says to a request, whatever happens around it."""
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
    """What the machine reads of a sequence."""

    tokens: "array[int]"
    request: Request


class SimSequences(Protocol):
    """The book of sequences, to read."""

    def __contains__(self, seq: object) -> bool: ...
    def __getitem__(self, seq: SeqId) -> SimSequence: ...


class SimFlight:
    """A launched step; it runs when its result is asked for, as a queue of one lane would have it."""

    def __init__(self, machine: "SimMachine", plan: StepPlan, steps: list["SimSlice"]) -> None:
        self.plan = plan
        self._machine = machine
        self._slices = steps

    def result(self) -> StepOutcome:
        """Errors: DeviceError when a poisoned sequence is in the step, OutOfDeviceMemoryError when it does not fit;
        InvariantError when a block is wrong.
        """
        return self._machine.run(self.plan, self._slices)


class SimSlice:
    """One slice as it was when it was launched: block table and known tokens."""

    def __init__(self, piece: Slice, table: list[int], known: "array[int]", scope: int) -> None:
        self.piece = piece
        self.table = table
        self.known = known  # tokens [0, start + length); those that are still being sampled are missing at the end
        self.scope = scope


class _Course:
    """The right KV of one sequence, and which of its blocks were found right since they were last written."""

    def __init__(self, scope: int) -> None:
        self.tokens: array[int] = array("I")
        self.states: list[int] = []  # KV of each token
        self.checked: list[int | None] = []  # stamps of the leading full blocks' slots
        self._scope = scope

    def follow(self, tokens: "array[int]") -> list[int]:
        """KV of these tokens and perhaps of more behind them."""
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
    """A lane, an arena of numbers and a model, behind `launch`."""

    def __init__(
        self,
        sequences: SimSequences,
        block_size: int,
        vocab_size: int,
        clock: ManualClock,
        max_rows: int,
        step_s: StepTime = plain_step_s,
    ) -> None:
        self.poisoned: set[SeqId] = set()  # steps with one of these fail
        self.failing_launches = 0  # so many of the next launches are refused
        self.begun: random.Random | None = None  # draws how much of a refused step runs all the same; None: nothing
        self.memory_tokens: int | None = None  # nano-batches of more tokens run out of memory; None: none does
        self.hungry: set[SeqId] = set()  # nano-batches with one of these do, however small
        self.is_short_at_launch = False  # they do when they are launched, as on a stream, not when they run
        self.num_short = 0
        self.num_failed = 0
        self._sequences = sequences
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._clock = clock
        self._max_rows = max_rows
        self._launched = 0  # the last step
        self._void_until = 0
        self._tables: dict[SeqId, list[int]] = {}
        self._sampled: dict[tuple[SeqId, int], int] = {}  # token by sequence and position
        self._row_positions: dict[SeqId, int] = {}  # of the token that a row holds when all that is queued has run
        self._step_s = step_s
        self._courses: dict[SeqId, _Course] = {}
        self._rows: dict[int, list[int]] = {}  # by slot: the KV of its tokens
        self._stamps: dict[int, int] = {}  # by slot: the number of the last write there, of all writes
        self._num_writes = 0

    def launch(self, plan: StepPlan) -> SimFlight:
        """Errors: DeviceError as often as `failing_launches` says; OutOfDeviceMemoryError. A part may have run then."""
        self.forget(plan.gone)
        for seq in plan.gone:
            if seq not in self._sequences:
                self._courses.pop(seq, None)
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
        """The KV in a slot, row by row; -2 where nothing was ever written."""
        return tuple(self._rows.get(slot) or [_EMPTY] * self._block_size)

    def put_block(self, slot: int, rows: tuple[int, ...]) -> None:
        """KV that was copied into a slot."""
        self._rows[slot] = list(rows)
        self._stamp(slot)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Tables and rows of these sequences come anew."""
        for seq in seqs:
            self._tables.pop(seq, None)
            self._row_positions.pop(seq, None)

    def run(self, plan: StepPlan, slices: list[SimSlice]) -> StepOutcome:
        """The step itself, without those whose sequence has gone since the launch, as any nano-batch of it may be."""
        left = [item for item in slices if item.piece.seq in self._sequences]
        if len(left) < len(slices):
            tokens = iter(self._run(plan, left).tokens)
            known = {id(item) for item in left}
            sampling = (item for item in slices if item.piece.samples)
            return StepOutcome(tuple(next(tokens) if id(item) in known else 0 for item in sampling))
        return self._run(plan, slices)

    def _run(self, plan: StepPlan, slices: list[SimSlice]) -> StepOutcome:
        self._clock.advance(self._step_s([item.piece for item in slices]))
        if plan.step <= self._void_until:
            # Launched behind a step that failed: what it reads was never written, so what it writes is garbage.
            for item in slices:
                self._write(item, [_GARBAGE] * item.piece.length)
            return StepOutcome((0,) * sum(item.piece.samples for item in slices))
        try:
            self._fail(plan, slices)
        except DeviceError:
            self._void_until = self._launched
            raise
        return StepOutcome(tuple(token for item in slices if (token := self._compute(item)) is not None))

    def _refuse(self, plan: StepPlan) -> None:
        """Steps that were launched before go on."""
        if self.failing_launches:
            self.failing_launches -= 1
            raise DeviceError("sim.launch")
        if self.is_short_at_launch:
            self._take_memory(plan)

    def _begin(self, slices: list[SimSlice]) -> None:
        """The first slices of a refused step run all the same, and what they write counts for nothing."""
        ran = slices[: self.begun.randrange(len(slices) + 1)] if self.begun is not None else []
        for item in ran:
            self._write(item, [_GARBAGE] * item.piece.length)
        self._sample(ran)

    def _sample(self, slices: list[SimSlice]) -> None:
        """A row holds the last token alone."""
        for item in slices:
            if item.piece.samples:
                self._row_positions[item.piece.seq] = item.piece.start + item.piece.length

    def _fail(self, plan: StepPlan, slices: list[SimSlice]) -> None:
        if not self.is_short_at_launch:
            self._take_memory(plan)
        if self.poisoned.intersection(item.piece.seq for item in slices):
            self.num_failed += 1
            raise DeviceError("sim.poisoned", step=plan.step)

    def _take_memory(self, plan: StepPlan) -> None:
        """Nano-batches run one after the other: the largest counts, without those who have gone."""
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
        last = piece.start + piece.length - 1
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

    def _check(self, item: SimSlice, course: _Course) -> None:
        """Every row before the slice is right. What was right and was not written since need not be looked at."""
        size, start = self._block_size, item.piece.start
        full = start // size
        stamps = list(map(self._stamps.get, item.table[:full]))
        if stamps != course.checked[:full]:
            known = course.checked[:full] + [None] * (full - len(course.checked))
            for block in range(full):
                if stamps[block] is None or stamps[block] != known[block]:
                    self._check_rows(item, course, block * size, (block + 1) * size)
            course.checked = stamps
        self._check_rows(item, course, full * size, start)

    def _check_rows(self, item: SimSlice, course: _Course, start: int, end: int) -> None:
        """Rows [start, end) of one block."""
        if start == end:
            return
        slot = item.table[start // self._block_size]
        rows = self._rows.get(slot) or [_EMPTY] * self._block_size
        if rows[: end - start] != course.states[start:end]:
            wrong = next(row for row in range(end - start) if rows[row] != course.states[start + row])
            raise InvariantError("sim.wrong_kv", seq=item.piece.seq, position=start + wrong, slot=slot)

    def _compute(self, item: SimSlice) -> int | None:
        piece = item.piece
        end = piece.start + piece.length
        sampled = [self._sampled[piece.seq, position] for position in range(len(item.known), end)]
        course = self._courses.setdefault(piece.seq, _Course(item.scope))
        states = course.follow(item.known + array("I", sampled))
        self._check(item, course)
        self._write(item, states[piece.start : end])
        if not piece.samples:
            return None
        self._sampled[piece.seq, end] = states[end - 1] % self._vocab_size
        return self._sampled[piece.seq, end]
