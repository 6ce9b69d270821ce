"""The admission queue."""

from itertools import pairwise

import pytest

from tiercel.server.client.collector import Mailbox
from tiercel.server.client.sequences import SequenceFacts, SequenceStage, SequenceStart
from tiercel.server.tenancy.admission import Admission
from tiercel.server.tenancy.usage import UsageBook
from tiercel.values.clock import ManualClock
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId
from tiercel.values.request import SamplingParams


class EngineQueue:
    """The queue state that the engine client reports."""

    def __init__(self) -> None:
        self.num_tokenless = 0


class Counter:
    """Refusals by reason."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        raise AssertionError(f"{tenant} has no {reason}")


def _admission(max_queued: int = 4) -> tuple[Admission, EngineQueue, Counter, ManualClock]:
    return _admission_and_usages(max_queued)[:4]


def _admission_and_usages(max_queued: int) -> tuple[Admission, EngineQueue, Counter, ManualClock, UsageBook]:
    queue, counter, clock = EngineQueue(), Counter(), ManualClock()
    usages = UsageBook(clock)
    return Admission(queue, counter, clock, usages, max_queued=max_queued), queue, counter, clock, usages


def test_places_are_held_until_submission_and_given_back_after_a_failure() -> None:
    admission, _, counter, _ = _admission()
    with admission.enter(choices=3):
        with pytest.raises(AdmissionError) as refusal, admission.enter(choices=2):
            pass
        assert (refusal.value.status, refusal.value.code) == (503, "overloaded")
        with admission.enter(choices=1):
            assert admission.num_reserved == 4
    with pytest.raises(ZeroDivisionError), admission.enter(choices=4):
        raise ZeroDivisionError
    assert admission.num_reserved == 0
    assert counter.reasons == ["queue_full"]


def test_sequences_at_the_engine_count_as_queued() -> None:
    admission, queue, _, _ = _admission()
    queue.num_tokenless = 4
    with pytest.raises(AdmissionError), admission.enter(choices=1):
        pass


def _sequence(usages: UsageBook, clock: ManualClock, wait_s: float) -> None:
    """Let one sequence wait, start and end."""
    start = SequenceStart(prompt=b"", num_prompt=1, params=SamplingParams(), n=1)
    facts = SequenceFacts(start, 0, Mailbox(), clock.now_s())
    stages = (None, SequenceStage.WAITING, SequenceStage.RUNNING, SequenceStage.GONE)
    for before, stage in pairwise(stages):
        if stage is SequenceStage.RUNNING:
            clock.advance(wait_s)
        facts.stage = stage
        usages.on_moved(facts, before)


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_retry_after_follows_the_rate_at_which_the_queue_drains_and_not_the_idle_time(idle_s: float) -> None:
    admission, queue, _, clock, usages = _admission_and_usages(10_000)
    queue.num_tokenless = 10_000
    with pytest.raises(AdmissionError) as unknown, admission.enter(choices=4):
        pass
    assert unknown.value.retry_after_s == 2
    for _ in range(5):
        _sequence(usages, clock, 2.0)  # one in two seconds
        clock.advance(idle_s)
    with pytest.raises(AdmissionError) as refusal, admission.enter(choices=4):
        pass
    assert refusal.value.retry_after_s == 8
    with pytest.raises(AdmissionError) as late, admission.enter(choices=10_000):
        pass
    assert late.value.retry_after_s == 60


def test_a_request_that_never_fits_is_refused_without_retry() -> None:
    admission, _, counter, _ = _admission(4)
    words = r"6 sequences \(n=2 for each of 3 in prompt\).* holds 4"
    with pytest.raises(AdmissionError, match=words) as refusal, admission.enter(choices=2, prompts=3):
        pass
    assert (refusal.value.status, refusal.value.param, refusal.value.retry_after_s) == (400, "n", None)
    assert counter.reasons == []


def test_a_closed_admission_refuses_everything() -> None:
    admission, _, counter, _ = _admission()
    admission.close()
    with pytest.raises(AdmissionError) as refusal, admission.enter(choices=1):
        pass
    assert (refusal.value.status, refusal.value.code) == (503, "shutting_down")
    assert admission.is_closed
    assert counter.reasons == ["shutting_down"]
