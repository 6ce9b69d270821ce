"""The engine process with named crash points: the real engine, put together with parts that kill it.

The variable FAULT_FOLDER names the folder of the `CrashPlan`. A request with the seed POISON_SEED kills every engine
that launches a step with it, one with HOG_SEED makes the engine take HOG_BYTES of memory, and one with BAD_SEED makes
the device raise an error. Nothing of this is in the product: the wrapped parts are given to `open_engine`.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.faults.crash_plan import CrashPlan
from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.loop import EngineLoop, Mover
from tiercel.engine.mailbox import EngineMailbox
from tiercel.engine.process import main
from tiercel.engine.step.flight import Flight, StepRunner
from tiercel.engine.upkeep import Upkeep
from tiercel.engine.wake import Wake
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import RouteGauges, StepOutcome
from tiercel.values.plan import StepPlan, whole_slices
from tiercel.values.tier import Landing, Route, Transfer
from tiercel.wire.frames import FromEngine, Report, encode_frame

POISON_SEED = 666_666
BAD_SEED = 777_777
HOG_SEED = 888_888
HOG_BYTES = 512 << 20
_MAX_DELAY_S = 0.005  # between the start of a transfer and the kill
_CHECK_S = 0.2
_POINTS_BY_ROUTE = {
    Route.SPILL: "spill",
    Route.RESTORE: "restore",
    Route.PERSIST: "persist",
    Route.PREFETCH: "prefetch",
    Route.VERIFY: "verify",
}


def kill_self() -> None:
    """End the process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_self_soon() -> None:
    """End the process within a few milliseconds."""
    time.sleep(random.uniform(0.0, _MAX_DELAY_S))
    kill_self()


class CrashSwitch:
    """Kills the process at the point of its planned crash.

    Steps of a single sequence do not count: after a crash the suspects run alone, and one that dies alone is failed.
    Before the first step counts only `verify`, because copies are verified before the resumed sequences run.
    """

    def __init__(self, plan: CrashPlan) -> None:
        self._plan = plan
        self._crash = plan.take()
        self._left = 0 if self._crash is None else self._crash.count
        self.num_sequences = 0  # of the step launched last

    def is_due(self, point: str) -> bool:
        """Count one more passage. Return whether the process is to die here, and note that."""
        if self._crash is None or self._crash.point != point:
            return False
        if self.num_sequences < 2 and not (point == "verify" and not self.num_sequences):
            return False
        self._left -= 1
        if self._left:
            return False
        self._plan.note_done(point)
        return True

    def reach(self, point: str) -> None:
        """Kill the process if the planned crash is here and now."""
        if self.is_due(point):
            kill_self()


class CrashingFlight:
    """A flight with crash points around its result."""

    def __init__(self, inner: Flight, switch: CrashSwitch) -> None:
        self.plan = inner.plan
        self._inner = inner
        self._switch = switch

    def result(self) -> StepOutcome:
        self._switch.reach("before-result")
        outcome = self._inner.result()
        self._switch.reach("after-result")
        return outcome


class CrashingRunner:
    """A runner with crash points around its launch, and with requests that are their own fault."""

    def __init__(self, inner: StepRunner, switch: CrashSwitch) -> None:
        self._inner = inner
        self._switch = switch
        self.loop: EngineLoop | None = None
        self._hog = bytearray()

    def launch(self, plan: StepPlan) -> Flight:
        """Errors: DeviceError if the step has a request with BAD_SEED."""
        slices = whole_slices(plan.nano_batches)
        self._switch.num_sequences = len(slices)
        self._switch.reach("before-launch")
        seeds = {self._seed(piece.seq) for piece in slices}
        if POISON_SEED in seeds:
            kill_self()
        if HOG_SEED in seeds and not self._hog:
            self._hog = bytearray(HOG_BYTES)
        if BAD_SEED in seeds:
            raise DeviceError("device.injected", step=plan.step)
        flight = self._inner.launch(plan)
        self._switch.reach("after-launch")
        return CrashingFlight(flight, self._switch)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self._inner.forget(seqs)

    def _seed(self, seq: SeqId) -> int:
        assert self.loop is not None
        return self.loop.book[seq].request.params.seed


class CrashingMover:
    """A mover with a crash point in every route: the kill comes while the copies are in progress."""

    def __init__(self, inner: Mover, switch: CrashSwitch) -> None:
        self._inner = inner
        self._switch = switch

    def start(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._inner.start((transfer,))
            if transfer.route in _POINTS_BY_ROUTE and self._switch.is_due(_POINTS_BY_ROUTE[transfer.route]):
                threading.Thread(target=kill_self_soon, daemon=True).start()

    def poll(self) -> list[Landing]:
        return self._inner.poll()

    def gauges(self) -> tuple[RouteGauges, ...]:
        return self._inner.gauges()


class CrashingMailbox(EngineMailbox):
    """A mailbox with crash points around every report that has tokens."""

    def __init__(self, inner: EngineMailbox, switch: CrashSwitch, fd: int) -> None:
        self._inner = inner
        self._switch = switch
        self._fd = fd

    def post(self, message: FromEngine) -> None:
        if not isinstance(message, Report) or not message.seqs:
            self._inner.post(message)
            return
        self._switch.reach("before-report")
        if not self._inner.has_unsent and self._switch.is_due("torn-report"):
            frame = encode_frame(message)
            os.write(self._fd, frame[: len(frame) // 2])
            kill_self()
        self._inner.post(message)
        self._switch.reach("after-report")


class CheckedUpkeep:
    """An upkeep that checks the books whenever the engine is idle."""

    def __init__(self, inner: Upkeep, loop: EngineLoop, plan: CrashPlan) -> None:
        self._inner = inner
        self._loop = loop
        self._plan = plan
        self._checked_s = 0.0
        self._was_busy = True

    def tend(self) -> None:
        """Errors: InvariantError if the books of an idle engine are not consistent."""
        self._inner.tend()
        if not self._loop.is_idle:
            self._was_busy = True  # noted at every turn: a request may come and go between two checks
            return
        now_s = time.monotonic()
        if self._was_busy and now_s - self._checked_s >= _CHECK_S:
            self._was_busy, self._checked_s = False, now_s
            self._loop.check_integrity()
            self._plan.note_check()


def opens_with_faults(plan: CrashPlan, fd: int) -> Callable[..., Engine]:
    """Return a function that opens the engine with its crash points. `fd` is the socket to the HTTP process."""

    def opens(
        settings: EngineSettings,
        mailbox: EngineMailbox,
        wake: Wake,
        clock: Clock,
        *memory: Any,  # Any: descriptors and records of memory that outlives the engine, passed on as they are
    ) -> Engine:
        switch = CrashSwitch(plan)
        runners: list[CrashingRunner] = []

        def wrap(runner: StepRunner) -> StepRunner:
            runners.append(CrashingRunner(runner, switch))
            return runners[0]

        engine = open_engine(
            settings, CrashingMailbox(mailbox, switch, fd), wake, clock, *memory,
            wrap=wrap, wrap_mover=lambda mover: CrashingMover(mover, switch),
        )  # fmt: skip
        runners[0].loop = engine.loop
        engine.upkeep = CheckedUpkeep(engine.upkeep, engine.loop, plan)  # type: ignore[assignment]
        return engine

    return opens


if __name__ == "__main__":
    socket_fd = int(sys.argv[sys.argv.index("--fd") + 1])
    code = main(opens_with_faults(CrashPlan(Path(os.environ["FAULT_FOLDER"])), socket_fd))
    sys.stderr.flush()
    os._exit(code)
