"""The reports of the loop to the HTTP process. Imports no torch."""

from array import array
from typing import Protocol

from tiercel.engine.fairness_survey import FairnessSurvey
from tiercel.engine.gauges import GaugeReader
from tiercel.scheduler.book import Commit, SequenceBook
from tiercel.values.clock import Clock
from tiercel.values.outcome import Finished, StepOutcome
from tiercel.wire.frames import Report

_FULL_INTERVAL_S = 0.25  # between two reports with the gauges of every tier and route


class Post(Protocol):
    """Takes the reports of steps."""

    def post(self, message: Report) -> None: ...


class Reporter:
    """Posts the outcome of each step, and gauges between requests."""

    def __init__(
        self, book: SequenceBook, gauges: GaugeReader, survey: FairnessSurvey, post: Post, clock: Clock
    ) -> None:
        self._book = book
        self._gauges = gauges
        self._survey = survey
        self._post = post
        self._clock = clock
        self._finished: list[Finished] = []  # ended outside a commit; posted with the next report
        self._full_s = 0.0  # time of the last full report
        self._posted: object = None  # tiers, routes and the disk's state as last posted between requests

    @property
    def has_finished(self) -> bool:
        """Whether the end of a sequence has not been reported yet."""
        return bool(self._finished)

    def add_finished(self, finished: Finished) -> None:
        """Note the end of a sequence for the next report."""
        self._finished.append(finished)

    def report(self, commit: Commit, outcome: StepOutcome) -> None:
        """Post the tokens and the ends of a step, and the ends noted since the last report."""
        said = commit.sampled
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
                gauges=self._gauges.read(commit.prompt_tokens + len(said), is_full=self._is_full_due()),
            )
        )

    def report_changes(self) -> None:
        """Post gauges between requests, if copies have changed them or a fairness survey has ended."""
        now_s = self._clock.now_s()
        if now_s - self._full_s < _FULL_INTERVAL_S:
            return
        self._full_s = now_s
        has_survey = self._survey.has_result
        gauges = self._gauges.read()
        current = gauges.tiers, gauges.routes, gauges.disk_state
        if has_survey or current != self._posted:
            self._post.post(Report(gauges=gauges))
        self._posted = current

    def _is_full_due(self) -> bool:
        """Whether to report tiers and routes: every 0.25 s, and when the last sequence has ended."""
        now_s = self._clock.now_s()
        if now_s - self._full_s < _FULL_INTERVAL_S and len(self._book):
            return False
        self._full_s = now_s
        return True
