"""Blocks held by a tenant: a block shared by its sequences counts once, in the books and in a plan."""

from array import array

from tests.kvcache.test_manager import BLOCK
from tiercel.kvcache.manager import CacheManager
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import NanoBatch, Plan, Slice
from tiercel.values.rates import Rates
from tiercel.values.tenant import KvQuota, Tenants, TenantShare

A, B = TenantId("a"), TenantId("b")
PREFIX = list(range(5 * BLOCK))


class Bench:
    """Tenant a has a quota of ten blocks, b has none; both share prefixes."""

    def __init__(self) -> None:
        rates = Rates(block_bytes=100)
        self.cache = CacheManager(64, BLOCK, b"weights", rates=lambda: rates)
        self.step = 0
        self.tokens: dict[SeqId, array[int]] = {}
        self.set_quota(1099)

    def set_quota(self, hbm: int) -> None:
        shares = (TenantShare(name=A, kv_quota=KvQuota(hbm=hbm)), TenantShare(name=B))
        self.cache.set_tenants(Tenants(1, shares))

    def open(self, number: int, tenant: TenantId) -> SeqId:
        """Open a sequence of six blocks, of which all sequences share the first five."""
        seq = SeqId(number)
        self.tokens[seq] = array("I", [*PREFIX, *range(1000 * number, 1000 * number + BLOCK)])
        self.cache.open(seq, self.tokens[seq], b"group", tenant)
        return seq

    def compute(self, seq: SeqId) -> None:
        ledger, tokens = self.cache.ledger(), len(self.tokens[seq])
        found = ledger.match(seq)
        assert found is not None
        assert ledger.reserve(seq, tokens)
        piece = Slice(seq, found.tokens, tokens - found.tokens, True)
        self.step += 1
        self.cache.seal(Plan((NanoBatch((piece,)),), admitted=(seq,)), ledger, self.step)
        self.cache.commit(self.step, [(seq, tokens)])
        self.cache.check_integrity()

    def left(self, seq: SeqId) -> int | None:
        return self.cache.ledger().quota_left(seq)


def test_a_block_that_several_share_counts_once_for_each_tenant() -> None:
    bench = Bench()
    first, second, other = bench.open(1, A), bench.open(2, A), bench.open(3, B)
    assert bench.left(first) == 10
    bench.compute(first)
    assert bench.left(first) == 4
    bench.compute(other)
    assert bench.left(first) == 4
    assert bench.left(other) is None
    bench.compute(second)
    assert bench.left(first) == 3
    bench.cache.close(first)
    assert bench.left(second) == 4
    bench.cache.close(second)
    assert bench.left(bench.open(4, A)) == 10


def test_a_plan_counts_blocks_that_it_takes_hits_and_releases() -> None:
    bench = Bench()
    first, second, third = bench.open(1, A), bench.open(2, A), bench.open(3, A)
    bench.compute(first)
    bench.compute(second)
    ledger = bench.cache.ledger()
    found = ledger.match(third)
    assert found is not None
    assert found.hit_blocks == 5
    assert ledger.quota_left(third) == 3, "the hits are held already"
    assert ledger.reserve(third, 7 * BLOCK)
    assert ledger.quota_left(third) == 1
    ledger.release(third)
    ledger.release(first)
    assert ledger.quota_left(third) == 4, "the second still holds the prefix"
    ledger.release(second)
    assert ledger.quota_left(third) == 10
    ledger.match(third)
    assert ledger.quota_left(third) == 5
    assert bench.left(third) == 3, "a plan changes nothing"


def test_blocks_of_a_failed_step_are_held_until_they_are_released() -> None:
    bench = Bench()
    first, second = bench.open(1, A), bench.open(2, A)
    bench.compute(first)
    ledger = bench.cache.ledger()
    ledger.match(second)
    assert ledger.reserve(second, 6 * BLOCK)
    ledger.release(first)
    bench.cache.seal(Plan((NanoBatch((Slice(second, 20, 4, True),)),), admitted=(second,)), ledger, bench.step + 1)
    bench.cache.end(bench.step + 1)
    bench.cache.check_integrity()
    assert bench.left(first) == 4, "the second holds the five shared blocks and one of its own"
    bench.cache.close(second)
    assert bench.left(first) == 10


def test_a_changed_quota_applies_at_once() -> None:
    bench = Bench()
    first = bench.open(1, A)
    bench.compute(first)
    bench.set_quota(400)
    assert bench.left(first) == -2
    assert bench.cache.quota_blocks(A) == 4
    assert bench.cache.quota_blocks(B) is None
