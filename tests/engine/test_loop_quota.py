"""The loop with KV quotas: tenants stay within them, and every request ends."""

import random

import pytest

from tests.engine.test_loop import END, MAX_MODEL_LEN, VOCAB, random_prompt
from tests.engine.test_loop_tiers import BLOCK, BYTES, TierBench
from tiercel.device.sim import expected_outputs
from tiercel.settings.settings import PreemptionMode
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.tenant import KvQuota, Tenants, TenantShare
from tiercel.wire.frames import Abort, SetTenants

TENANTS = (TenantId("one"), TenantId("two"), TenantId("free"))


class QuotaBench(TierBench):
    """A loop over simulated tiers that checks the quotas after every step."""

    def __init__(self, rng: random.Random, depth: int, mode: PreemptionMode) -> None:
        host, tokens = rng.choice([0, 12, 60]), rng.choice([8, 64])
        super().__init__(blocks=30, host=host, depth=depth, mode=mode, seqs=8, tokens=tokens)
        self.quotas: dict[TenantId, int] = {}  # blocks
        self.quota_by_seq: dict[SeqId, int | None] = {}  # quota in blocks when the request arrived
        self.shared = [rng.randrange(VOCAB) for _ in range(40)]

    def set_quotas(self, one: int, two: int) -> None:
        self.quotas = {TENANTS[0]: one, TENANTS[1]: two}
        shares = (TenantShare(name=name, kv_quota=KvQuota(hbm=most * BYTES)) for name, most in self.quotas.items())
        self.loop.take([SetTenants(Tenants(1, (*shares, TenantShare(name=TENANTS[2]))))])

    def submit_any(self, rng: random.Random) -> None:
        tenant = rng.choice(TENANTS)
        seq = self.submit(
            random_prompt(rng, self.shared), max_tokens=rng.randrange(1, 40), scope=tenant.encode(), tenant=tenant
        )
        self.quota_by_seq[seq] = self.quotas.get(tenant)
        if rng.random() < 0.1:
            self.loop.take([Abort((SeqId(rng.randrange(1, len(self.requests) + 1)),))])

    def held(self, tenant: TenantId) -> int:
        running = (one.id for one in self.book.running if one.request.tenant == tenant)
        return len({slot for seq in running for slot in self.cache.slots(seq)})

    def assert_all_right(self) -> None:
        """Check that each request ended once with the right tokens, up to its tenant's quota."""
        assert set(self.client.endings) == set(self.requests)
        assert set(self.client.endings.values()) <= {1}
        for number, finished in self.client.finished.items():
            seq = SeqId(number)
            request, quota, output = self.requests[seq], self.quota_by_seq[seq], self.client.tokens.get(seq, [])
            expected = expected_outputs(request, VOCAB, END, MAX_MODEL_LEN)
            if quota is not None:
                expected = expected[: max(0, quota * BLOCK + 1 - len(request.prompt) // 4)]
            if finished.reason is FinishReason.ERROR:
                assert not expected
                assert "kv_quota_bytes.hbm" in (finished.error or "")
            else:
                assert output == (expected[: len(output)] if finished.reason is FinishReason.ABORT else expected)
        assert self.cache.blocks_used == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.sampled(5)
def test_tenants_stay_within_their_quotas_and_every_request_ends(seed: int, depth: int, mode: PreemptionMode) -> None:
    rng = random.Random(seed)
    bench = QuotaBench(rng, depth, mode)
    bench.set_quotas(8, 14)
    for _ in range(40):
        bench.submit_any(rng)
        for _ in range(rng.randrange(0, 4)):
            bench.step()
            assert all(bench.held(tenant) <= most for tenant, most in bench.quotas.items())
    while bench.step():
        assert all(bench.held(tenant) <= most for tenant, most in bench.quotas.items())
    bench.run()
    bench.assert_all_right()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.sampled(4)
def test_no_request_is_lost_or_stuck_while_quotas_change(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    bench = QuotaBench(rng, depth, "auto")
    for _ in range(40):
        if rng.random() < 0.3:
            bench.set_quotas(rng.randrange(0, 12), rng.randrange(2, 20))
        bench.submit_any(rng)
        for _ in range(rng.randrange(0, 4)):
            bench.step()
    bench.run()
    bench.assert_all_right()


def test_a_prompt_over_the_quota_is_rejected_and_an_answer_ends_at_the_quota() -> None:
    bench = QuotaBench(random.Random(0), 1, "auto")
    bench.set_quotas(2, 2)
    long = bench.submit([1] * (2 * BLOCK + 1), tenant=TENANTS[0])
    short = bench.submit([1] * BLOCK, tenant=TENANTS[0], max_tokens=30)
    bench.run()
    refused, ended = bench.client.finished[long], bench.client.finished[short]
    assert (refused.reason, refused.num_outputs) == (FinishReason.ERROR, 0)
    assert refused.error == "the prompt needs 3 KV blocks, kv_quota_bytes.hbm of its tenant allows 2"
    assert (ended.reason, ended.num_outputs) == (FinishReason.LENGTH, BLOCK + 1)
