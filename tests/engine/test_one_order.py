"""One order decides both who is admitted and who is preempted: every request that fits alone ends, under every policy.

A walk draws everything from its seed: policy, bands, tenants, tiers, the length of steps, and when requests come and
are aborted. The requests compete for a pool that hardly holds the largest of them.
"""

import random
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.engine.test_loop import VOCAB
from tests.engine.test_loop_tiers import BYTES, TierBench
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.device.sim import plain_step_s
from tiercel.scheduler.draft import CacheView
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.settings.settings import PreemptionMode
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import Plan
from tiercel.values.tenant import KvQuota, PolicyName, Slo, Tenants, TenantShare
from tiercel.wire.frames import Abort, SetTenants

POLICIES: tuple[PolicyName, ...] = ("fair", "priority", "fcfs")
MODES: tuple[PreemptionMode, ...] = ("recompute", "auto", "swap")
TENANTS = tuple(map(TenantId, ("ann", "bob", "cyn")))


class WatchedPlanner(Planner):
    """A planner whose plans are checked: a victim is not admitted before the sequence that it gave way to."""

    beneficiary_by_victim: dict[SeqId, SeqId]

    def plan(self, cache: CacheView, now_s: float = 0.0, order: tuple[SeqId, ...] | None = None) -> Plan:
        plan = super().plan(cache, now_s, order)
        book, fair, waiting = self._book, self._policy.fair, self._book.waiting
        self.beneficiary_by_victim = {
            victim: first
            for victim, first in self.beneficiary_by_victim.items()
            if victim in book and first in waiting and first not in plan.admitted
        }
        for victim in plan.admitted:
            first = self.beneficiary_by_victim.pop(victim, None)
            if first is not None and fair.may_admit(book[first].account, now_s):
                # Unless bands were changed since, or the beneficiary is starving.
                assert book[first].account.band > book[victim].account.band, f"{victim} goes before {first}"
        self.beneficiary_by_victim |= {
            one.victim: one.beneficiary for one in plan.preemptions if one.beneficiary in waiting
        }
        return plan


class Size(NamedTuple):
    """The sizes of a walk, all in tokens."""

    step: int
    block: int
    longest: int


SIZES = (Size(16, 4, 110), Size(2048, 16, 5000), Size(8192, 64, 12_000))


class Walk:
    """A pool that hardly holds its largest request, and requests that compete for it."""

    def __init__(self, seed: int, policy: PolicyName, size: Size) -> None:
        rng = self.rng = random.Random(seed)
        self.size = size
        blocks = -(-size.longest // size.block) + rng.choice([1, 2, 3])
        slowness = rng.choice([1.0, 1.0, 300.0])  # on a slow machine, sequences wait until they starve
        host, disk = rng.choice([(0, 0), (0, 0), (blocks + 10, 0), (8, 0), (blocks + 10, 3 * blocks)])
        self.bench = TierBench(
            blocks=blocks, host=host, disk=disk, depth=rng.choice([0, 1, 2]), seqs=rng.choice([2, 4, 8]),
            tokens=size.step, mode=rng.choice(MODES), chunk=rng.choice([0, 0, size.step // 2]), block=size.block,
            max_len=size.longest, prefix_caching=rng.random() < 0.5, planner=WatchedPlanner,
            policy=open_policy(policy, step_ms=2.0 * slowness, patience_s=slowness * rng.choice([0.001, 0.01, 0.1])),
            step_s=lambda slices: slowness * plain_step_s(slices),
        )  # fmt: skip
        assert isinstance(self.bench.planner, WatchedPlanner)
        self.bench.planner.beneficiary_by_victim = {}
        self.has_reads = rng.random() < 0.5
        self.bands = rng.choice([(0,), (0, 1), (0, 0, 1, 2)])
        self.docs = [[rng.randrange(VOCAB) for _ in range(size.longest)] for _ in range(2)]
        self.reload()

    def reload(self) -> None:
        """Change bands, weights and goals of the tenants, and sometimes their quotas."""
        rng, blocks = self.rng, -(-self.size.longest // self.size.block) + 1
        shares = tuple(
            TenantShare(
                name=name, weight=rng.choice([0.2, 1.0, 20.0]), band=rng.choice(self.bands),
                slo=rng.choice([Slo(), Slo(ttft_s=0.1), Slo(kind="batch")]),
                kv_quota=KvQuota(hbm=blocks * BYTES) if rng.random() < 0.2 else KvQuota(),
            )
            for name in TENANTS
        )  # fmt: skip
        self.bench.loop.take([SetTenants(Tenants(1, shares))])

    def submit(self) -> None:
        """Submit a request that fits into the pool alone: most of them need more than half of it."""
        rng, longest = self.rng, self.size.longest
        outputs = min(rng.choice([1, 4, 8, 24, 60, 200]), longest // 2)
        least = 1 if rng.random() < 0.4 else longest // 3
        length = rng.randrange(least, longest - outputs)
        own = rng.randrange(length + 1)
        prompt = rng.choice(self.docs)[: length - own] + [rng.randrange(VOCAB) for _ in range(own)]
        self.bench.submit(
            prompt, max_tokens=outputs, tenant=rng.choice(TENANTS), band=rng.choice(self.bands),
            prompt_logprobs=rng.choice([None, 0]) if self.has_reads else None,
        )  # fmt: skip

    def events(self) -> Iterable[int]:
        """Submit, abort and reload; yield the steps between two events."""
        rng = self.rng
        for _ in range(rng.choice([2, 3, 5, 8, 12])):
            self.submit()
            yield rng.choice([0, 0, 1, 3, 12, 40])
            if rng.random() < 0.15:
                self.bench.loop.take([Abort((SeqId(rng.randrange(1, len(self.bench.requests) + 1)),))])
            if rng.random() < 0.1:
                self.reload()

    def step(self) -> None:
        if not self.bench.step():
            self.bench.clock.advance(0.01)

    def finish(self) -> None:
        """Step until all requests have ended, and check that they took a bounded number of steps and preemptions."""
        bench = self.bench
        for _ in range(self.most_steps()):
            if bench.loop.is_idle and bench.mover.next_landing_s is None:
                break
            self.step()
        most = 8 * len(bench.requests)
        preemptions = {seq: bench.book[seq].preemptions for seq in map(SeqId, bench.requests) if seq in bench.book}
        assert not preemptions, f"{len(preemptions)} of {len(bench.requests)} do not end; preempted {preemptions}"
        assert all(finished.preemptions <= most for finished in bench.client.finished.values())

    def most_steps(self) -> int:
        """Return how many steps all requests may take together, however often each restarts for another."""
        chunk = min(self.size.step // 2, 2 * self.size.block)
        alone = [len(one.prompt) // 4 // chunk + one.params.max_tokens + 10 for one in self.bench.requests.values()]
        return 10 * sum(alone)


def walk(seed: int, policy: PolicyName, size: Size) -> None:
    one = Walk(seed, policy, size)
    for steps in one.events():
        for _ in range(steps):
            one.step()
    one.finish()
    one.bench.run()
    one.bench.assert_all_right()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "seed", fast_and_slow((*range(4), 99, 134, *fresh_seeds(2)), (*range(4, 60), *fresh_seeds(60)))
)
@pytest.mark.sampled(6)
def test_all_requests_that_fit_alone_end_in_a_pool_that_holds_one_of_them(seed: int, policy: PolicyName) -> None:
    walk(seed, policy, SIZES[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SIZES[1:], ids=lambda size: f"{size.step} tokens")
@pytest.mark.parametrize("seed", fast_and_slow((0, *fresh_seeds(1)), (*range(1, 12), *fresh_seeds(12))))
@pytest.mark.sampled(3)
def test_all_requests_end_with_the_steps_of_a_gpu(seed: int, size: Size, policy: PolicyName) -> None:
    walk(seed, policy, size)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("reads", [None, 0])
@pytest.mark.parametrize(("host", "disk"), [(0, 0), (40, 0), (40, 100)])
@pytest.mark.sampled(8)
def test_a_request_of_a_higher_band_and_an_earlier_one_both_end(
    policy: PolicyName, prefix_caching: bool, reads: int | None, host: int, disk: int
) -> None:
    """Under `fcfs` the second request preempted the first by its band, and the first was admitted first again."""
    bench = TierBench(
        blocks=30, host=host, disk=disk, seqs=4, chunk=8, policy=policy, max_len=110, prefix_caching=prefix_caching
    )
    bench.submit([1] * 100, max_tokens=8, tenant=TENANTS[0], band=1, prompt_logprobs=reads)
    for _ in range(4):
        bench.step()
    bench.submit([2] * 100, max_tokens=8, tenant=TENANTS[1], band=0, prompt_logprobs=reads)
    bench.run(most_steps=300)
    bench.assert_all_right()
    assert bench.book.preemption_counts.total == (0 if policy == "fcfs" else 1)
