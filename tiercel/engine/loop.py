"""The loop: plans a step, launches it, and books its outcome. Imports no torch."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from tiercel.engine.fairness_survey import FairnessSurvey
from tiercel.engine.gauges import GaugeReader
from tiercel.engine.grammar_queue import GrammarQueue, Grammars, NoGrammars
from tiercel.engine.prompt_results import PromptResults
from tiercel.engine.reports import Post, Reporter
from tiercel.engine.restore_wait import RestoreWait
from tiercel.engine.step.flight import Flight, RefusedFlight, StepRunner
from tiercel.engine.step.memory_relief import NO_MEMORY, MemoryRelief
from tiercel.engine.tenant_reload import TenantReload
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.table import NO_REUSE
from tiercel.scheduler.book import Commit, SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceError, InvariantError, OutOfDeviceMemoryError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import (
    BAD_LOGITS,
    DiskState,
    ExpertGauges,
    Finished,
    FinishReason,
    RouteGauges,
    SequenceState,
    StepOutcome,
)
from tiercel.values.plan import NanoBatch, StepPlan, whole_slices
from tiercel.values.request import Request
from tiercel.values.tenant import Tenants
from tiercel.values.tier import Landing, Transfer
from tiercel.wire.frames import Abort, Quit, ReleaseDisk, SetSettings, SetTenants, SetWeights, Start, Submit, ToEngine
from tiercel.wire.step_record import ANY_SEQ, StepRecord

log = logging.getLogger(__name__)

_MIN_LONG_MS = 10.0  # waiting for a shorter step is not noticeable
UNMEASURED_STALL_S = 30.0  # without measured step times, a step may take much longer than predicted
_PREDICTED_TIMES = 3.0  # a step that takes longer than so many times the prediction hangs
_LIKELY_VICTIMS = 8  # running sequences whose blocks are spilled in advance


class Mover(Protocol):
    """Copies blocks between tiers: by copy engines and disks, or simulated."""

    def start(self, transfers: Iterable[Transfer]) -> None: ...
    def poll(self) -> list[Landing]: ...
    def gauges(self) -> tuple[RouteGauges, ...]: ...


class NoMover:
    """The mover of an engine with a single tier."""

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Errors: InvariantError for any transfer, because there is no other tier."""
        for transfer in transfers:
            raise InvariantError("mover.none", transfer=transfer.id)

    def poll(self) -> list[Landing]:
        """Return no landings."""
        return []

    def gauges(self) -> tuple[RouteGauges, ...]:
        """Return no routes."""
        return ()


class Steers(Protocol):
    """Applies settings that change while the engine runs."""

    def steer(self, settings: EngineSettings, now_s: float) -> None: ...


class EngineLoop:
    """Runs steps: take landings, plan, seal, launch, start transfers, commit the step before, report.

    `depth` steps are launched ahead of the commit: 1 overlaps planning with computing, 0 is synchronous. If steps are
    to yield (`StepLimits.yield_ms`), no step is planned while a long one runs.
    """

    def __init__(
        self,
        book: SequenceBook,
        cache: CacheManager,
        planner: Planner,
        runner: StepRunner,
        post: Post,
        clock: Clock,
        depth: int = 1,
        mover: Mover | None = None,
        steering: Steers | None = None,
        relief: MemoryRelief | None = None,
        disk_state: Callable[[], DiskState] = lambda: DiskState.NONE,
        threads: Callable[[], int] = lambda: 0,
        release_disk: Callable[[Sequence[int]], None] = lambda lock_fds: None,
        record: StepRecord | None = None,
        stall_s: float = UNMEASURED_STALL_S,
        grammars: Grammars | None = None,
        experts: Callable[[], ExpertGauges] = ExpertGauges,
    ) -> None:
        """`threads`, `experts`: see `GaugeReader`. `release_disk`: see `DiskRelease.begin`. `record`: for whoever asks
        what a dead engine was working on. `stall_s`: the least time without the end of a step after which the engine
        counts as hung. `grammars`: None: requests that have one fail."""
        self._book = book
        self._cache = cache
        self._planner = planner
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._mover = mover or NoMover()
        self._patience = mover if isinstance(mover, RestoreWait) else None  # None: a plan is never put off
        self._steering = steering
        self._relief = relief or MemoryRelief(planner)
        self._release_disk = release_disk
        self._record = record or StepRecord.open(1)
        self._stall_s = stall_s
        self._grammars = grammars or NoGrammars()
        self._held = GrammarQueue(self._grammars)
        self._flights: deque[Flight] = deque()
        self._launched = 0  # steps
        self._started_s: deque[float] = deque()  # when each step in flight was launched
        self._committed_s = 0.0  # when the last step was committed; the device was busy until then
        self._order: tuple[SeqId, ...] = ()  # of waiting sequences, computed once a step for prefetching and planning
        self._reload = TenantReload(book, cache)
        self._post = post
        self._prompts = PromptResults(book, cache)
        self._survey = FairnessSurvey(book)
        self.gauges = GaugeReader(
            *(book, cache, self._relief, self._survey, self._mover.gauges, disk_state, clock, threads),
            grammars=self._grammars.gauges,
            experts=experts,
        )
        self._reporter = Reporter(book, self.gauges, self._survey, post, clock)
        self.has_quit = False
        self.quit_patience_s = 0.0  # time for persisting blocks after a quit

    @property
    def book(self) -> SequenceBook:
        """The sequences that the loop serves. Their bands may be changed between two steps."""
        return self._book

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs and no step is in flight."""
        return not self._flights and not len(self._book) and not len(self._held)

    @property
    def has_unsaved(self) -> bool:
        """Whether memory holds blocks that could be persisted and are not."""
        return self._cache.background.has_unsaved

    def take(self, messages: Iterable[ToEngine]) -> None:
        """Act on messages of the HTTP process."""
        for message in messages:
            match message:
                case Submit(request):
                    if not self._held.hold(request):
                        self._submit(request)
                case Abort(seqs, reason, if_queued):
                    if not if_queued or all(map(self._is_queued, seqs)):
                        for seq in seqs:
                            if seq in self._held:
                                self._submit(self._held.release(seq))
                            if seq in self._book:
                                self._end(seq, reason)
                case Quit(patience_s):
                    self.has_quit = True
                    self.quit_patience_s = patience_s
                case SetTenants(tenants):
                    self._set_tenants(tenants)
                case SetWeights(weights):
                    for tenant, weight in weights.items():
                        self._book.policy.fair.set_weight(tenant, weight, self._clock.now_s())
                case SetSettings(version, settings):
                    self._set_settings(version, settings)
                case ReleaseDisk(lock_fds):
                    self._release_disk(lock_fds)
                case Start():
                    log.warning("second start frame ignored")

    def step(self) -> bool:
        """Plan and launch a step, then commit the oldest step in flight. Return False if there was nothing to do.

        A long step is committed at once, so that the next one is planned with the messages that arrived meanwhile. A
        step with proposed tokens is, too: until it has committed, nobody knows where the next slices begin.
        """
        for request, error in self._held.take():
            self._submit(request)
            if error is not None and request.id in self._book:
                self._end(request.id, FinishReason.ERROR, error)
        self._note_planning()
        self._land()
        is_launched = self._launch()
        depth = 0 if is_launched and self._goes_alone() else self._depth
        is_reloading, is_surveying = self._reload.go_on(), self._survey.go_on()
        has_more = is_reloading or is_surveying or self._cache.has_more
        self._do_chores()
        is_committed = False
        while self._flights and (len(self._flights) > depth or not is_launched):
            self._commit(self._flights.popleft())
            is_committed = True
            if not is_launched:
                break
        if is_committed:
            return True
        if self._reporter.has_finished:
            self._reporter.report(Commit(), StepOutcome(()))
        elif not is_launched:
            self._reporter.report_changes()
        return is_launched or has_more

    def _goes_alone(self) -> bool:
        """Return whether the step launched last has to end before another one is planned: it speculates, or is long.

        A request that arrives after a step was planned waits for that step as well, because a sealed step is never
        changed. A step of decodes alone may take half of `yield_ms`, because two of them end within it; a step with
        prompts is long from 10 ms on.
        """
        yield_ms = self._planner.limits.yield_ms
        if not self._flights:
            return False
        if self._flights[-1].plan.is_speculative:
            return True
        if not yield_ms:
            return False
        slices = (piece for batch in self._flights[-1].plan.nano_batches for piece in batch.slices)
        is_decode = all(piece.length == 1 for piece in slices)
        least_ms = max(_MIN_LONG_MS, yield_ms / 2) if is_decode else _MIN_LONG_MS
        return self._book.policy.launched_ms >= least_ms

    def check_integrity(self) -> None:
        """Check that the books are consistent. Errors: InvariantError."""
        self._book.check_integrity()
        self._cache.check_integrity()

    def _set_tenants(self, tenants: Tenants) -> None:
        self._grammars.set_weights({share.name: share.weight for share in tenants.tenants})
        self._reload.start(tenants, self._clock.now_s())

    def _set_settings(self, version: int, settings: EngineSettings) -> None:
        if self._steering is not None:
            self._steering.steer(settings, self._clock.now_s())
            log.info("settings set version=%d policy=%s", version, settings.scheduling_policy)

    def _submit(self, request: Request) -> None:
        self._record.enter(request.id)
        self._take_in(request)
        self._record.enter(SeqId(0))

    def _take_in(self, request: Request) -> None:
        now_s = self._clock.now_s()
        has_reads = request.params.prompt_logprobs is not None or request.params.pooling is not None
        near_tokens = 0 if has_reads else self._cache.peek(request.prompt + request.outputs, request.scope)
        quota, block_size = self._cache.quota_blocks(request.tenant), self._cache.block_size
        # The KV of the last token is never computed.
        most_tokens = None if quota is None else quota * block_size + 1
        sequence = self._book.add(request, now_s, near_tokens, most_tokens)
        self._cache.open(request.id, sequence.tokens, request.scope, request.tenant)
        self._prompts.open(request.id)
        blocks = -(-(sequence.limit - 1) // block_size)
        # The HTTP process refuses such requests with a better message. One that arrives here must not wait for ever.
        if blocks > self._cache.blocks:
            self._end(request.id, FinishReason.ERROR, f"needs {blocks} KV blocks, the pool has {self._cache.blocks}")
        elif most_tokens is not None and sequence.num_tokens >= most_tokens:
            blocks = -(-sequence.num_tokens // block_size)
            error = f"the prompt needs {blocks} KV blocks, kv_quota_bytes.hbm of its tenant allows {quota}"
            self._end(request.id, FinishReason.ERROR, error)
        elif not sequence.num_prompt or sequence.num_tokens >= sequence.limit:
            self._end(request.id, FinishReason.ERROR, "there is nothing to compute")

    def _is_queued(self, seq: SeqId) -> bool:
        return seq in self._held or (seq in self._book and self._book[seq].state is SequenceState.WAITING)

    def _end(self, seq: SeqId, reason: FinishReason, error: str | None = None) -> None:
        self._reporter.add_finished(self._close(self._book.finish(seq, reason, self._clock.now_s(), error=error)))

    def _close(self, finished: Finished) -> Finished:
        """Close the sequence in the cache, and add to its outcome how many tokens came from lower tiers."""
        self._grammars.drop(finished.seq)
        self._prompts.close(finished.seq)
        reuse = self._cache.close(finished.seq)
        if reuse is NO_REUSE:
            return finished
        from_ssd = min(finished.num_cached, reuse.fetched_tokens)
        return replace(
            finished,
            num_cached_ssd=from_ssd,
            num_cached_ddr=min(finished.num_cached - from_ssd, max(0, reuse.loaded_tokens - from_ssd)),
            swapped_tokens=reuse.swapped_tokens,
        )

    def _land(self) -> None:
        """Book the transfers that have ended, and prefetch for the first waiting sequences."""
        while True:
            for seq, tokens in self._cache.land(self._mover.poll()):
                self._book.restored(seq, tokens)
            if not self._flights or self._patience is None:
                break
            begun_s = max(self._started_s[0], self._committed_s)
            if not self._patience.wait(begun_s + self._book.policy.in_flight_ms / 1e3):
                break
        self._order = self._planner.order(self._clock.now_s())
        self._cache.expect(self._order)

    def _do_chores(self) -> None:
        """Start background copies, likely victims first: a block that has a copy below can be dropped at no cost."""
        victims = (sequence.id for sequence in islice(reversed(self._book.running), _LIKELY_VICTIMS))
        self._cache.work(victims, self._clock.now_s(), is_idle=not self._book.waiting)
        self._mover.start(self._cache.outgoing())

    def _note_planning(self) -> None:
        """Note for whom the next step is planned: a sequence may be the cause of a crash before it is in a step."""
        suspect = self._planner.next_suspect
        self._record.enter(ANY_SEQ if suspect is None else suspect.id)

    def _launch(self) -> bool:
        ledger = self._cache.ledger()
        plan = self._planner.plan(ledger, self._clock.now_s(), self._order)
        self._book.defer(plan, self._clock.now_s())
        self._cache.pass_over(plan.deferred, self._clock.now_s())
        if not plan.nano_batches and not plan.preemptions and not plan.restores:
            self._record.enter(SeqId(0))
            return False
        step = self._cache.seal(plan, ledger, self._launched + 1)
        if plan.nano_batches:
            self._record.launch(step.step, whole_slices(step.nano_batches))
        self._record.enter(SeqId(0))
        if plan.nano_batches:
            self._flights.append(self._take_off(step))
            self._launched += 1
            self._started_s.append(self._clock.now_s())
        else:
            self._cache.keep_mail(step)
        self._mover.start(step.transfers)
        self._book.launch(plan, self._clock.now_s())
        self._allow()
        if plan.nano_batches and isinstance(self._flights[-1], RefusedFlight):
            # The runner may not have come to the tables. To send them twice does no harm.
            self._cache.keep_mail(step)
            # No step may follow: it would start from the tokens and rows that half a step has left.
            while self._flights:
                self._commit(self._flights.popleft())
        return bool(plan.nano_batches)

    def _take_off(self, step: StepPlan) -> Flight:
        try:
            return self._runner.launch(step)
        except DeviceError as error:
            return RefusedFlight(step, error)

    def _is_blamed(self, step: int, batches: Sequence[NanoBatch], error: DeviceError) -> bool:
        """Return whether a sequence of the failed step may be the cause; its sequences then run alone.

        No sequence is blamed for a shortage of device memory while smaller forwards may help.
        """
        if isinstance(error, OutOfDeviceMemoryError):
            return not self._relief.shrink(step, batches, error)
        log.error("step failed step=%d error=%s", step, error, exc_info=error)
        return True

    def _fail_alone(self, seq: SeqId, error: DeviceError) -> None:
        """End the only sequence of a failed step: no other request can be the cause."""
        if isinstance(error, OutOfDeviceMemoryError):
            self._relief.clear()
            self._end(seq, FinishReason.ERROR, NO_MEMORY)
        else:
            self._end(seq, FinishReason.ERROR, "the engine failed on this request")

    def _refill_rows(self, seqs: list[SeqId]) -> None:
        """Have the runner fill the rows of these sequences again, because they differ from the books."""
        self._runner.forget(seqs)
        for seq in seqs:
            self._cache.resend(seq)

    def _commit(self, flight: Flight) -> None:
        try:
            outcome = flight.result()
        except DeviceError as error:
            self._void(flight, error)
            return
        if outcome.bad or outcome.failures:
            self._fail_rows(flight.plan, outcome)
        now_s = self._clock.now_s()
        self._book.settle(now_s - max(self._started_s.popleft(), self._committed_s), now_s)
        self._committed_s = now_s
        for back in self._book.preemption_book.take_returned():
            self._book.preemption_book.record_return(back, self._cache.copied_s(back.seq))
        for report in self._prompts.take(outcome.prompts):
            self._post.post(report)
        commit = self._book.commit(flight.plan.nano_batches, outcome.tokens, now_s)
        self._cache.commit(flight.plan.step, commit.progress)
        self._relief.step_ended()
        commit.finished = [self._close(finished) for finished in commit.finished]
        self.gauges.count_step(len(flight.plan.nano_batches))
        self._reporter.report(commit, outcome)
        self._record.end(flight.plan.step)
        self._allow()

    def _allow(self) -> None:
        """Note how long the steps in flight may take."""
        self._record.allow(max(self._stall_s, _PREDICTED_TIMES * self._book.policy.in_flight_ms / 1e3))

    def _void(self, failed: Flight, error: DeviceError) -> None:
        """Void a failed step and every step launched after it; the failed step's sequences become suspects."""
        is_blamed = self._is_blamed(failed.plan.step, failed.plan.nano_batches, error)
        now_s = self._clock.now_s()
        self._started_s.clear()
        self._book.settle(0.0, now_s)
        suspects = self._book.void(failed.plan.nano_batches, now_s, is_suspect=is_blamed)
        known = set(suspects)
        self._cache.end(failed.plan.step)
        self._record.end(failed.plan.step)
        while self._flights:
            behind = self._flights.popleft()
            try:
                behind.result()
            except DeviceError as exc:
                log.error("step behind it failed too step=%d error=%s", behind.plan.step, exc)
            self._book.settle(0.0, now_s)
            known.update(self._book.void(behind.plan.nano_batches, now_s, is_suspect=False))
            self._cache.end(behind.plan.step)
            self._record.end(behind.plan.step)
        if is_blamed and len(suspects) == 1 and len(whole_slices(failed.plan.nano_batches)) == 1:
            known.discard(suspects[0])
            self._fail_alone(suspects[0], error)
        self._refill_rows(list(known))

    def _fail_rows(self, plan: StepPlan, outcome: StepOutcome) -> None:
        slices = (piece for batch in plan.nano_batches for piece in batch.slices)
        sampling = [piece.seq for piece in slices for _ in range(piece.num_sampled)]
        errors = [(index, BAD_LOGITS) for index in outcome.bad]
        errors += outcome.failures
        for index, error in errors:
            if sampling[index] in self._book:
                self._end(sampling[index], FinishReason.ERROR, error)
