"""The token bucket of a rate limit."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiercel.server.tenancy.rate_bucket import RateBucket, show_wait

_gaps = st.floats(0, 90, allow_nan=False)
_takes = st.lists(st.tuples(_gaps, st.integers(1, 40)), max_size=60)


@given(st.integers(1, 60), _takes)
def test_no_window_passes_more_than_a_full_bucket_and_its_refill(limit: int, takes: list[tuple[float, int]]) -> None:
    bucket, now_s = RateBucket(limit), 100.0
    passed: list[tuple[float, int]] = []
    for gap_s, amount in takes:
        now_s += gap_s
        if bucket.take(amount, now_s):
            passed.append((now_s, amount))
        assert -1e-3 <= bucket.left(now_s) <= limit
    for first, (start_s, _) in enumerate(passed):
        total = 0
        for end_s, amount in passed[first:]:
            total += amount
            assert total <= limit + limit * (end_s - start_s) / 60 + 1e-3


@given(st.integers(1, 60), _takes)
def test_it_agrees_with_a_plain_bucket(limit: int, takes: list[tuple[float, int]]) -> None:
    bucket, now_s, level = RateBucket(limit), 5.0, float(limit)
    for gap_s, amount in takes:
        now_s += gap_s
        level = min(level + gap_s * limit / 60, limit)
        if abs(level - amount) < 1e-3:
            continue  # too close to call in floating point
        assert bucket.left(now_s) == pytest.approx(level, abs=1e-3)
        is_taken = bucket.take(amount, now_s)
        assert is_taken == (level > amount)
        level -= amount if is_taken else 0


@given(st.integers(1, 60), _takes, st.integers(1, 60))
@example(26, [(1.297417896479475, 22)], 11)  # rounding once refused the request after the announced wait
def test_the_reported_wait_is_sufficient_and_minimal(limit: int, takes: list[tuple[float, int]], asked: int) -> None:
    bucket, now_s = RateBucket(limit), 0.0
    for gap_s, amount in takes:
        now_s += gap_s
        bucket.take(amount, now_s)
    wait_s = bucket.wait_s(asked, now_s)
    if asked > limit:
        assert wait_s == math.inf
        return
    if wait_s > 0.01:
        assert not bucket.take(asked, now_s + wait_s - 0.01)
    assert bucket.take(asked, now_s + wait_s)


def test_returned_tokens_refill_the_bucket_up_to_its_capacity() -> None:
    bucket = RateBucket(60)
    assert bucket.take(60, 0.0)
    bucket.settle(-20, 0.0)
    assert bucket.left(0.0) == pytest.approx(20)
    bucket.settle(-1000, 0.0)
    assert bucket.left(0.0) == pytest.approx(60)


def test_it_can_be_overdrawn_by_a_minute_at_most() -> None:
    bucket = RateBucket(60)
    bucket.settle(1_000_000, 0.0)
    assert bucket.left(0.0) == pytest.approx(-60)
    assert bucket.wait_s(1, 0.0) == pytest.approx(61)
    assert bucket.full_s(0.0) == pytest.approx(120)


def test_another_limit_finds_it_as_full_as_before() -> None:
    bucket = RateBucket(60)
    bucket.take(45, 0.0)
    bucket.change(600, 0.0)
    assert bucket.left(0.0) == pytest.approx(150)
    assert bucket.per_minute == 600


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-1, "0s"), (0.0171, "18ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (60, "1m0s"), (360, "6m0s"),
     (90.951, "1m30.951s"), (3603, "1h0m3s")],
)  # fmt: skip
def test_waits_are_spelled_as_openai_spells_them(seconds: float, text: str) -> None:
    assert show_wait(seconds) == text
