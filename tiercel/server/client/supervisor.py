"""The supervisor: starts the engine process, notices its death or its hanging, and starts another one."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import structlog
from msgspec.structs import replace

from tiercel.server.client.child import EngineChild
from tiercel.server.client.client import EngineClient
from tiercel.server.client.crash_book import CRASH_LOOP, CRASH_LOOP_S, CrashBook, CrashVerdict, Death, DeathKind
from tiercel.server.client.inherited import InheritedResources
from tiercel.server.client.status import EngineState, EngineStatus
from tiercel.settings.settings import EngineSettings
from tiercel.system.process_limits import blame, show_memory_limits
from tiercel.values.clock import Clock
from tiercel.values.ids import SeqId

_TICK_S = 0.1
_STARTS = 5  # attempts to make a process
_START_PAUSE_S = 2.0
_LATE_S = 1.0  # of a tick: this process was stopped or starved, and has not seen what the engine reported meanwhile
_HUNG = "it hung: no step ended in time"
_EOF_S = 1.0  # to read what a dead engine has sent


class DeathObserver(Protocol):
    """Counts deaths of engines; see `metrics`."""

    def on_engine_death(self, kind: str) -> None: ...


class EngineOwner(Protocol):
    """The user of the engine process: it has the sequences, whose streams outlive an engine."""

    on_lost: Callable[[], None]  # called when the connection to an engine has ended

    @property
    def status(self) -> EngineStatus: ...
    @property
    def had_progress(self) -> bool: ...
    @property
    def suspect_until_by_seq(self) -> Mapping[SeqId, int]: ...
    @property
    def num_open(self) -> int: ...
    async def open(self, sock: socket.socket, settings: EngineSettings) -> None: ...
    def disconnect(self) -> None: ...
    def take_verdict(self, death: Death, verdict: CrashVerdict) -> None: ...
    def give_up(self) -> None: ...
    async def release_disk(self, lock_fds: tuple[int, ...]) -> bool: ...


class Supervision(Protocol):
    """The keeper of the engine or the engines of a daemon."""

    end: str  # why no other engine is started

    @property
    def pid(self) -> int | None: ...
    @property
    def stall_limit_s(self) -> float: ...
    async def run(
        self, client: EngineClient, settings: EngineSettings, clock: Clock, observer: DeathObserver
    ) -> None: ...
    async def give_up_disk(self, client: EngineClient) -> bool: ...
    def stop(self) -> None: ...
    async def leave(self, patience_s: float) -> None: ...


class Supervisor:
    """Keeps one engine process serving.

    The streams of a dead engine stay open: the client gives every unfinished sequence to the next engine. The memory of
    the host tier and the locks of the SSD folders belong to this process; no engine is started before the one before
    has been waited for, because a dying process may still write to them.
    """

    def __init__(self, command: Sequence[str], inherited: InheritedResources) -> None:
        """Start the first engine. Leaving the `with` kills the last one. Errors: OSError."""
        self._command = command
        self._inherited = inherited
        self._child = EngineChild.start(command, inherited)
        self._book = CrashBook()
        self._lost = asyncio.Event()
        self._is_stopping = False
        self._log = structlog.stdlib.get_logger("server.supervisor")
        self.end = ""  # why no other engine is started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.__exit__(kind, exc, trace)

    @property
    def pid(self) -> int:
        """The process id of the present engine."""
        return self._child.pid

    @property
    def stall_limit_s(self) -> float:
        """The time without the end of a step after which the engine counts as hung; the engine sets it by its steps."""
        return self._inherited.record.limit_s

    async def run(self, client: EngineOwner, settings: EngineSettings, clock: Clock, observer: DeathObserver) -> None:
        """Connect the client to the engine, and to the next one when an engine dies. Return when `stop` was called, or
        when no other engine is started: then `end` has the reason, and the client has given up.
        """
        client.on_lost = self._lost.set
        while True:
            self._log.info("engine_started", pid=self.pid)
            await client.open(self._child.sock, self._settings_of_next(client, settings))
            is_hung = await self._watch(client, clock)
            if self._is_stopping or client.status.is_over:  # it could not start, and has said why
                client.give_up()
                return
            death = await self._bury(client, is_hung=is_hung)
            if self._is_stopping:
                client.give_up()
                return
            observer.on_engine_death(death.kind.value)
            if not await self._follow(death, client, clock):
                client.give_up()
                return
            if not await self._start_next():
                client.give_up()
                return
            self._lost.clear()

    def _settings_of_next(self, client: EngineOwner, settings: EngineSettings) -> EngineSettings:
        """Return the settings of the engine that was just started.

        Streams wait for an engine that replaces another one, so a disk that fails must not end it: it serves without
        the SSD tier.
        """
        may_lack_disk = self._inherited.is_disk_optional or client.status.ready is not None
        # A folder that was given up may belong to another daemon.
        folders = settings.kv_disk_paths if self._inherited.has_disk else ()
        return replace(settings, kv_disk_paths=folders, kv_disk_optional=may_lack_disk)

    async def _start_next(self) -> bool:
        """Start another engine. A machine that is short of memory or of processes is tried again."""
        for _ in range(_STARTS):
            try:
                self._child = EngineChild.start(self._command, self._inherited)
            except OSError as exc:
                self._log.error("engine_not_started", error=exc.strerror)
                self.end = f"no engine can be started: {blame(exc)}"
                await asyncio.sleep(_START_PAUSE_S)
            else:
                self.end = ""
                return True
            if self._is_stopping:
                break
        return False

    async def give_up_disk(self, client: EngineOwner) -> bool:
        """Have the engine close its SSD tier, and unlock the folders for another daemon. Return False if that fails.

        Later engines are started without the tier.
        """
        if self._inherited.has_disk and not await client.release_disk(self._inherited.lock_fds):
            return False
        self._inherited.unlock()
        return True

    def stop(self) -> None:
        """Start no other engine: the daemon is about to end this one."""
        self._is_stopping = True

    async def leave(self, patience_s: float) -> None:
        """Wait for the engine to exit, then end it; see `EngineChild.leave`."""
        await self._child.leave(patience_s)

    async def _watch(self, client: EngineOwner, clock: Clock) -> bool:
        """Return when the engine has ended or lost its connection, or, with True, when it hangs."""
        while not self._lost.is_set() and not self._child.has_ended:
            before_s = clock.now_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._lost.wait()
            if clock.now_s() - before_s > _LATE_S:
                client.status.note_report(clock.now_s())  # its reports may have arrived; they come first
            elif (client.status.is_stalled or client.status.is_load_stalled) and not self._lost.is_set():
                return True
        return False

    async def _bury(self, client: EngineOwner, *, is_hung: bool) -> Death:
        """End the process, wait for it, and read the last tokens that it sent. Return what is known about its death."""
        is_loading = client.status.state is not EngineState.READY
        hung = f"it hung while {client.status.stage}" if is_loading else _HUNG
        await self._child.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EOF_S):
                await self._lost.wait()
        client.disconnect()
        failure = client.status.failure
        return Death(
            kind=DeathKind.HANG if is_hung else self._child.death_kind,
            cause=hung if is_hung else await self._child.cause(0) if failure is None else failure.message,
            trail=self._inherited.record.read(),
            had_progress=client.had_progress,
        )

    async def _follow(self, death: Death, client: EngineOwner, clock: Clock) -> bool:
        """Draw the consequences of a death. Return whether another engine is to be started."""
        verdict = self._book.judge(death, client.suspect_until_by_seq, clock.now_s())
        self._log.error(
            "engine_died",
            pid=self.pid,
            cause=death.cause,
            open=client.num_open,
            suspects=len(verdict.suspects),
            failed=verdict.failed,
        )
        self._inherited.record.clear()
        client.take_verdict(death, verdict)
        if client.status.ready is None and death.kind is DeathKind.EXIT:  # the next one would fail in the same way
            self.end = f"the engine died at its start ({client.status.stage}): {death.cause}{_by_limits()}"
        elif verdict.is_crash_loop:
            times = f"{CRASH_LOOP} times within {CRASH_LOOP_S:.0f} s"
            self.end = f"the engine died {times}, last: {death.cause}{_by_limits()}"
        if self.end:
            return False
        await asyncio.sleep(verdict.delay_s)
        return not self._is_stopping


def _by_limits() -> str:
    """Return the limits on memory that may have ended an engine, in words; empty if there are none."""
    limits = show_memory_limits()
    return f"; raise {limits}" if limits else ""
