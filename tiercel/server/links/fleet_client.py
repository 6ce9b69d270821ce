"""The sequences of a front with several engines: each is at one engine, and goes on at another when that is lost."""

import asyncio
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from tiercel.fleet.moves import Recall, SequenceMove
from tiercel.fleet.router import PromptWork
from tiercel.server.client.client import EngineClient, EngineObserver, Submission
from tiercel.server.client.collector import Mailbox, StreamEnd
from tiercel.server.client.crash_book import CrashBook, Death
from tiercel.server.client.sequences import SequenceStart, SequenceWatcher
from tiercel.server.client.status import EngineState
from tiercel.server.client.supervisor import DeathObserver
from tiercel.server.links.gauges import FleetGauges
from tiercel.server.links.link import EngineLink, LinkState
from tiercel.server.links.placement import Placement
from tiercel.settings.settings import EngineSettings
from tiercel.values.block_key import PromptHeads, namespace_key, prompt_heads
from tiercel.values.clock import Clock
from tiercel.values.ids import EngineId, SeqId, TenantId
from tiercel.values.limit_use import LimitUse
from tiercel.values.outcome import Finished, FinishReason
from tiercel.values.request import Request
from tiercel.values.tenant import Tenants
from tiercel.wire.fleet_frames import LimitUses, unpack_heads
from tiercel.wire.frames import Abort, EngineNews, Ready, Report

HOLD_S = 30.0
"""The time for which sequences wait for an engine when there is none. Then they fail, and new ones are refused."""

_RELAYS = 2  # engines over which fronts tell each other what they have allowed: one of them may just be lost
_TOKEN_BYTES = 4  # of a token id in a report
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
_NO_ENGINE = StreamEnd("No engine can be reached. Please retry.", "engine_dead")


class LimitKeeper(Protocol):
    """The limits of tenants that several fronts keep together."""

    def tell(self) -> dict[TenantId, LimitUse]: ...
    def hear(self, front: bytes, number: int, uses: Mapping[TenantId, LimitUse], /) -> None: ...


class FleetClient(EngineClient):
    """Several engines with the interface of one. All choices of a client request begin at the same engine.

    The state is READY while any engine takes work, and RESTARTING while there is none.
    """

    def __init__(
        self,
        clock: Clock,
        observer: EngineObserver,
        draw: random.Random,
        watcher: SequenceWatcher | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        """`draw` breaks ties between engines."""
        super().__init__(clock, observer, watcher)
        self._placement = Placement(self._work_of, draw)
        self._moves = self._placement.moves
        self._hold_s = hold_s
        self._links: list[EngineLink] = []
        self._numbers = itertools.count(1)
        self._limit_numbers = itertools.count(1)
        self._link_by_engine: dict[EngineId, EngineLink] = {}
        self._book = CrashBook()
        self._fleet_gauges = FleetGauges()
        self._holding: asyncio.TimerHandle | None = None
        self._is_refusing = False  # no engine has come back in time
        self.deaths: DeathObserver | None = None
        self.limits: LimitKeeper | None = None

    @property
    def links(self) -> Sequence[EngineLink]:
        """The engines, in the order in which they were added."""
        return tuple(self._links)

    @property
    def state_by_engine(self) -> Mapping[str, str]:
        """The state of each engine by its address."""
        return {link.address: link.state.value for link in self._links}

    def add(self, link: EngineLink) -> None:
        """Add an engine, which has no connection yet."""
        self._links.append(link)

    def remove(self, link: EngineLink) -> None:
        """Forget an engine without a connection."""
        self._links.remove(link)
        self._move_all(link)

    def submit(
        self, starts: Sequence[SequenceStart], mailbox: Mailbox, arrival_s: float, *, first: int = 0
    ) -> Submission:
        """Hand sequences to an engine; see `EngineClient.submit`. Without an engine they wait for `hold_s` at most."""
        submission = super().submit(starts, mailbox, arrival_s, first=first)
        if self.status.state is not EngineState.READY:
            if seqs := [seq for seq in submission.seqs if seq in self.sequences.facts_by_seq]:
                self._moves.submit(seqs)
            if self._is_refusing:
                self._fail_unplaced()
        return submission

    def abort_queued(self, seqs: Sequence[SeqId], reason: FinishReason) -> bool:
        """End sequences unless one of them has been admitted; see `EngineClient.abort_queued`."""
        if any(self._moves.engine_of(seq) is None for seq in seqs):
            self.abort(seqs, reason)
            return True
        return super().abort_queued(seqs, reason)

    def set_tenants(self, tenants: Tenants) -> None:
        """Send the tenants to all engines: now, or as soon as they serve."""
        self._tenants = tenants
        self._placement.set_tenants(tenants)
        for link in self._links:
            if link.takes_work:
                link.set_tenants(tenants)

    def set_settings(self, version: int, settings: EngineSettings) -> None:
        """Do nothing: the settings of an engine are those that it was started with."""

    async def release_disk(self, lock_fds: tuple[int, ...]) -> bool:
        """Return True: a front has no SSD tier."""
        return True

    def quit(self, patience_s: float = 0.0) -> None:
        """Use no engine any more. The engines go on."""
        self.give_up()

    def close(self) -> None:
        """Stop waiting for an engine."""
        if self._holding is not None:
            self._holding.cancel()

    # Called by the links

    def on_engine_ready(self, link: EngineLink, ready: Ready) -> None:
        """Use an engine from now on, if it computes what the others compute."""
        if link.engine is not None:
            return
        if (problem := self._difference(link, ready)) is not None:
            link.refuse(problem)
            return
        if self.status.ready is None:
            self._observer.on_ready(ready)
        self.status.ready = ready
        if not self.status.is_over:
            self.status.state = EngineState.READY
        self._is_refusing = False
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        if self._tenants is not None:
            link.set_tenants(self._tenants)
        link.engine = EngineId(next(self._numbers))
        self._link_by_engine[link.engine] = link
        self._send(self._placement.join(link.engine, ready.speed))
        self._recall(self._moves.recall())
        self.status.note_report(self._clock.now_s())
        self.status.notify()

    def on_engine_lost(self, link: EngineLink, death: Death) -> None:
        """Draw the consequences of the loss of an engine: its sequences go on at another one."""
        seqs = sorted(link.seqs)
        link.seqs.clear()
        self._fleet_gauges.retire(link)
        if self.deaths is not None:
            self.deaths.on_engine_death(death.kind.value)
        verdict = self._book.judge(death, self.suspect_until_by_seq, self._clock.now_s())
        if verdict.failed is not None:
            self._fail(verdict.failed)
            self._moves.end(verdict.failed)
        left = [seq for seq in seqs if seq in self.sequences.facts_by_seq]
        self.sequences.note_death({seq: end for seq, end in verdict.suspects.items() if seq in left}, left)
        if not any(one.takes_work for one in self._links):
            self._begin_holding()
        for seq in left:
            if self.sequences.facts_by_seq[seq].mailbox is None:
                self._moves.end(seq)
                self.sequences.resume([seq])  # nobody waits for it: it ends
        self._move_all(link)
        self.status.notify()

    def on_engine_changed(self, link: EngineLink) -> None:
        """Note that an engine does something else, such as loading."""
        if link.state is LinkState.LEAVING and link.engine is not None:
            self._leave(link.engine)
        if self.status.state is EngineState.READY and not any(one.takes_work for one in self._links):
            self._begin_holding()
        if self.status.state is not EngineState.READY:
            self.status.stage = f"{link.address} {link.stage}"
        self.status.notify()

    def take_report(self, link: EngineLink, report: Report) -> None:
        """Deliver the report of a step of one engine."""
        now_s = self._clock.now_s()
        busy_s = self.status.note_report(now_s)
        self.num_tokens += len(report.tokens) // _TOKEN_BYTES
        for first in report.firsts:
            self._moves.note_first_token(first.seq)
        back: list[SequenceMove] = []
        ends: list[Finished] = []
        for finished in report.finished:
            link.seqs.pop(finished.seq, None)
            if (move := self._given_back(finished)) is not None:
                back.append(move)
                continue
            ends.append(finished)
            self._moves.end(finished.seq, finished.num_outputs if finished.reason in _WHOLE else None)
        if back:
            report = replace(report, finished=tuple(ends))
            self._send(back)
        if self.sequences.take_report(report, now_s):
            self.status.notify()
        if report.gauges is not None:
            self.sequences.note_prompts(report.gauges.step_tokens - len(report.tokens) // _TOKEN_BYTES, busy_s)
            self._gauges = self._fleet_gauges.take(link, report.gauges, self._links)
            self._observer.on_step(self._gauges)

    def take_news(self, link: EngineLink, news: EngineNews) -> None:
        """Note what an engine has cached and whom it has served; balance the tenants and the engines."""
        if link.engine is None:
            return
        self._placement.take_news(link.engine, unpack_heads(news.stored), unpack_heads(news.dropped), news.served_ms)
        for engine, weights in self._placement.weigh(self._clock.now_s()).items():
            self._link_by_engine[engine].set_weights(weights)
        self._recall(self._moves.recall())

    def tell_limits(self) -> None:
        """Tell the other fronts what this front has allowed, over the engines that come first for all fronts."""
        if self.limits is None:
            return
        told = LimitUses(self.limits.tell(), next(self._limit_numbers))
        for link in sorted((link for link in self._links if link.is_connected), key=_identity)[:_RELAYS]:
            link.tell_limits(told)

    def hear_limits(self, uses: LimitUses) -> None:
        """Note what another front has allowed."""
        if self.limits is not None:
            self.limits.hear(uses.front, uses.number, uses.uses)

    def work_s(self, link: EngineLink) -> float:
        """Return the predicted time that an engine needs for the unfinished sequences of this front."""
        return 0.0 if link.engine is None else self._placement.work_ms(link.engine) / 1e3

    def _place(self, requests: Sequence[Request]) -> None:
        """Send the sequences of one client request to one engine."""
        engine = self._moves.submit([request.id for request in requests])
        if engine is None:
            return
        link = self._link_by_engine[engine]
        for request in requests:
            link.seqs[request.id] = None
            link.submit(request)

    def _send(self, moves: Iterable[SequenceMove]) -> None:
        """Submit sequences that have a new engine. What nobody waits for ends."""
        for move in moves:
            if move.target is None:
                continue
            link = self._link_by_engine[move.target]
            for request in self.sequences.resume([move.seq]):
                link.seqs[request.id] = None
                link.submit(request)
            if move.seq not in self.sequences.facts_by_seq:
                self._moves.end(move.seq)
        self.status.notify()

    def _move_all(self, link: EngineLink) -> None:
        """Move the sequences of an engine that is lost."""
        if link.engine is not None:
            del self._link_by_engine[link.engine]
            lost, link.engine = link.engine, None
            self._send(self._placement.lose(lost))

    def _given_back(self, finished: Finished) -> SequenceMove | None:
        """Return the new place of a sequence that its engine was asked to give back, and has. None: it has ended."""
        facts = self.sequences.facts_by_seq.get(finished.seq)
        if finished.reason is not FinishReason.ABORT or facts is None or facts.abandoned_for is not None:
            return None
        return self._moves.give_back(finished.seq)

    def _recall(self, recalls: Iterable[Recall]) -> None:
        """Ask engines for sequences with which they have not begun."""
        for recall in recalls:
            self._link_by_engine[recall.engine].abort(Abort((recall.seq,), FinishReason.ABORT, if_queued=True))

    def _leave(self, engine: EngineId) -> None:
        """Choose a draining engine no more; what it has not begun goes to the others, if there are others."""
        if any(link.takes_work for link in self._links):
            self._recall(self._moves.drain(engine))
        else:
            self._placement.close(engine)

    def _work_of(self, seq: SeqId) -> PromptWork:
        """Return the work of a sequence. Cost: see `prompt_heads`; nothing while there is no choice."""
        facts, ready, heads = self.sequences.facts_by_seq[seq], self.status.ready, PromptHeads()
        tokens = facts.start.prompt + facts.outputs.tobytes()
        if ready is not None and self._placement.num_engines > 1:
            heads = prompt_heads(namespace_key(ready.key_space, facts.start.scope), tokens, ready.block_size)
        return PromptWork(
            tenant=facts.tenant,
            num_tokens=len(tokens) // _TOKEN_BYTES,
            max_outputs=max(0, facts.start.params.max_tokens - facts.num_outputs),
            heads=heads,
        )

    def _send_abort(self, abort: Abort) -> None:
        by_link: dict[EngineLink, list[SeqId]] = {}
        idle: list[SeqId] = []
        for seq in abort.seqs:
            engine = self._moves.engine_of(seq)
            if engine is not None:
                by_link.setdefault(self._link_by_engine[engine], []).append(seq)
            else:
                idle.append(seq)
        for link, seqs in by_link.items():
            link.abort(Abort(tuple(seqs), abort.reason, abort.if_queued))
        for seq in idle:
            self._moves.end(seq)
        self.sequences.resume(idle)  # nobody waits for them: they end

    def _difference(self, link: EngineLink, ready: Ready) -> str | None:
        """Return how an engine differs from those in use, if a stream that it continued could change."""
        known = self.status.ready
        has_others = any(one.takes_work for one in self._links if one is not link)
        if known is None or not (has_others or self.sequences.num_unfinished):
            return None
        for name in ("fingerprint", "vocab_size", "max_model_len", "has_grammars"):
            ours, theirs = getattr(known, name), getattr(ready, name)
            if ours != theirs:
                return f"its {name} is {theirs}, that of the engines in use is {ours}"
        return None

    def _begin_holding(self) -> None:
        """Let everything wait for an engine, until the time for that is up."""
        if self.status.state is EngineState.READY:
            self.status.state = EngineState.RESTARTING
            self._holding = asyncio.get_running_loop().call_later(self._hold_s, self._refuse)

    def _refuse(self) -> None:
        """Fail what waits, and what arrives from now on, until an engine serves."""
        self._holding = None
        self._is_refusing = True
        self._fail_unplaced()
        for link in self._links:
            if link.state is LinkState.REFUSED and link.ready is not None:
                link.accept()
                self.on_engine_ready(link, link.ready)

    def _fail_unplaced(self) -> None:
        for seq in self._moves.unplaced:
            self._moves.end(seq)
            self.sequences.fail(seq, _NO_ENGINE)
        self.status.notify()


def _identity(link: EngineLink) -> bytes:
    return link.host_identity
