"""What a tenant's quota of KV does to those of it that run: they grow within it, and only its own give way."""

from tests.scheduler.counting import BLOCK, Room
from tiercel.ids import SeqId, TenantId
from tiercel.plan import Plan
from tiercel.scheduler.policy import open_policy
from tiercel.tenant import KvQuota, Tenants, TenantShare


def quota_room(quota: int, *, tokens: int = 64) -> Room:
    """Tenant small may hold so many blocks; there is room for many more."""
    policy = open_policy("fcfs")
    share = TenantShare(name=TenantId("small"), kv_quota=KvQuota(hbm=quota))
    policy.set_tenants(Tenants(1, (share,)), 0.0)
    return Room(blocks=400, seqs=16, tokens=tokens, policy=policy, block_bytes=1)


def held(room: Room) -> int:
    return sum(room.cache.num_blocks(one.id) for one in room.book.running if one.request.tenant == "small")


def run(room: Room, most_steps: int = 2000) -> list[Plan]:
    """To the end."""
    plans: list[Plan] = []
    while len(room.book) and len(plans) < most_steps:
        plans.append(room.step())
    assert not len(room.book), "somebody is stuck"
    return plans


def test_who_grows_beyond_its_tenants_quota_takes_from_the_newest_of_that_tenant() -> None:
    room = quota_room(8)
    room.submit(1, 4, max_tokens=24, tenant="big")
    for seq in (2, 3, 4):
        room.submit(seq, 4, max_tokens=24, tenant="small")
    room.submit(5, 4, max_tokens=24, tenant="big")
    most, victims = 0, list[int]()
    for _ in range(400):
        plan = room.step()
        victims += plan.victims
        most = max(most, held(room))
    assert not len(room.book)
    assert most == 8
    assert victims[0] == 4
    assert set(victims) <= {3, 4}, "only the tenant's own, and never its oldest"
    assert room.cache.available_blocks == 400


def test_the_newest_waits_with_its_blocks_while_the_quota_is_full_and_keeps_nobody_out() -> None:
    room = quota_room(6)
    room.submit(1, 9, max_tokens=4, tenant="small")
    room.submit(2, 6, max_tokens=40, tenant="small")
    room.step()
    oldest = room.book[SeqId(1)]
    oldest.limit = oldest.num_tokens  # it keeps its three blocks and wants nothing
    for _ in range(20):
        room.step()
    assert (held(room), room.book[SeqId(2)].num_tokens) == (6, 3 * BLOCK + 1)
    room.submit(3, 4, max_tokens=60, tenant="big")
    assert 3 in room.step().admitted
    plans = [room.step() for _ in range(10)]
    assert room.book[SeqId(3)].num_outputs == 11
    oldest.limit = 13
    plans += run(room)
    assert not any(plan.victims for plan in plans)


def test_a_sequence_alone_that_was_accepted_under_a_larger_quota_goes_on() -> None:
    room = quota_room(8)
    room.submit(1, 20, max_tokens=40, tenant="small")
    room.submit(2, 4, max_tokens=40, tenant="small")
    room.step()
    room.cache.quota_by_tenant["small"] = 2
    plans = run(room)
    assert [plan.victims for plan in plans if plan.victims] == [(2,)]


def test_prompts_under_way_count_whole_against_the_quota() -> None:
    room = quota_room(20, tokens=8)
    room.submit(1, 15 * BLOCK, max_tokens=4, tenant="small")
    room.submit(2, 10 * BLOCK, max_tokens=4, tenant="small")
    plans = run(room)
    assert plans[0].admitted == (1,)
    assert not room.book.num_preemptions, "it came too early"
