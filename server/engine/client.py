"""The HTTP process's end of the engine: submits sequences, hears what steps bring, knows whether it lives."""

import asyncio
import enum
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from msgspec import Struct

from tiercel.clock import Clock
from tiercel.errors import TiercelError, WireError
from tiercel.ids import SeqId, TenantId
from tiercel.outcome import Finished, FinishReason, Gauges
from tiercel.request import Request, SamplingParams
from tiercel.server.engine.mailbox import EngineGone, Mailbox
from tiercel.settings import EngineSettings
from tiercel.tenant import Tenants
from tiercel.wire import (
    Abort,
    Failed,
    FrameReader,
    FromEngine,
    Loading,
    Quit,
    Ready,
    Report,
    SetSettings,
    SetTenants,
    Start,
    Submit,
    ToEngine,
    encode_frame,
)

_TOKEN_BYTES = 4  # of a token id in a report


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"  # it could not start, and said why
    DEAD = "dead"  # it went away


class EngineStartError(TiercelError):
    """The engine could not start; `message` is the line for the operator."""


class SequenceStart(Struct, frozen=True, kw_only=True):
    """One sequence to submit, and what the books want to know about it later."""

    prompt: bytes  # packed tokens
    num_prompt: int
    params: SamplingParams
    n: int | None  # choices of its prompt, on the first of them only
    scope: bytes = b""
    tenant: TenantId = TenantId("default")
    band: int = 0
    num_uncached: float = 0.0  # tokens that this sequence probably adds to the prompts to be computed
    queue_s: float | None = None  # how long the queue before it should take; None = not known
    num_reserved: int = 0  # outputs already charged to the tenant's tokens per minute


class SequenceStage(enum.Enum):
    """What a sequence counts as."""

    WAITING = "waiting"  # for its first token
    RUNNING = "running"
    GONE = "gone"  # it ended, or its client left


class SequenceFacts:
    """What the HTTP process knows of one sequence until its `Finished` arrives. Written by EngineClient."""

    __slots__ = (
        "arrival_s",
        "choice",
        "finished",
        "first_token_s",
        "gaps_s",
        "last_token_s",
        "mailbox",
        "num_outputs",
        "stage",
        "start",
        "started_s",
    )

    def __init__(self, start: SequenceStart, choice: int, mailbox: Mailbox, arrival_s: float) -> None:
        self.start = start
        self.choice = choice
        self.mailbox: Mailbox | None = mailbox  # None once the client request has ended
        self.arrival_s = arrival_s
        self.started_s: float | None = None  # its first slice was launched; known with the first token
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.num_outputs = 0
        self.gaps_s: list[float] = []  # between tokens
        self.finished: Finished | None = None
        self.stage: SequenceStage | None = None  # None until it is submitted


class SequenceWatcher(Protocol):
    """Who keeps count of what each tenant has at the engine; see `account`."""

    def on_moved(self, facts: SequenceFacts, before: SequenceStage | None) -> None: ...

    def on_finished(self, facts: SequenceFacts) -> None: ...

    def on_prompts(self, tokens: int, busy_s: float) -> None: ...


class EngineObserver(Protocol):
    """Who counts what happens; see `metrics`."""

    def on_ready(self, ready: Ready) -> None: ...

    def on_token(self, facts: SequenceFacts, now_s: float, gap_s: float | None) -> None: ...

    def on_finished(self, facts: SequenceFacts, finished: Finished, now_s: float) -> None: ...

    def on_step(self, gauges: Gauges) -> None: ...


class Submission(Struct, frozen=True):
    """The sequences of one client request, in the order of its choices."""

    seqs: tuple[SeqId, ...]
    facts: tuple[SequenceFacts, ...]


class EngineClient(asyncio.Protocol):
    """Frames over one connected socket. Runs on one event loop; nothing here blocks or awaits per token."""

    def __init__(self, clock: Clock, observer: EngineObserver, watcher: SequenceWatcher | None = None) -> None:
        self._clock = clock
        self._observer = observer
        self._watcher = watcher
        self._tenants: Tenants | None = None
        self._changed_settings: SetSettings | None = None
        self._reader: FrameReader[FromEngine] = FrameReader(cast(type[FromEngine], FromEngine))
        self._transport: asyncio.Transport | None = None
        self._num_started = 0
        self._facts_by_seq: dict[SeqId, SequenceFacts] = {}
        self._tokenless: dict[SeqId, None] = {}
        self._next_seq = 1
        self._changed = asyncio.Event()
        self._failure: Failed | None = None
        self._last_report_s = clock.now_s()
        self._gauges = Gauges()
        self.state = EngineState.LOADING
        self.stage = "starting"
        self.ready: Ready | None = None

    async def open(self, sock: socket.socket, settings: EngineSettings) -> None:
        """Take over the socket and tell the engine what to load."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=sock)
        self._send(Start(settings))

    async def wait_ready(self) -> Ready:
        """The engine's facts, once it serves. Errors: EngineStartError."""
        while self.ready is None:
            if self.state is EngineState.FAILED and self._failure is not None:
                raise EngineStartError(self._failure.code, self._failure.message)
            if self.state is EngineState.DEAD:
                raise EngineStartError("engine.died", f"the engine died while {self.stage}")
            await self._wait_change()
        return self.ready

    async def wait_gone(self) -> None:
        """Return when the engine is dead or has failed to start."""
        while self.state in (EngineState.LOADING, EngineState.READY):
            await self._wait_change()

    async def wait_finished(self, books: Sequence[SequenceFacts]) -> None:
        """Return when the engine has reported the end of all these sequences."""
        while any(facts.finished is None for facts in books):
            await self._wait_change()

    @property
    def failure(self) -> Failed | None:
        """Why the engine could not start, if it said so."""
        return self._failure

    @property
    def gauges(self) -> Gauges:
        """The engine's books at its last report."""
        return self._gauges

    @property
    def facts_by_seq(self) -> Mapping[SeqId, SequenceFacts]:
        """Every sequence that the engine has not reported finished, in order of arrival."""
        return self._facts_by_seq

    @property
    def num_open(self) -> int:
        """Sequences whose client still listens."""
        return sum(1 for facts in self._facts_by_seq.values() if facts.mailbox is not None)

    @property
    def num_unfinished(self) -> int:
        """Sequences that the engine has not reported finished."""
        return len(self._facts_by_seq)

    @property
    def num_tokenless(self) -> int:
        """Sequences without a first token."""
        return len(self._tokenless)

    @property
    def num_started(self) -> int:
        """Sequences that have had a first token, since start."""
        return self._num_started

    def silence_s(self) -> float:
        """Seconds of pending work without a report; 0 when there is no work."""
        return self._clock.now_s() - self._last_report_s if self._facts_by_seq else 0.0

    def set_tenants(self, tenants: Tenants) -> None:
        """Tell the engine who is served: now, or as soon as it serves."""
        self._tenants = tenants
        if self.state is EngineState.READY:
            self._send(SetTenants(tenants))

    def set_settings(self, version: int, settings: EngineSettings) -> None:
        """Tell the engine what has changed since it started: now, or as soon as it serves."""
        self._changed_settings = SetSettings(version, settings)
        if self.state is EngineState.READY:
            self._send(self._changed_settings)

    def submit(self, starts: Sequence[SequenceStart], mailbox: Mailbox, arrival_s: float) -> Submission:
        """Hand sequences to the engine; their news goes to `mailbox`, choices numbered in this order."""
        if not self._facts_by_seq:
            self._last_report_s = self._clock.now_s()  # the silence of an idle engine does not count
        seqs: list[SeqId] = []
        books: list[SequenceFacts] = []
        for choice, start in enumerate(starts):
            seq = SeqId(self._next_seq)
            self._next_seq += 1
            facts = SequenceFacts(start, choice, mailbox, arrival_s)
            self._facts_by_seq[seq] = facts
            self._tokenless[seq] = None
            self._move(facts, SequenceStage.WAITING)
            seqs.append(seq)
            books.append(facts)
            self._send(Submit(_request(seq, start, arrival_s)))
        if self.state is not EngineState.READY:
            self._fail_open(_GONE)
        return Submission(tuple(seqs), tuple(books))

    def abort(self, seqs: Sequence[SeqId], reason: FinishReason) -> None:
        """End sequences now and deliver nothing more of them. Finished ones are left alone."""
        running: list[SeqId] = []
        for seq in seqs:
            facts = self._facts_by_seq.get(seq)
            if facts is not None and facts.mailbox is not None:
                facts.mailbox = None
                self._tokenless.pop(seq, None)
                self._move(facts, SequenceStage.GONE)
                running.append(seq)
        if running:
            self._send(Abort(tuple(running), reason))
            self._signal_change()

    def refuse_queued(self, gone: EngineGone) -> None:
        """For a drain: give up the youngest sequences without a token, as many as the engine has not admitted yet."""
        gauges = self._gauges
        waiting = min(max(gauges.num_waiting - gauges.num_preempted, 0), len(self._tokenless))
        seqs = list(self._tokenless)[len(self._tokenless) - waiting :]
        self._give_up(seqs, gone)

    def refuse_all(self, gone: EngineGone) -> None:
        """For the end of a drain: give up every sequence."""
        self._give_up(list(self._facts_by_seq), gone)

    def quit(self, patience_s: float = 0.0) -> None:
        """Ask the engine to leave, after it has persisted for so long what lies in memory. Closing cuts that short."""
        self._send(Quit(patience_s))

    def close(self) -> None:
        """Close the socket; the engine exits when it reads the end of it."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except WireError:
            self._end(EngineState.DEAD)
            self.close()
            return
        for message in messages:
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(EngineState.FAILED if self._failure is not None else EngineState.DEAD)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Report():
                self._take_report(message)
            case Loading():
                self.stage = message.stage
                self._signal_change()
            case Ready():
                self.ready = message
                self.state = EngineState.READY
                self._observer.on_ready(message)
                if self._tenants is not None:
                    self._send(SetTenants(self._tenants))
                if self._changed_settings is not None:
                    self._send(self._changed_settings)
                self._signal_change()
            case Failed():
                self._failure = message
                self._end(EngineState.FAILED)

    def _take_report(self, report: Report) -> None:
        now_s = self._clock.now_s()
        busy_s, self._last_report_s = now_s - self._last_report_s, now_s
        for seq, token in zip(memoryview(report.seqs).cast("Q"), memoryview(report.tokens).cast("I"), strict=False):
            facts = self._facts_by_seq.get(SeqId(seq))
            if facts is None or facts.mailbox is None:
                continue  # a token launched before the engine heard of the abort
            self._note_token(SeqId(seq), facts, now_s)
            facts.mailbox.put_token(facts.choice, token)
        for first in report.firsts:
            facts = self._facts_by_seq.get(first.seq)
            if facts is not None:
                facts.started_s = first.started_s
        for logprobs in report.logprobs:
            facts = self._facts_by_seq.get(logprobs.seq)
            if facts is not None and facts.mailbox is not None:
                facts.mailbox.put_logprobs(facts.choice, logprobs)
        for finished in report.finished:
            self._note_finished(finished, now_s)
        if report.gauges is not None:
            if self._watcher is not None and self._tokenless:
                tokens = report.gauges.step_tokens - len(report.tokens) // _TOKEN_BYTES
                self._watcher.on_prompts(max(tokens, 0), busy_s)
            self._gauges = report.gauges.after(self._gauges)
            self._observer.on_step(self._gauges)

    def _note_token(self, seq: SeqId, facts: SequenceFacts, now_s: float) -> None:
        gap_s: float | None = None
        if facts.first_token_s is None:
            facts.first_token_s = now_s
            self._tokenless.pop(seq, None)
            self._num_started += 1
            self._move(facts, SequenceStage.RUNNING)
        else:
            gap_s = now_s - facts.last_token_s
            facts.gaps_s.append(gap_s)
        facts.last_token_s = now_s
        facts.num_outputs += 1
        self._observer.on_token(facts, now_s, gap_s)

    def _note_finished(self, finished: Finished, now_s: float) -> None:
        facts = self._facts_by_seq.pop(finished.seq, None)
        if facts is None:
            return
        self._tokenless.pop(finished.seq, None)
        facts.finished = finished
        self._move(facts, SequenceStage.GONE)
        if self._watcher is not None:
            self._watcher.on_finished(facts)
        self._observer.on_finished(facts, finished, now_s)
        if facts.mailbox is not None:
            facts.mailbox.put_finished(facts.choice, finished)
        self._signal_change()

    def _move(self, facts: SequenceFacts, stage: SequenceStage) -> None:
        before = facts.stage
        if before is not stage:
            facts.stage = stage
            if self._watcher is not None:
                self._watcher.on_moved(facts, before)

    def _give_up(self, seqs: Sequence[SeqId], gone: EngineGone) -> None:
        for seq in seqs:
            mailbox = self._facts_by_seq[seq].mailbox
            if mailbox is not None:
                mailbox.put_gone(gone)
        self.abort(seqs, FinishReason.ABORT)

    def _end(self, state: EngineState) -> None:
        if self.state in (EngineState.FAILED, EngineState.DEAD):
            return
        self.state = state
        self._fail_open(_GONE)
        self._signal_change()

    def _fail_open(self, gone: EngineGone) -> None:
        """Every sequence that the engine will not end gets its one outcome here."""
        now_s = self._clock.now_s()
        for seq, facts in list(self._facts_by_seq.items()):
            if facts.mailbox is not None:
                facts.mailbox.put_gone(gone)
                facts.mailbox = None
            self._note_finished(_died(seq, facts, now_s), now_s)

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _signal_change(self) -> None:
        self._changed.set()


_GONE = EngineGone("The engine stopped. The server is going down; please retry.", "engine_dead")


def _request(seq: SeqId, start: SequenceStart, arrival_s: float) -> Request:
    return Request(
        id=seq,
        prompt=start.prompt,
        params=start.params,
        arrival_s=arrival_s,
        tenant=start.tenant,
        band=start.band,
        scope=start.scope,
    )


def _died(seq: SeqId, facts: SequenceFacts, now_s: float) -> Finished:
    started_s = now_s if facts.started_s is None else facts.started_s
    first_s = now_s if facts.first_token_s is None else facts.first_token_s
    return Finished(
        seq=seq,
        reason=FinishReason.ERROR,
        num_prompt=facts.start.num_prompt,
        num_outputs=facts.num_outputs,
        num_cached=0,
        queued_s=started_s - facts.arrival_s,
        prefill_s=first_s - started_s,
        decode_s=now_s - first_s,
        error="engine died",
    )
