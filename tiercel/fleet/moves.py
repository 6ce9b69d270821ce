"""The places of a fleet's sequences: where each begins, resumes after a death, and goes when an engine drains."""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tiercel.fleet.router import PromptWork, Router
from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, KeyHead, SeqId
from tiercel.values.rates import EngineSpeed

MAX_RECALLS = 64
"""The maximum number of sequences that one call asks engines to give back."""

_IDLE_SHARE = 0.5  # an engine with less than this share of the mean work is given sequences that wait elsewhere


class SequenceMove(Struct, frozen=True):
    """A sequence that is at no engine. The owner submits it to `target`."""

    seq: SeqId
    target: EngineId | None  # None: there is no engine; it waits until one joins


class Recall(Struct, frozen=True):
    """A sequence that its engine is asked to give back unless it has begun with it (`Abort.if_queued`)."""

    seq: SeqId
    engine: EngineId


class Moves:
    """The place of every unfinished sequence: at one engine, or waiting for an engine.

    The only caller of the router's `begin`, `note_first_token`, `end`, `join`, `close` and `leave`. A sequence is never
    at two engines: what `recall` and `drain` return stays at its engine until `give_back` says that the engine has let
    it go, and the other moves name the engine that must be told. The sequence that has caused a death is not resumed:
    judge the death first (`CrashBook`), and `end` that sequence before `lose`.
    """

    def __init__(self, router: Router, work_of: Callable[[SeqId], PromptWork]) -> None:
        """`work_of` returns the work of a sequence as it is now, with the outputs that it has."""
        self.router = router
        self._work_of = work_of
        self._unplaced: dict[SeqId, None] = {}  # oldest first
        self._waiting: dict[EngineId, dict[SeqId, None]] = {}  # without a first token, oldest first
        self._recalled: set[SeqId] = set()
        self._draining: set[EngineId] = set()

    @property
    def unplaced(self) -> Sequence[SeqId]:
        """The sequences without an engine, oldest first."""
        return tuple(self._unplaced)

    def engine_of(self, seq: SeqId) -> EngineId | None:
        """Return the engine of a sequence; None if it is without one or has ended."""
        return self.router.engine_of(seq)

    # ---- sequences

    def submit(self, seqs: Sequence[SeqId]) -> EngineId | None:
        """Place new sequences of one client request, which share their prompt, at one engine. None: they wait for one.

        Errors: InvariantError if one of them has a place already.
        """
        if any(seq in self._unplaced for seq in seqs):
            raise InvariantError("moves.twice", seqs=seqs)
        work = self._work_of(seqs[0])
        choice = self.router.choose(work)
        if choice is None:
            self._unplaced.update(dict.fromkeys(seqs))
            return None
        for seq in seqs:
            self.router.begin(seq, work, choice)
            self._waiting[choice.engine][seq] = None
        return choice.engine

    def note_first_token(self, seq: SeqId) -> None:
        """Note that an engine has computed the prompt of a sequence: it is not recalled any more."""
        self._begun(seq)
        self.router.note_first_token(seq)

    def end(self, seq: SeqId, num_outputs: int | None = None) -> None:
        """Note that a sequence has ended, wherever it is; see `Router.end`. Unknown ones are ignored."""
        self._begun(seq)
        self._unplaced.pop(seq, None)
        self.router.end(seq, num_outputs)

    def give_back(self, seq: SeqId) -> SequenceMove | None:
        """Place a recalled sequence that its engine had not begun and has let go. None: it was not recalled."""
        if seq not in self._recalled:
            return None
        self._begun(seq)
        self.router.end(seq)
        return self._place(seq)

    # ---- engines

    def join(self, engine: EngineId, speed: EngineSpeed, heads: Iterable[KeyHead] = ()) -> list[SequenceMove]:
        """Add an engine; sequences that wait for one are placed, oldest first. Call `recall` for it afterwards."""
        self.router.join(engine, speed, heads)
        self._waiting[engine] = {}
        return self._place_all(list(self._unplaced))

    def lose(self, engine: EngineId) -> list[SequenceMove]:
        """Remove an engine that is dead or gone; its sequences go elsewhere, each by itself. Unknown ones: nothing."""
        for seq in self._waiting.pop(engine, {}):
            self._recalled.discard(seq)
        self._draining.discard(engine)
        return self._place_all(self.router.leave(engine))

    def recall(self) -> list[Recall]:
        """Return waiting sequences that are to move to engines with little work, the latest of the busiest engines.

        Enough to bring the poorest engine to the mean, at most `MAX_RECALLS`. Call it when an engine has joined or has
        become idle, or now and then. Cost: O(engines) for each recall.
        """
        work_ms = {one: self.router.work_ms(one) for one in self._waiting if one not in self._draining}
        if len(work_ms) < 2:
            return []
        mean_ms = sum(work_ms.values()) / len(work_ms)
        poorest = min(work_ms, key=work_ms.__getitem__)
        room_ms = mean_ms - work_ms[poorest]
        recalls: list[Recall] = []
        if work_ms[poorest] > _IDLE_SHARE * mean_ms:
            return recalls
        latest = {one: [seq for seq in self._waiting[one] if seq not in self._recalled] for one in work_ms}
        while room_ms > 0 and len(recalls) < MAX_RECALLS:
            rich = [one for one, seqs in latest.items() if seqs and work_ms[one] > mean_ms]
            if not rich:
                break
            engine = max(rich, key=work_ms.__getitem__)
            seq = latest[engine].pop()
            ms = self.router.sequence_ms(seq)
            if ms > 2 * room_ms:  # the poorest would become as rich as this one is
                continue
            work_ms[engine] -= ms
            room_ms -= ms
            recalls.append(Recall(seq, engine))
        self._recalled.update(one.seq for one in recalls)
        return recalls

    def drain(self, engine: EngineId) -> list[Recall]:
        """Choose an engine no more. Return its waiting sequences, which move if it has not begun them."""
        if engine not in self._waiting:
            return []
        self.router.close(engine)
        self._draining.add(engine)
        recalls = [Recall(seq, engine) for seq in self._waiting[engine] if seq not in self._recalled]
        self._recalled.update(one.seq for one in recalls)
        return recalls

    def check_integrity(self) -> None:
        """Check that every sequence has one place, at an engine that is there. Errors: InvariantError."""
        for engine, waiting in self._waiting.items():
            wrong = [seq for seq in waiting if self.router.engine_of(seq) != engine or seq in self._unplaced]
            if wrong:
                raise InvariantError("moves.place", engine=engine, seqs=wrong)
        if set(self._waiting) != set(self.router.engines):
            raise InvariantError("moves.engines")
        waiting = {seq for seqs in self._waiting.values() for seq in seqs}
        if not self._recalled <= waiting or any(self.router.engine_of(seq) is not None for seq in self._unplaced):
            raise InvariantError("moves.recalled")

    # ---- inside

    def _begun(self, seq: SeqId) -> None:
        engine = self.router.engine_of(seq)
        if engine is not None:
            self._waiting[engine].pop(seq, None)
        self._recalled.discard(seq)

    def _place_all(self, seqs: Sequence[SeqId]) -> list[SequenceMove]:
        return [self._place(seq) for seq in seqs]

    def _place(self, seq: SeqId) -> SequenceMove:
        self._unplaced.pop(seq, None)
        work = self._work_of(seq)
        choice = self.router.choose(work)
        if choice is None:
            self._unplaced[seq] = None
            return SequenceMove(seq, None)
        self.router.begin(seq, work, choice)
        self._waiting[choice.engine][seq] = None
        return SequenceMove(seq, choice.engine)
