"""The sequences of a failed step run alone: what that does to the room of others."""

from tests.scheduler.counting import CountingCache, Room, slices
from tiercel.ids import SeqId, TenantId
from tiercel.scheduler.policy import open_policy
from tiercel.tenant import KvQuota, Tenants, TenantShare


class SpillingCache(CountingCache):
    """What a victim releases is free only when its copies have landed: later."""

    def release(self, seq: SeqId, *, spills: bool = False) -> None:
        before = self.available_blocks
        super().release(seq, spills=spills)
        self.coming_blocks += self.available_blocks - before
        self.available_blocks = before


def test_a_waiting_suspect_holds_nothing_until_its_room_has_come() -> None:
    room = Room(tokens=16)
    room.cache = SpillingCache(20, hits={2: 4})
    room.submit(1, 7)
    room.submit(2, 5)
    room.step()
    failing = room.launch()
    room.cache.available_blocks = 0
    assert room.launch().victims == (2,), "it drains: its slice is in flight"
    room.book.void(failing.nano_batches, room.now_s, is_suspect=True)
    assert slices(room.step()) == [(1, 7, 1)]
    plan = room.launch()
    assert (plan.victims, plan.admitted) == ((1,), ())
    assert room.cache.num_blocks(SeqId(2)) == 0, "sealed with the plan, its hits would be held and found once more"


def test_a_suspect_takes_from_its_own_tenant_what_the_quota_does_not_leave() -> None:
    policy = open_policy("fcfs")
    policy.set_tenants(Tenants(1, (TenantShare(name=TenantId("small"), kv_quota=KvQuota(hbm=5)),)), 0.0)
    room = Room(blocks=400, policy=policy, block_bytes=1)
    room.submit(1, 3, tenant="big")
    room.submit(2, 7, max_tokens=5, tenant="small")
    room.submit(3, 6, max_tokens=5, tenant="small")
    room.step()
    room.cache.quota_by_tenant["small"] = 4
    failing = room.launch()
    behind = room.launch()
    assert behind.victims == (3,), "the tenant is at its quota"
    room.book.void(failing.nano_batches, room.now_s, is_suspect=True)
    room.book.void(behind.nano_batches, room.now_s, is_suspect=False)
    victims: list[int] = []
    while room.book.num_suspects:
        victims += room.step().victims
        assert room.cache.num_blocks(SeqId(2)) + room.cache.num_blocks(SeqId(3)) <= 4
    assert victims == [2]
