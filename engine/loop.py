"""The loop: carries plans to the machine and facts back to the books. Imports no torch."""

import logging
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from tiercel.clock import Clock
from tiercel.engine.errands import Errands
from tiercel.engine.lookahead import Lookahead
from tiercel.engine.relief import NO_MEMORY, Relief
from tiercel.errors import DeviceError, InvariantError, OutOfDeviceMemoryError
from tiercel.ids import SeqId
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.table import NO_REUSE
from tiercel.outcome import BAD_LOGITS, DiskState, Finished, FinishReason, Gauges, RouteGauges, StepOutcome
from tiercel.plan import NanoBatch, StepPlan, whole_slices
from tiercel.request import Request
from tiercel.scheduler.book import Commit, SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.settings import EngineSettings
from tiercel.tenant import Tenants
from tiercel.tier import Landing, Transfer
from tiercel.wire import Abort, Quit, Report, SetSettings, SetTenants, Start, Submit, ToEngine

log = logging.getLogger(__name__)

_FULL_EVERY_S = 0.25  # between two reports with every tier and route
_MOST_SEQUENCES = 64  # told one by one
_LIKELY_VICTIMS = 8  # running sequences whose blocks are written back first


class Flight(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...
    def result(self) -> StepOutcome: ...


class RefusedFlight:
    """A step that the device did not take as a whole. A part of it may run, so it is a launched step that fails."""

    def __init__(self, plan: StepPlan, error: DeviceError) -> None:
        self.plan = plan
        self._error = error

    def result(self) -> StepOutcome:
        """Errors: what the launch raised."""
        raise self._error


class StepRunner(Protocol):
    """Launches sealed steps. The seam to every device, also to a simulated one."""

    def launch(self, plan: StepPlan) -> Flight: ...
    def forget(self, seqs: Iterable[SeqId]) -> None: ...


class Mover(Protocol):
    """Carries blocks between tiers. The seam to copy engines and disks, also to simulated ones."""

    def start(self, transfers: Iterable[Transfer]) -> None: ...
    def poll(self) -> list[Landing]: ...
    def gauges(self) -> tuple[RouteGauges, ...]: ...


class NoMover:
    """The mover of an engine with one tier."""

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Errors: InvariantError: there is no other tier."""
        for transfer in transfers:
            raise InvariantError("mover.none", transfer=transfer.id)

    def poll(self) -> list[Landing]:
        """Nothing ever flies."""
        return []

    def gauges(self) -> tuple[RouteGauges, ...]:
        """No routes."""
        return ()


class Steers(Protocol):
    """Who acts on settings that change while the engine runs."""

    def steer(self, settings: EngineSettings, now_s: float) -> None: ...


class Post(Protocol):
    """Where reports go."""

    def post(self, message: Report) -> None: ...


class EngineLoop:
    """One step: mail, landings, plan, seal, launch, start transfers, commit the step before, post.

    `depth` steps are launched ahead of the commit: 1 overlaps planning with computing, 0 is synchronous. Where steps
    are to yield (`StepLimits.yield_ms`), nothing is planned while a long one runs.
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
        relief: Relief | None = None,
    ) -> None:
        self._book = book
        self._cache = cache
        self._planner = planner
        self._runner = runner
        self._post = post
        self._clock = clock
        self._depth = depth
        self._mover = mover or NoMover()
        self._steering = steering
        self._relief = relief or Relief(planner)
        self._lookahead = Lookahead()
        self._flights: deque[Flight] = deque()
        self._launched = 0  # steps
        self._committed = 0  # steps that ended well
        self._nano_batches = 0  # of those steps
        self._started_s: deque[float] = deque()  # launches of the steps in flight
        self._committed_s = 0.0  # the last commit: the device was busy until then
        self._order: tuple[SeqId, ...] = ()  # who waits, drawn once a step: for prefetch, and published with the plan
        self._finished: list[Finished] = []  # ended outside a commit; posted with the next report
        self.disk_state = DiskState.NONE  # whoever looks after the disk writes it
        self._full_s = 0.0
        self._told: object = None  # tiers, routes and the disk's state, as last told between requests
        self._errands = Errands(book, cache)
        self.has_quit = False
        self.quit_patience_s = 0.0  # to persist what lies in memory

    @property
    def book(self) -> SequenceBook:
        """The sequences that the loop serves. Between two steps priorities may be moved."""
        return self._book

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or flies."""
        return not self._flights and not len(self._book)

    @property
    def has_chores(self) -> bool:
        """Something flies between tiers, or would if it were given time."""
        return self._cache.idle.is_busy

    @property
    def has_unsaved(self) -> bool:
        """The disk could be given something that it does not have."""
        return self._cache.idle.has_unsaved

    def take(self, messages: Iterable[ToEngine]) -> None:
        """Act on mail."""
        for message in messages:
            match message:
                case Submit(request):
                    self._submit(request)
                case Abort(seqs, reason):
                    for seq in seqs:
                        if seq in self._book:
                            self._end(seq, reason)
                case Quit(patience_s):
                    self.has_quit = True
                    self.quit_patience_s = patience_s
                case SetTenants(tenants):
                    self._set_tenants(tenants)
                case SetSettings(version, settings):
                    self._set_settings(version, settings)
                case Start():
                    log.warning("second start frame ignored")

    def step(self) -> bool:
        """Plan and launch one step ahead, then commit the oldest. False when there was nothing to do.

        A long step is waited for and committed at once: the next one is planned from the mail that has come until then.
        """
        began_s, is_alone = self._clock.now_s(), not self._flights
        self._land()
        is_launched = self._launch()
        if is_launched:
            self._lookahead.launched(self._clock.now_s() - began_s, is_alone=is_alone)
        depth = 0 if is_launched and self._is_long() else self._depth
        has_more = self._errands.go_on() or self._cache.has_more
        self._do_chores()
        is_committed = False
        while self._flights and (len(self._flights) > depth or not is_launched):
            self._commit(self._flights.popleft())
            is_committed = True
            if not is_launched:
                break
        if is_committed:
            return True
        if self._finished:
            self._report(Commit(), StepOutcome(()))
        elif not is_launched:
            self._tell_of_chores()
        return is_launched or has_more

    def _is_long(self) -> bool:
        """Whether the step launched last is to end before another one is planned."""
        return bool(self._planner.limits.yield_ms) and self._lookahead.is_long(self._book.policy.launched_ms)

    def check_integrity(self) -> None:
        """Every book agrees with itself and with the others. Errors: InvariantError."""
        self._book.check_integrity()
        self._cache.check_integrity()

    def _set_tenants(self, tenants: Tenants) -> None:
        self._errands.reload(tenants, self._clock.now_s())

    def _set_settings(self, version: int, settings: EngineSettings) -> None:
        if self._steering is not None:
            self._steering.steer(settings, self._clock.now_s())
            log.info("settings set version=%d policy=%s", version, settings.scheduling_policy)

    def _submit(self, request: Request) -> None:
        now_s = self._clock.now_s()
        near_tokens = self._cache.peek(request.prompt + request.outputs, request.scope)
        quota, block_size = self._cache.quota_blocks(request.tenant), self._cache.block_size
        # The KV of its last token is never computed.
        most_tokens = None if quota is None else quota * block_size + 1
        sequence = self._book.add(request, now_s, near_tokens, most_tokens)
        self._cache.open(request.id, sequence.tokens, request.scope, request.tenant)
        blocks = -(-(sequence.limit - 1) // block_size)
        # The HTTP process refuses such requests with a better answer; here they must only never be waited for.
        if blocks > self._cache.blocks:
            self._end(request.id, FinishReason.ERROR, f"needs {blocks} KV blocks, the pool has {self._cache.blocks}")
        elif most_tokens is not None and sequence.num_tokens >= most_tokens:
            blocks = -(-sequence.num_tokens // block_size)
            error = f"the prompt needs {blocks} KV blocks, kv_quota_bytes.hbm of its tenant allows {quota}"
            self._end(request.id, FinishReason.ERROR, error)
        elif not sequence.num_prompt or sequence.num_tokens >= sequence.limit:
            self._end(request.id, FinishReason.ERROR, "there is nothing to compute")

    def _end(self, seq: SeqId, reason: FinishReason, error: str | None = None) -> None:
        self._finished.append(self._close(self._book.finish(seq, reason, self._clock.now_s(), error=error)))

    def _close(self, finished: Finished) -> Finished:
        """The cache forgets the sequence, too; what lower tiers have brought it is told with its end."""
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
        """Book what has come, and bring near what the first of those that wait will need."""
        for seq, tokens in self._cache.land(self._mover.poll()):
            self._book.restored(seq, tokens)
        self._order = self._planner.order(self._clock.now_s())
        self._cache.expect(self._order)

    def _do_chores(self) -> None:
        """Copies for nobody in particular, likely victims first: what is clean can be dropped for free."""
        victims = (sequence.id for sequence in islice(reversed(self._book.running), _LIKELY_VICTIMS))
        self._cache.work(victims, self._clock.now_s(), is_idle=not self._book.waiting)
        self._mover.start(self._cache.outgoing())

    def _launch(self) -> bool:
        ledger = self._cache.ledger()
        plan = self._planner.plan(ledger, self._clock.now_s(), self._order)
        self._book.defer(plan, self._clock.now_s())
        self._cache.pass_over(plan.deferred, self._clock.now_s())
        if not plan.nano_batches and not plan.victims and not plan.restores:
            return False
        step = self._cache.seal(plan, ledger, self._launched + 1)
        if plan.nano_batches:
            self._flights.append(self._take_off(step))
            self._launched += 1
            self._started_s.append(self._clock.now_s())
        else:
            self._cache.keep_mail(step)
        self._mover.start(step.transfers)
        self._book.launch(plan, self._clock.now_s())
        if plan.nano_batches and isinstance(self._flights[-1], RefusedFlight):
            # Nothing goes behind it: it would start from tokens and rows that half a step has left.
            while self._flights:
                self._commit(self._flights.popleft())
        return bool(plan.nano_batches)

    def _take_off(self, step: StepPlan) -> Flight:
        try:
            return self._runner.launch(step)
        except DeviceError as error:
            return RefusedFlight(step, error)

    def _is_blamed(self, step: int, batches: Sequence[NanoBatch], error: DeviceError) -> bool:
        """Whether one of its sequences may have broken a step: they run alone from now on.

        Not where memory was short and smaller forwards may help.
        """
        if isinstance(error, OutOfDeviceMemoryError):
            return not self._relief.shrink(step, batches, error)
        log.error("step failed step=%d error=%s", step, error, exc_info=error)
        return True

    def _fail_alone(self, seq: SeqId, error: DeviceError) -> None:
        """It was alone: no other request can have broken the step."""
        if isinstance(error, OutOfDeviceMemoryError):
            self._relief.clear()
            self._end(seq, FinishReason.ERROR, NO_MEMORY)
        else:
            self._end(seq, FinishReason.ERROR, "the engine failed on this request")

    def _refill_rows(self, seqs: list[SeqId]) -> None:
        """What the runner keeps of these sequences is not what the books say: it gets it anew."""
        self._runner.forget(seqs)
        for seq in seqs:
            self._cache.resend(seq)

    def _commit(self, flight: Flight) -> None:
        try:
            outcome = flight.result()
        except DeviceError as error:
            self._void(flight, error)
            return
        if outcome.bad:
            self._fail_bad(flight.plan, outcome.bad)
        now_s = self._clock.now_s()
        self._book.settle(now_s - max(self._started_s.popleft(), self._committed_s), now_s)
        self._committed_s = now_s
        for back in self._book.preemption_book.take_returned():
            self._book.preemption_book.note(back, self._cache.copied_s(back.seq))
        commit = self._book.commit(flight.plan.nano_batches, outcome.tokens, now_s)
        self._cache.commit(flight.plan.step, commit.progress)
        self._relief.step_ended()
        commit.finished = [self._close(finished) for finished in commit.finished]
        self._committed += 1
        self._nano_batches += len(flight.plan.nano_batches)
        self._report(commit, outcome)

    def _void(self, failed: Flight, error: DeviceError) -> None:
        """The step failed: void it and every step launched behind it; its sequences are suspects."""
        is_blamed = self._is_blamed(failed.plan.step, failed.plan.nano_batches, error)
        now_s = self._clock.now_s()
        self._started_s.clear()
        self._book.settle(0.0, now_s)
        suspects = self._book.void(failed.plan.nano_batches, now_s, is_suspect=is_blamed)
        known = set(suspects)
        self._cache.end(failed.plan.step)
        while self._flights:
            behind = self._flights.popleft()
            try:
                behind.result()
            except DeviceError as exc:
                log.error("step behind it failed too step=%d error=%s", behind.plan.step, exc)
            self._book.settle(0.0, now_s)
            known.update(self._book.void(behind.plan.nano_batches, now_s, is_suspect=False))
            self._cache.end(behind.plan.step)
        if is_blamed and len(suspects) == 1 and len(whole_slices(failed.plan.nano_batches)) == 1:
            known.discard(suspects[0])
            self._fail_alone(suspects[0], error)
        self._refill_rows(list(known))

    def _fail_bad(self, plan: StepPlan, bad: tuple[int, ...]) -> None:
        sampling = [piece.seq for batch in plan.nano_batches for piece in batch.slices if piece.samples]
        for index in bad:
            if sampling[index] in self._book:
                self._end(sampling[index], FinishReason.ERROR, BAD_LOGITS)

    def _report(self, commit: Commit, outcome: StepOutcome) -> None:
        said = commit.said
        logprobs = outcome.logprobs
        if logprobs:
            known = {seq for seq, _ in said}
            logprobs = tuple(found for found in logprobs if found.seq in known)
        finished = (*self._finished, *commit.finished)
        self._finished.clear()
        self._post.post(
            Report(
                seqs=array("Q", [seq for seq, _ in said]).tobytes(),
                tokens=array("I", [token for _, token in said]).tobytes(),
                logprobs=logprobs,
                firsts=tuple(commit.firsts),
                finished=finished,
                gauges=self.gauges(commit.prompt_tokens + len(said), is_full=self._is_full_due()),
            )
        )

    def _is_full_due(self) -> bool:
        """Tiers and routes are told now and then, and when the last sequence has ended."""
        now_s = self._clock.now_s()
        if now_s - self._full_s < _FULL_EVERY_S and len(self._book):
            return False
        self._full_s = now_s
        return True

    def _tell_of_chores(self) -> None:
        """Between requests, too, the HTTP process hears now and then what has been copied."""
        if self._clock.now_s() - self._full_s < _FULL_EVERY_S:
            return
        self._full_s = self._clock.now_s()
        is_found = self._errands.has_standing
        gauges = self.gauges()
        if is_found or (gauges.tiers, gauges.routes, gauges.disk_state) != self._told:
            self._post.post(Report(gauges=gauges))
        self._told = gauges.tiers, gauges.routes, gauges.disk_state

    def gauges(self, step_tokens: int = 0, *, is_full: bool = True) -> Gauges:
        """The books in numbers; with `is_full` tier by tier and route by route, too."""
        return Gauges(
            num_running=len(self._book.running),
            num_waiting=len(self._book) - len(self._book.running),
            num_preempted=self._book.num_preempted,
            blocks_total=self._cache.blocks,
            blocks_used=self._cache.blocks_used,
            blocks_cached=self._cache.blocks_cached,
            step_tokens=step_tokens,
            prefix_queries=self._cache.prefix_queries,
            prefix_hits=self._cache.prefix_hits,
            preemptions=self._book.num_preemptions,
            preemptions_swap=self._book.num_swapped,
            preemptions_recompute=self._book.num_preemptions - self._book.num_swapped,
            swapped_tokens=self._cache.swapped_tokens,
            recomputed_tokens=self._book.recomputed_tokens,
            steps=self._committed,
            nano_batches=self._nano_batches,
            out_of_memory=self._relief.num_shortages,
            tiers=self._cache.tier_gauges() if is_full else (),
            routes=self._mover.gauges() if is_full else (),
            disk_state=self.disk_state,
            switches=self._book.preemption_book.gauges(),
            sequences=self._book.gauges(_MOST_SEQUENCES) if is_full else (),
            preemptions_by_reason=dict(self._book.preemptions_by_reason),
            fair=self._errands.standing(self._clock.now_s()) if is_full else None,
        )
