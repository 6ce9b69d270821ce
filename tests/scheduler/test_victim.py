"""Who gives way first, and when nobody does."""

from tiercel.ids import SeqId, TenantId
from tiercel.scheduler.account import Account
from tiercel.scheduler.preemption_limiter import PreemptionLimiter, StarvationCounter
from tiercel.scheduler.victim import VictimCandidate, victims


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


def test_the_lowest_band_gives_way_first_then_batch_then_the_deepest_debt_then_the_gain_then_the_newest() -> None:
    assert order(holder(1, is_batch=True), holder(2, band=1)) == [2, 1]
    assert order(holder(1, tenant="b"), holder(2, is_batch=True), leads={"b": 9.0}) == [2, 1]
    assert order(holder(1), holder(2, tenant="b"), leads={"b": 9.0}, gains={1: 5.0}) == [2, 1]
    assert order(holder(1, admitted=9), holder(2), gains={2: 5.0}) == [2, 1]
    assert order(holder(1, admitted=1), holder(2, admitted=2)) == [2, 1]


def test_the_gain_is_asked_for_only_where_it_decides() -> None:
    asked: list[int] = []

    def gain(seq: SeqId) -> float:
        asked.append(seq)
        return 0.0

    running = [holder(1, band=1), holder(2, admitted=1), holder(3)]
    walk = victims(running, lambda account: 0.0, gain)
    assert next(walk) == 1
    assert asked == []
    assert list(walk) == [2, 3]
    assert sorted(asked) == [2, 3]


def test_who_resumed_just_now_stays() -> None:
    running = [holder(1, tokens=15), holder(2, tokens=16)]
    assert list(victims(running, lambda account: 0.0, lambda seq: 0.0)) == [2]
    assert sorted(victims(running, lambda account: 0.0, lambda seq: 0.0, least_tokens=0)) == [1, 2]


def test_two_switches_a_step() -> None:
    brake = PreemptionLimiter()
    for _ in range(2):
        assert brake.may_preempt()
        brake.preempt(spills=False)
    assert not brake.may_preempt()
    assert not brake.may_restore()


def test_no_restore_beside_a_spill() -> None:
    brake = PreemptionLimiter()
    brake.preempt(spills=False)
    assert brake.may_restore()
    brake.preempt(spills=True)
    assert not brake.may_restore()


def test_the_brake_never_stops_the_machine() -> None:
    brake = PreemptionLimiter(is_void=True)
    brake.preempt(spills=True)
    brake.preempt(spills=True)
    assert brake.may_preempt()
    assert brake.may_restore()
    brake.restore()
    assert PreemptionLimiter(is_void=True, most=0).may_preempt()


def test_the_first_in_rank_goes_hungry_for_so_many_steps_only() -> None:
    hunger = StarvationCounter(most_steps=3)
    for _ in range(3):
        assert not hunger.is_void
        hunger.step(was_served=False)
    assert hunger.is_void
    hunger.step(was_served=True)
    assert not hunger.is_void
    hunger.step(was_served=False)
    assert not hunger.is_void
