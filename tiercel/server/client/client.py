"""The HTTP process's end of the engine: submits and aborts sequences, and applies what the engine reports."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from tiercel.server.client.collector import Mailbox, StreamEnd
from tiercel.server.client.connection import EngineConnection
from tiercel.server.client.crash_book import CrashVerdict, Death
from tiercel.server.client.sequences import (
    OpenSequences,
    SequenceFacts,
    SequenceObserver,
    SequenceStart,
    SequenceWatcher,
)
from tiercel.server.client.status import EngineState, EngineStatus
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason, Gauges
from tiercel.values.request import Request
from tiercel.values.tenant import Tenants
from tiercel.wire.frames import (
    Abort,
    DiskReleased,
    EngineNews,
    Failed,
    FromEngine,
    Loading,
    Quit,
    Ready,
    ReleaseDisk,
    Report,
    SetSettings,
    SetTenants,
    Start,
    Submit,
)

_TOKEN_BYTES = 4  # of a token id in a report
_ENGINE_DEAD = StreamEnd("The engine stopped. The server is going down; please retry.", "engine_dead")
_ENGINE_CRASHED = StreamEnd("The engine crashed each time it computed this request.", "engine_crashed", 500, None)


class EngineObserver(SequenceObserver, Protocol):
    """Counts events of the engine; see `metrics`."""

    def on_ready(self, ready: Ready) -> None: ...

    def on_step(self, gauges: Gauges) -> None: ...


class Submission(Struct, frozen=True):
    """The sequences of one client request, in the order of its choices."""

    seqs: tuple[SeqId, ...]
    facts: tuple[SequenceFacts, ...]


class EngineClient:
    """One engine, its status and its sequences. Nothing here blocks, and nothing awaits per token."""

    def __init__(self, clock: Clock, observer: EngineObserver, watcher: SequenceWatcher | None = None) -> None:
        self._clock = clock
        self._observer = observer
        self._tenants: Tenants | None = None
        self._changed_settings: SetSettings | None = None
        self._gauges = Gauges()
        self.connection = EngineConnection(self._receive, lambda: None)
        self._released: asyncio.Future[bool] | None = None
        self.num_tokens = 0  # that the present engine has reported
        self.on_lost: Callable[[], None] = self.give_up  # called when the connection to an engine has ended
        self.sequences = OpenSequences(clock, observer, watcher)
        self.status = EngineStatus(clock, has_work=lambda: self.sequences.num_unfinished > 0)

    async def open(self, sock: socket.socket, settings: EngineSettings) -> None:
        """Take over the socket of an engine that was just started, and tell it what to load.

        When it is ready, it gets every sequence that an earlier engine has left unfinished.
        """
        self.connection = EngineConnection(self._receive, self._on_lost)
        self.num_tokens = 0
        self.status.failure = None
        self.status.note_report(self._clock.now_s())
        await self.connection.open(sock)
        self.connection.send(Start(settings))

    @property
    def state_by_engine(self) -> Mapping[str, str]:
        """The state of each engine by its address; empty where the one engine is a child of this process."""
        return {}

    @property
    def num_open(self) -> int:
        """Number of sequences whose client has not left."""
        return self.sequences.num_open

    @property
    def had_progress(self) -> bool:
        """Whether the engine has delivered tokens and left work undone."""
        return bool(self.num_tokens and self.sequences.num_unfinished)

    @property
    def suspect_until_by_seq(self) -> Mapping[SeqId, int]:
        """Every unfinished sequence, with the tokens until which it is to run alone; 0: it need not."""
        return {seq: facts.suspect_until for seq, facts in self.sequences.facts_by_seq.items()}

    @property
    def gauges(self) -> Gauges:
        """The engine's figures at its last report."""
        return self._gauges

    def set_tenants(self, tenants: Tenants) -> None:
        """Send the tenants to the engine: now, or as soon as it serves."""
        self._tenants = tenants
        if self.status.state is EngineState.READY:
            self.connection.send(SetTenants(tenants))

    def set_settings(self, version: int, settings: EngineSettings) -> None:
        """Send changed settings to the engine: now, or as soon as it serves."""
        self._changed_settings = SetSettings(version, settings)
        if self.status.state is EngineState.READY:
            self.connection.send(self._changed_settings)

    def submit(
        self, starts: Sequence[SequenceStart], mailbox: Mailbox, arrival_s: float, *, first: int = 0
    ) -> Submission:
        """Hand sequences to the engine. Their tokens go to `mailbox`, with the choices numbered in this order from
        `first` on.

        While the engine is being restarted they wait for it. If it is gone for good, the mailbox says so at once.
        """
        if not self.sequences.num_unfinished:
            self.status.note_report(self._clock.now_s())  # the silence of an idle engine does not count
        seqs: list[SeqId] = []
        books: list[SequenceFacts] = []
        for choice, start in enumerate(starts, first):
            seq, facts = self.sequences.add(start, choice, mailbox, arrival_s)
            seqs.append(seq)
            books.append(facts)
        if self.status.state is EngineState.READY:
            self._place([facts.request(seq) for seq, facts in zip(seqs, books, strict=True)])
        if self.status.is_over:
            self._fail_all()
        return Submission(tuple(seqs), tuple(books))

    def abort(self, seqs: Sequence[SeqId], reason: FinishReason) -> None:
        """End sequences now and deliver nothing more of them. Finished sequences are left alone."""
        abandoned = self.sequences.abandon(seqs, reason)
        if abandoned:
            self._send_abort(Abort(abandoned, reason))
            self.status.notify()

    def abort_queued(self, seqs: Sequence[SeqId], reason: FinishReason) -> bool:
        """End sequences unless one of them has been admitted. Return whether they have been ended.

        If not, the engine decides, and reports their ends with `reason` if none has been admitted.
        """
        if self.status.state is not EngineState.READY:  # no living engine has admitted anything
            self.abort(seqs, reason)
            return True
        self._send_abort(Abort(tuple(seqs), reason, if_queued=True))
        return False

    async def wait_finished(self, sequences: Sequence[SequenceFacts]) -> None:
        """Return when the engine has reported the end of all these sequences."""
        await self.status.wait_until(lambda: all(facts.finished is not None for facts in sequences))

    def refuse_queued(self, end: StreamEnd) -> None:
        """Abort the youngest sequences without a token: as many as the engine has not admitted. Used by a drain."""
        waiting = max(self._gauges.num_waiting - self._gauges.num_preempted, 0)
        self._abort_streams(self.sequences.youngest_tokenless(waiting), end)

    def refuse_all(self, end: StreamEnd) -> None:
        """Abort every sequence, at the end of a drain."""
        self._abort_streams(list(self.sequences.facts_by_seq), end)

    def quit(self, patience_s: float = 0.0) -> None:
        """Ask the engine to persist its cache for up to `patience_s` and to exit. Closing cuts that short."""
        self.connection.send(Quit(patience_s))

    def take_verdict(self, death: Death, verdict: CrashVerdict) -> None:
        """Draw the consequences of a death for the sequences: suspects will run alone, a guilty one fails."""
        if verdict.failed is not None:
            self._fail(verdict.failed)
        self.sequences.note_death(verdict.suspects)

    async def release_disk(self, lock_fds: tuple[int, ...]) -> bool:
        """Have the engine close its SSD tier and these descriptors. Return False if a disk call hangs, or it dies."""
        self._released = asyncio.get_running_loop().create_future()
        self.connection.send(ReleaseDisk(lock_fds))
        return await self._released

    def give_up(self) -> None:
        """Fail every sequence, because no other engine will be started."""
        self._end(EngineState.FAILED if self.status.ready is None and self.status.failure else EngineState.DEAD)

    def disconnect(self) -> None:
        """Close the connection to a dead engine."""
        self.connection.close()

    def close(self) -> None:
        """Close the socket; the engine exits when it reads the end of it."""
        self.connection.close()

    def _place(self, requests: Sequence[Request]) -> None:
        """Send the sequences of one client request to the engine, which serves."""
        for request in requests:
            self.connection.send(Submit(request))

    def _send_abort(self, abort: Abort) -> None:
        self.connection.send(abort)

    def _fail(self, seq: SeqId) -> None:
        """Fail a sequence that has crashed an engine while it ran alone."""
        self.sequences.fail(seq, _ENGINE_CRASHED)
        self.status.notify()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Report():
                self._take_report(message)
            case Loading():
                self.status.stage = message.stage
                self.status.note_report(self._clock.now_s())
                self.status.notify()
            case Ready():
                self._begin_serving(message)
            case EngineNews():
                pass  # one engine needs no choice
            case DiskReleased():
                self._end_release(is_released=message.is_released)
            case Failed():
                self.status.failure = message
                if self.status.ready is None:
                    self._end(EngineState.FAILED)

    def _begin_serving(self, ready: Ready) -> None:
        self.status.ready = ready
        self.status.state = EngineState.READY
        self._observer.on_ready(ready)
        if self._tenants is not None:
            self.connection.send(SetTenants(self._tenants))
        if self._changed_settings is not None:
            self.connection.send(self._changed_settings)
        for request in self.sequences.resume():
            self.connection.send(Submit(request))
        self._gauges = Gauges()
        self.status.note_report(self._clock.now_s())
        self.status.notify()

    def _take_report(self, report: Report) -> None:
        now_s = self._clock.now_s()
        busy_s = self.status.note_report(now_s)
        self.num_tokens += len(report.tokens) // _TOKEN_BYTES
        if self.sequences.take_report(report, now_s):
            self.status.notify()
        if report.gauges is not None:
            self.sequences.note_prompts(report.gauges.step_tokens - len(report.tokens) // _TOKEN_BYTES, busy_s)
            self._gauges = report.gauges.after(self._gauges)
            self._observer.on_step(self._gauges)

    def _abort_streams(self, seqs: Sequence[SeqId], end: StreamEnd) -> None:
        self.sequences.end_streams(seqs, end)
        self.abort(seqs, FinishReason.ABORT)

    def _end_release(self, *, is_released: bool) -> None:
        if self._released is not None and not self._released.done():
            self._released.set_result(is_released)

    def _on_lost(self) -> None:
        self._end_release(is_released=False)
        if self.status.state is EngineState.READY:
            self.status.state = EngineState.RESTARTING
            self.status.notify()
        self.on_lost()

    def _end(self, state: EngineState) -> None:
        if not self.status.is_over:
            self.status.state = state
            self._fail_all()

    def _fail_all(self) -> None:
        self.sequences.fail_all(_ENGINE_DEAD)
        self.status.notify()
