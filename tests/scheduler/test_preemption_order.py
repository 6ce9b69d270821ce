"""The order of victims, and the limits on preemptions per step."""

from tiercel.scheduler.account import Account
from tiercel.scheduler.preemption_limiter import PreemptionLimiter, StarvationCounter
from tiercel.scheduler.preemption_order import VictimCandidate, victims
from tiercel.values.ids import SeqId, TenantId


def holder(
    seq: int, *, tenant: str = "a", band: int = 0, is_batch: bool = False, admitted: int = 0, tokens: int = 99
) -> VictimCandidate:
    return VictimCandidate(SeqId(seq), Account(band, TenantId(tenant)), is_batch, admitted, tokens)


def order(
    *holders: VictimCandidate, leads: dict[str, float] | None = None, gains: dict[int, float] | None = None
) -> list[int]:
    return list(
        victims(
            holders,
            lambda account: (leads or {}).get(account.tenant, 0.0),
            lambda seq: (gains or {}).get(seq, 0.0),
        )
    )


def test_victims_are_ordered_by_band_class_lead_gain_and_age() -> None:
    assert order(holder(1, is_batch=True), holder(2, band=1)) == [2, 1]
    assert order(holder(1, tenant="b"), holder(2, is_batch=True), leads={"b": 9.0}) == [2, 1]
    assert order(holder(1), holder(2, tenant="b"), leads={"b": 9.0}, gains={1: 5.0}) == [2, 1]
    assert order(holder(1, admitted=9), holder(2), gains={2: 5.0}) == [2, 1]
    assert order(holder(1, admitted=1), holder(2, admitted=2)) == [2, 1]


def test_the_gain_is_computed_only_if_it_decides() -> None:
    computed: list[int] = []

    def gain(seq: SeqId) -> float:
        computed.append(seq)
        return 0.0

    running = [holder(1, band=1), holder(2, admitted=1), holder(3)]
    walk = victims(running, lambda account: 0.0, gain)
    assert next(walk) == 1
    assert computed == []
    assert list(walk) == [2, 3]
    assert sorted(computed) == [2, 3]


def test_a_sequence_that_has_just_resumed_is_not_preempted() -> None:
    running = [holder(1, tokens=15), holder(2, tokens=16)]
    assert list(victims(running, lambda account: 0.0, lambda seq: 0.0)) == [2]
    assert sorted(victims(running, lambda account: 0.0, lambda seq: 0.0, min_tokens=0)) == [1, 2]


def test_two_preemptions_per_step_are_allowed() -> None:
    limiter = PreemptionLimiter()
    for _ in range(2):
        assert limiter.may_preempt()
        limiter.preempt(spills=False)
    assert not limiter.may_preempt()
    assert not limiter.may_restore()


def test_no_restore_is_allowed_in_a_step_that_spills() -> None:
    limiter = PreemptionLimiter()
    limiter.preempt(spills=False)
    assert limiter.may_restore()
    limiter.preempt(spills=True)
    assert not limiter.may_restore()


def test_lifted_limits_allow_everything() -> None:
    limiter = PreemptionLimiter(is_lifted=True)
    limiter.preempt(spills=True)
    limiter.preempt(spills=True)
    assert limiter.may_preempt()
    assert limiter.may_restore()
    limiter.restore()
    assert PreemptionLimiter(is_lifted=True, max_switches=0).may_preempt()


def test_the_counter_starves_after_its_limit_and_is_reset_by_service() -> None:
    counter = StarvationCounter(max_steps=3)
    for _ in range(3):
        assert not counter.is_starving
        counter.step(was_served=False)
    assert counter.is_starving
    counter.step(was_served=True)
    assert not counter.is_starving
    counter.step(was_served=False)
    assert not counter.is_starving
