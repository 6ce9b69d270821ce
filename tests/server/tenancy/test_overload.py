"""Three times what a server can do, in virtual time: the admitted keep their goal, and refusals are right."""

from functools import cache

import pytest
from msgspec.structs import replace

from tests.server.overloaded import MACHINE, Overloaded, Sent, Verdict, draw, judge
from tiercel.server.tenancy.tenants import BestEffort, Tenant
from tiercel.values.ids import TenantId
from tiercel.values.tenant import PolicyName, Slo, TenantShare

GOAL_S = 1.0
FACTOR = 3.0
SECONDS = 12.0  # of overload
LEARNING_S = 2.0  # of the overload, in which the server learns its speeds from nothing: not judged
CHAT, WORDY, BATCH = (96, 24), (64, 96), (512, 64)  # tokens of a prompt and of an answer
BATCH_TENANT = Tenant(TenantShare(name=TenantId("batch"), slo=Slo(kind="batch")))


def chat_tenant(goal_s: float | None, best_effort: BestEffort | None = None) -> Tenant:
    slo = Slo() if goal_s is None else Slo(kind="interactive", ttft_s=goal_s)
    return Tenant(TenantShare(name=TenantId("chat"), slo=slo), best_effort=best_effort)


@cache
def capacity(policy: PolicyName, shape: tuple[int, int], seconds: float = 8.0) -> tuple[float, float]:
    """Return the requests per second of each kind that a saturated server answers."""
    chat = chat_tenant(None)
    server = Overloaded([chat, BATCH_TENANT], replace(MACHINE, policy=policy), max_queued=100_000)
    sent = server.run(draw(chat, 60, seconds, shape, 99) + draw(BATCH_TENANT, 20, seconds, BATCH, 99), seconds)
    rates = (sum(one.is_complete for one in sent if one.tenant is tenant) for tenant in (chat, BATCH_TENANT))
    first, second = (max(rate, 1) / seconds for rate in rates)
    return first, second


def run(
    chat: Tenant, rates: tuple[float, float], policy: PolicyName, shape: tuple[int, int], seed: int,
    seconds: float = SECONDS,
) -> list[Sent]:  # fmt: skip
    """The chat tenant's requests under the overload."""
    server = Overloaded([chat, BATCH_TENANT], replace(MACHINE, policy=policy, seed=seed))
    requests = draw(chat, FACTOR * rates[0], seconds, shape, seed)
    requests += draw(BATCH_TENANT, FACTOR * rates[1], seconds, BATCH, seed)
    return [one for one in server.run(requests, seconds + 120) if one.tenant is chat]


def verdict(policy: PolicyName, seed: int, goal_s: float | None = GOAL_S) -> tuple[Verdict, float]:
    """Return the verdict on a run with the goal, against the same arrivals without it, and the capacity in requests."""
    rates = capacity(policy, CHAT)
    controls, sent = (
        [one for one in run(chat_tenant(goal), rates, policy, CHAT, seed) if one.at_s >= LEARNING_S]
        for goal in (None, goal_s)
    )
    return judge(sent, controls, GOAL_S), (SECONDS - LEARNING_S) * rates[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9))])
@pytest.mark.sampled(1)
def test_admitted_requests_meet_their_goal_and_refused_ones_would_have_missed_it(seed: int) -> None:
    found, possible = verdict("fair", seed)
    assert found.refused > 0.4 * found.sent
    assert found.kept_share >= 0.95, found
    assert found.precision >= 0.9, found
    assert found.recall >= 0.9, found
    assert found.kept >= 0.7 * possible, found  # a gate that refuses everybody keeps every goal


@pytest.mark.slow
def test_without_the_goal_hardly_any_request_is_in_time() -> None:
    found, _ = verdict("fair", 0, None)
    assert found.refused == 0
    assert found.kept_share < 0.3


def test_a_request_that_allows_less_is_answered_in_full_or_marked() -> None:
    rates = capacity("fair", WORDY)
    sent = run(chat_tenant(GOAL_S, BestEffort(8, 1)), rates, "fair", WORDY, 0)
    answered = [one for one in sent if one.is_complete]
    assert len(answered) >= 0.995 * len(sent)
    for one in answered:
        assert one.facts is not None
        assert one.service is not None
        assert one.facts.num_outputs == one.outputs or one.service.value in ("shortened", "deferred")


def test_a_request_that_does_not_allow_less_is_refused_in_the_same_overload() -> None:
    rates = capacity("fair", WORDY)
    sent = run(chat_tenant(GOAL_S), rates, "fair", WORDY, 0)
    assert sum(one.is_complete for one in sent) < 0.9 * len(sent)
