"""The daemon leaves: streams finish until a limit, the engine writes its cache and exits."""

import asyncio

import structlog

from tiercel.server.api.context import ServerContext
from tiercel.server.client.collector import StreamEnd
from tiercel.server.client.status import EngineState
from tiercel.server.client.supervisor import Supervision
from tiercel.server.control.systemd import SystemdNotifier
from tiercel.server.http.uvicorn_server import FLUSH_S, QuietServer
from tiercel.server.tenancy.admission import shutting_down

EXIT_OK = 0
EXIT_FORCED = 1
EXIT_CONFIG = 2
EXIT_ENGINE = 3

_ENGINE_PATIENCE_S = 2.0  # to wait for the exit of the engine after `Quit`
_PERSIST_S = 5.0  # at least, for the engine to write to the SSD tier what the drain has left unfinished
_POLL_S = 0.02


class Departure:
    """The end of the daemon, from the first signal or a takeover to its exit code. A second signal cuts it short."""

    def __init__(
        self, context: ServerContext, supervisor: Supervision, server: QuietServer, notifier: SystemdNotifier
    ) -> None:
        self._context = context
        self._supervisor = supervisor
        self._server = server
        self._notifier = notifier
        self._second_request = asyncio.Event()
        self._drain_end_s = 0.0  # time at which --shutdown-timeout ends
        self._log = structlog.stdlib.get_logger("server.lifecycle")
        self.requested = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        """Whether a signal or `tiercel drain` has asked the daemon to leave."""
        return self.requested.is_set()

    @property
    def is_forced(self) -> bool:
        """Whether a second signal has cut the departure short."""
        return self._second_request.is_set()

    def request(self) -> None:
        """Ask the daemon to leave; the second time, at once."""
        if self.is_requested:
            self._second_request.set()
        else:
            limit_s = self._context.settings.shutdown_timeout_s + FLUSH_S + _PERSIST_S + 3 * _ENGINE_PATIENCE_S
            self._notifier.stopping("letting answers finish", limit_s)
            self.requested.set()
        self._context.client.status.notify()

    async def leave(self, stop_requested: "asyncio.Task[bool]", engine_ended: "asyncio.Task[None]") -> int:
        """Another daemon accepts the connections: serve those that are open to their end, then drain."""
        await self._stop_batches()  # the other daemon goes on with them
        end_s = self._context.clock.now_s() + self._context.settings.shutdown_timeout_s
        closed = asyncio.create_task(self._wait_closed())
        try:
            await asyncio.wait(
                [closed, stop_requested, engine_ended],
                timeout=end_s - self._context.clock.now_s(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            closed.cancel()
        return await self.drain(engine_ended, max(0.0, end_s - self._context.clock.now_s()))

    async def drain(self, engine_ended: "asyncio.Task[None]", timeout_s: float) -> int:
        """Refuse new work, let streams finish until the timeout, then end them with an error event."""
        client = self._context.client
        self._drain_end_s = self._context.clock.now_s() + timeout_s
        refusal = shutting_down()
        end = StreamEnd(refusal.message, refusal.code)
        self._context.admission.close()
        self._log.info("draining", open=client.sequences.num_open, timeout_s=timeout_s)
        await self._stop_batches()
        client.refuse_queued(end)
        idle = asyncio.create_task(self._wait_idle())
        second_signal = asyncio.create_task(self._second_request.wait())
        try:
            await asyncio.wait(
                [idle, second_signal, engine_ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (idle, second_signal):
                task.cancel()
        client.refuse_all(end)
        self._log.info("drained", forced=self.is_forced)
        if client.status.state is EngineState.DEAD:
            return EXIT_ENGINE
        return EXIT_FORCED if self.is_forced else EXIT_OK

    async def stop_engine(self, code: int) -> int:
        """Let the engine persist its cache for the rest of the drain time, then stop it. Return the exit code.

        A second signal ends the wait. The engine gets `_PERSIST_S` at least: sequences that the drain has ended early
        are found again by clients that repeat the request.
        """
        client = self._context.client
        left_s = self._drain_end_s - self._context.clock.now_s()
        patience_s = max(_PERSIST_S, left_s) if code == EXIT_OK and self._drain_end_s else 0.0
        self._supervisor.stop()
        client.quit(patience_s)
        if patience_s:
            engine_ended = asyncio.create_task(client.status.wait_gone())
            second_signal = asyncio.create_task(self._second_request.wait())
            limit_s = patience_s + _ENGINE_PATIENCE_S
            await asyncio.wait([engine_ended, second_signal], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (engine_ended, second_signal):
                task.cancel()
            code = EXIT_FORCED if self.is_forced else code
        client.close()
        await self._supervisor.leave(_ENGINE_PATIENCE_S if code == EXIT_OK else 0.0)
        return code

    async def _stop_batches(self) -> None:
        """Leave files and batches as they are."""
        if self._context.batches is not None:
            await self._context.batches.stop()

    async def _wait_closed(self) -> None:
        """Return when no client is connected."""
        while self._server.num_connections:  # noqa: ASYNC110 - a set of uvicorn
            await asyncio.sleep(_POLL_S)

    async def _wait_idle(self) -> None:
        """Return when no client waits for a token and no admitted request is still being prepared."""
        while self._context.client.sequences.num_open or self._context.admission.num_reserved:  # noqa: ASYNC110 - two counters
            await asyncio.sleep(_POLL_S)
