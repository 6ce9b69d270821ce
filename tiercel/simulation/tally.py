"""Counts that are taken while a simulation runs."""

from array import array
from collections.abc import Callable, Iterable, Sequence

from tiercel.kvcache.ledger import Ledger
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.draft import CacheView
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.simulation.histogram import LogHistogram, bucket_of
from tiercel.simulation.http import HttpProcess
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Finished, FinishReason, PreemptionCount
from tiercel.values.plan import Plan
from tiercel.values.tenant import TenantShare
from tiercel.wire.frames import Report


class TenantTally:
    """Counts of one tenant."""

    def __init__(self, share: TenantShare) -> None:
        self.share = share
        self.submitted = 0
        self.finished = 0
        self.refused = 0
        self.prompt_tokens = 0  # of finished requests
        self.cached_tokens = 0
        self.output_tokens = 0  # generated
        self.queue_s = array("d")
        self.ttft_s = array("d")
        self.gaps = LogHistogram()  # between two tokens of a sequence, seconds
        self.swapped_tokens = 0  # restored from DDR
        self.recomputed_tokens = 0
        self.starved_s = 0.0  # longest time in which one of its sequences waited without a slice

    def add(self, other: "TenantTally") -> None:
        """Add the counts of the tenant at another engine."""
        self.submitted += other.submitted
        self.finished += other.finished
        self.refused += other.refused
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.queue_s.extend(other.queue_s)
        self.ttft_s.extend(other.ttft_s)
        self.gaps.add_all(other.gaps)
        self.swapped_tokens += other.swapped_tokens
        self.recomputed_tokens += other.recomputed_tokens
        self.starved_s = max(self.starved_s, other.starved_s)


def merged_tallies(tallies: Sequence["SimTally"]) -> list[TenantTally]:
    """Return the counts of each tenant over engines. Those of one engine are its own."""
    if len(tallies) == 1:
        return list(tallies[0].by_tenant.values())
    merged: dict[TenantId, TenantTally] = {}
    for tally in tallies:
        for name, one in tally.by_tenant.items():
            merged.setdefault(name, TenantTally(one.share)).add(one)
    return list(merged.values())


class _Live:
    """One sequence that has not ended."""

    __slots__ = ("delay_s", "last_s", "tally")

    def __init__(self, tally: TenantTally) -> None:
        self.tally = tally
        self.delay_s = 0.0  # from the engine to the client, of its first token
        self.last_s = -1.0  # time of its last token


class SimTally:
    """The receiver of the loop's reports, which counts by tenant."""

    def __init__(self, shares: tuple[TenantShare, ...], clock: ManualClock) -> None:
        self.by_tenant: dict[TenantId, TenantTally] = {share.name: TenantTally(share) for share in shares}
        self.tokens = 0
        self.first_s_by_seq: dict[SeqId, float] | None = None  # set to a dict to record the TTFT of each request
        self.http: HttpProcess | None = None  # None: the client has a token at once
        # Gets every report instead of `count`, which it then calls itself.
        self.receiver: Callable[[Report], None] | None = None
        self._live: dict[int, _Live] = {}
        self._clock = clock

    @property
    def finished(self) -> int:
        """Number of requests that were answered in full."""
        return sum(tally.finished for tally in self.by_tenant.values())

    def submit(self, seq: SeqId, tenant: TenantId) -> None:
        """Count a request that is about to be submitted to the loop."""
        tally = self.by_tenant.get(tenant)
        if tally is None:
            tally = self.by_tenant[tenant] = TenantTally(TenantShare(name=tenant))
        tally.submitted += 1
        self._live[seq] = _Live(tally)

    def post(self, message: Report) -> None:
        """Take the report of a committed step."""
        if self.receiver is not None:
            self.receiver(message)
        else:
            self.count(message, self._clock.now_s())

    def count(self, message: Report, posted_s: float) -> None:
        """Count a report."""
        now_s = posted_s
        live, known_s, bucket = self._live, -1.0, 0
        http = self.http
        if http is not None:
            now_s = http.report(posted_s)
        seqs = array("Q")
        seqs.frombytes(message.seqs)
        self.tokens += len(seqs)
        for seq in seqs:
            one = live[seq]
            tally, last_s = one.tally, one.last_s
            if http is not None:
                now_s = http.token(posted_s)
            one.last_s = now_s
            tally.output_tokens += 1
            if last_s < 0:
                one.delay_s = now_s - posted_s
            else:
                if last_s != known_s or http is not None:  # most sequences got their last tokens in the same step
                    known_s, bucket = last_s, bucket_of(now_s - last_s)
                counts = tally.gaps.count_by_bucket
                counts[bucket] = counts.get(bucket, 0) + 1
        for finished in message.finished:
            self._finish(finished, now_s)

    def _finish(self, finished: Finished, now_s: float) -> None:
        one = self._live.pop(finished.seq)
        tally = one.tally
        if self.http is not None:
            self.http.end(one.last_s if one.last_s >= 0 else now_s)
        if finished.reason is not FinishReason.LENGTH:
            tally.refused += 1
            return
        tally.finished += 1
        tally.prompt_tokens += finished.num_prompt
        tally.cached_tokens += finished.num_cached
        tally.queue_s.append(finished.queued_s)
        ttft_s = finished.queued_s + finished.prefill_s + one.delay_s
        tally.ttft_s.append(ttft_s)
        if self.first_s_by_seq is not None:
            self.first_s_by_seq[finished.seq] = ttft_s


class WatchedPlanner(Planner):
    """The planner; it counts waits, restored and recomputed tokens of each plan."""

    def __init__(self, book: SequenceBook, limits: StepLimits, chooser: SwapChooser, tally: SimTally) -> None:
        super().__init__(book, limits, chooser)
        self._tally = tally
        self._sequences = book
        self._lost: set[SeqId] = set()  # preempted, and not yet computed again
        self.listener: Callable[[Plan], None] = lambda _: None  # called with every plan

    def plan(self, cache: CacheView, now_s: float = 0.0, order: tuple[SeqId, ...] | None = None) -> Plan:
        """Plan a step and count its admissions and restores."""
        plan = super().plan(cache, now_s, order)
        if plan.admitted:
            self._note_admitted(plan, now_s)
        self._lost.update(one.victim for one in plan.preemptions)
        if plan.restores and isinstance(cache, Ledger):
            for seq in plan.restores:
                tokens = cache.match_by_seq[seq].load_blocks * cache.block_size
                self._tally_of(seq).swapped_tokens += tokens
        if self._lost:
            self._note_redone(plan)
        self.listener(plan)
        return plan

    def _note_admitted(self, plan: Plan, now_s: float) -> None:
        queue = self._sequences.policy.queue
        for seq in plan.admitted:
            if seq in queue:
                tally = self._tally_of(seq)
                tally.starved_s = max(tally.starved_s, now_s - queue[seq].since_s)

    def _note_redone(self, plan: Plan) -> None:
        for batch in plan.nano_batches:
            for piece in batch.slices:
                if piece.seq in self._lost:
                    self._lost.remove(piece.seq)
                    self._tally_of(piece.seq).recomputed_tokens += max(
                        0, self._sequences[piece.seq].lost_tokens - piece.start
                    )

    def _tally_of(self, seq: SeqId) -> TenantTally:
        return self._tally.by_tenant[self._sequences[seq].request.tenant]


def preemption_table(counts: Iterable[PreemptionCount]) -> dict[str, dict[str, int]]:
    """Return the sums of the counts by reason and, for each reason, by mode."""
    table: dict[str, dict[str, int]] = {}
    for one in sorted(counts, key=lambda one: (one.reason, one.mode)):
        by_mode = table.setdefault(one.reason, {})
        by_mode[one.mode] = by_mode.get(one.mode, 0) + one.count
    return table
