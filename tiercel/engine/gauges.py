"""The gauges of a report: the books of the engine in numbers. Imports no torch."""

from collections.abc import Callable

from tiercel.engine.fairness_survey import FairnessSurvey
from tiercel.engine.step.memory_relief import MemoryRelief
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.values.clock import Clock
from tiercel.values.outcome import DiskState, ExpertGauges, Gauges, GrammarGauges, RouteGauges

_MAX_SEQUENCES = 64  # in one report


class GaugeReader:
    """Reads the gauges of one engine, and counts the steps that its loop has committed."""

    def __init__(
        self,
        book: SequenceBook,
        cache: CacheManager,
        relief: MemoryRelief,
        survey: FairnessSurvey,
        routes: Callable[[], tuple[RouteGauges, ...]],
        disk_state: Callable[[], DiskState],
        clock: Clock,
        threads: Callable[[], int] = lambda: 0,
        grammars: Callable[[], GrammarGauges] = GrammarGauges,
        experts: Callable[[], ExpertGauges] = ExpertGauges,
    ) -> None:
        """`threads`: returns the number of threads that compute together; 0 if the device is no CPU.

        `experts`: returns the counters of experts that are partly in memory.
        """
        self.num_steps = 0  # committed since the start; steps that failed do not count
        self._num_nano_batches = 0  # of those steps
        self._book = book
        self._cache = cache
        self._relief = relief
        self._survey = survey
        self._routes = routes
        self._disk_state = disk_state
        self._clock = clock
        self._threads = threads
        self._grammars = grammars
        self._experts = experts

    def count_step(self, nano_batches: int) -> None:
        """Count a committed step."""
        self.num_steps += 1
        self._num_nano_batches += nano_batches

    def read(self, step_tokens: int = 0, *, is_full: bool = True) -> Gauges:
        """Return the gauges; `is_full` adds those of every tier, route, sequence and tenant."""
        book, cache = self._book, self._cache
        return Gauges(
            num_running=len(book.running),
            num_waiting=len(book) - len(book.running),
            num_preempted=book.num_preempted,
            blocks_total=cache.blocks,
            blocks_used=cache.blocks_used,
            blocks_cached=cache.blocks_cached,
            step_tokens=step_tokens,
            prefix_queries=cache.prefix_queries,
            prefix_hits=cache.prefix_hits,
            preemptions=book.preemption_counts.total,
            preemptions_swap=book.preemption_counts.num_swaps,
            preemptions_recompute=book.preemption_counts.total - book.preemption_counts.num_swaps,
            swapped_tokens=cache.swapped_tokens,
            recomputed_tokens=book.recomputed_tokens,
            steps=self.num_steps,
            nano_batches=self._num_nano_batches,
            out_of_memory=self._relief.num_shortages,
            drafts=book.speculation.drafts,
            proposed_tokens=book.speculation.proposed,
            accepted_tokens=book.speculation.accepted,
            threads=self._threads(),
            tiers=cache.tier_gauges() if is_full else (),
            routes=self._routes() if is_full else (),
            disk_state=self._disk_state(),
            switches=book.preemption_book.gauges(),
            sequences=book.gauges(_MAX_SEQUENCES) if is_full else (),
            preemptions_by_reason=book.preemption_counts.by_reason(),
            fair=self._survey.take(self._clock.now_s()) if is_full else None,
            grammars=self._grammars(),
            experts=self._experts(),
        )
