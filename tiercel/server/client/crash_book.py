"""The consequences of the death of an engine: suspects, a failed sequence, a delay, or the end of the daemon."""

import enum
from collections import deque
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from tiercel.values.ids import SeqId
from tiercel.wire.step_record import ANY_SEQ, EngineTrail

CRASH_LOOP = 3  # deaths without a suspect ...
CRASH_LOOP_S = 60.0  # ... within this time end the daemon
_MAX_KILLED_ALONE = 3  # a kill from outside may hit a suspect that runs alone by chance, but hardly each time


class DeathKind(enum.Enum):
    """The way in which an engine ended."""

    EXIT = "exit"  # by itself
    SIGNAL = "signal"  # by a fault, such as SIGSEGV
    KILLED = "killed"  # by SIGKILL, from outside: an operator, or the kernel for lack of memory
    HANG = "hang"  # by the supervisor, because no step ended in time


class Death(Struct, frozen=True):
    """The end of one engine."""

    kind: DeathKind
    cause: str  # in words
    trail: EngineTrail
    had_progress: bool  # it had delivered tokens, and there was work left


class CrashVerdict(Struct, frozen=True):
    """The consequences of a death."""

    suspects: dict[SeqId, int] = {}  # run alone until they have so many tokens
    failed: SeqId | None = None  # has crashed an engine alone
    delay_s: float = 0.0  # before the next engine is started
    is_crash_loop: bool = False  # no other engine is started


class CrashBook:
    """Judges deaths of engines. A sequence is failed only if an engine died while it computed that sequence alone."""

    def __init__(self) -> None:
        self._deaths_s: deque[float] = deque()  # of engines whose death no sequence can have caused
        self._deaths_alone: dict[SeqId, int] = {}
        self._deaths_entering: dict[SeqId, int] = {}

    def judge(self, death: Death, known: Mapping[SeqId, int], now_s: float) -> CrashVerdict:
        """Judge a death. `known` has every unfinished sequence, with the tokens until which it was to run alone; 0: it
        was not suspected before."""
        self._forget(known)
        trail = death.trail
        ends = {seq: end for seq, end in trail.end_by_seq.items() if seq in known}
        if trail.entering is not None and trail.entering in known:
            return self._judge_entering(trail.entering)
        if trail.entering == ANY_SEQ and known and death.kind is not DeathKind.KILLED:
            return self._judge_planning({seq: ends.get(seq, 1) for seq in known}, death, now_s)
        if len(ends) == 1 == len(trail.end_by_seq):
            (seq,) = ends
            if known[seq] and self._is_guilty(seq, death.kind):
                return CrashVerdict(failed=seq)
        if ends:
            return CrashVerdict(suspects=ends)
        return CrashVerdict() if death.had_progress else self._judge_unexplained(now_s)

    def _judge_entering(self, seq: SeqId) -> CrashVerdict:
        """Judge a death while a request was taken in or planned alone. If that happens twice, it is the cause."""
        deaths = self._deaths_entering[seq] = self._deaths_entering.get(seq, 0) + 1
        return CrashVerdict(failed=seq) if deaths > 1 else CrashVerdict()

    def _judge_planning(self, everyone: dict[SeqId, int], death: Death, now_s: float) -> CrashVerdict:
        """Judge a death while a step was planned. Any sequence may be the cause: each is planned alone from now on."""
        verdict = CrashVerdict() if death.had_progress else self._judge_unexplained(now_s)
        return replace(verdict, suspects=everyone)

    def _is_guilty(self, seq: SeqId, kind: DeathKind) -> bool:
        """Count a death while a suspect ran alone. Return whether the suspect is the cause."""
        deaths = self._deaths_alone[seq] = self._deaths_alone.get(seq, 0) + 1
        return kind is not DeathKind.KILLED or deaths >= _MAX_KILLED_ALONE

    def _judge_unexplained(self, now_s: float) -> CrashVerdict:
        deaths = self._deaths_s
        deaths.append(now_s)
        while now_s - deaths[0] > CRASH_LOOP_S:
            deaths.popleft()
        if len(deaths) >= CRASH_LOOP:
            return CrashVerdict(is_crash_loop=True)
        return CrashVerdict(delay_s=float(len(deaths) - 1))

    def _forget(self, known: Mapping[SeqId, int]) -> None:
        """Forget the sequences that have ended, and deaths of those that have passed the step that they died in."""
        self._deaths_entering = {seq: deaths for seq, deaths in self._deaths_entering.items() if seq in known}
        self._deaths_alone = {seq: deaths for seq, deaths in self._deaths_alone.items() if known.get(seq)}
