"""The admission queue."""

import pytest

from tiercel.clock import ManualClock
from tiercel.errors import AdmissionError
from tiercel.ids import TenantId
from tiercel.server.tenancy.admission import Admission
from tiercel.server.tenancy.usage import UsageBook


class EngineQueue:
    """The queue state that the engine client reports."""

    def __init__(self) -> None:
        self.num_tokenless = 0
        self.num_started = 0


class Counter:
    """Refusals by reason."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        raise AssertionError(f"{tenant} has no {reason}")


def _admission(max_queued: int = 4) -> tuple[Admission, EngineQueue, Counter, ManualClock]:
    queue, counter, clock = EngineQueue(), Counter(), ManualClock()
    return Admission(queue, counter, clock, UsageBook(clock), max_queued=max_queued), queue, counter, clock


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


def test_retry_after_follows_the_rate_at_which_the_queue_drains() -> None:
    admission, queue, _, clock = _admission(10_000)
    queue.num_tokenless, queue.num_started = 10_000, 0
    clock.advance(10)
    queue.num_started = 5  # one in two seconds
    with pytest.raises(AdmissionError) as refusal, admission.enter(choices=4):
        pass
    assert refusal.value.retry_after_s == 8
    with pytest.raises(AdmissionError) as late, admission.enter(choices=10_000):
        pass
    assert late.value.retry_after_s == 60


def test_a_request_that_never_fits_is_refused_without_retry() -> None:
    admission, _, counter, _ = _admission(4)
    words = r"6 sequences \(n=2 for each of 3 prompts\).* holds 4"
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
