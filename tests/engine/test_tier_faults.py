"""The loop with few free blocks and a disk that is slow, wrong or gone: no request waits long."""

from collections.abc import Callable, Iterable

import pytest

from tests.engine.test_loop import VOCAB
from tests.engine.test_loop_tiers import BLOCK, BYTES, TierBench
from tiercel.device.sim_mover import SimMover
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.fetch import MAX_FETCHES, PATIENCE_S
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import RouteGauges
from tiercel.values.request import pack_tokens
from tiercel.values.tenant import DEFAULT_TENANT, KvQuota, Tenants, TenantShare
from tiercel.values.tier import Landing, Route, Tier, Transfer, Verdict
from tiercel.wire.frames import SetTenants

DOC = [number % VOCAB for number in range(80)]  # 20 blocks


class Disk:
    """A mover with a settable time for each read of the disk; a read is late after 250 ms."""

    def __init__(self, inner: SimMover, clock: ManualClock) -> None:
        self._clock, self._inner = clock, inner
        self._seconds: Callable[[int], float] | None = None
        self._verdict = Verdict.LANDED
        self._due: list[tuple[float, Landing]] = []
        self.reads = 0

    def slow_down(self, seconds: Callable[[int], float], verdict: Verdict = Verdict.LANDED) -> None:
        """Let read number n take `seconds(n)` and have this verdict."""
        self._seconds, self._verdict = seconds, verdict

    def start(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            if transfer.route is not Route.PREFETCH or self._seconds is None:
                self._inner.start([transfer])
                continue
            took_s, now_s = self._seconds(self.reads), self._clock.now_s()
            self.reads += 1
            landing = Landing(transfer.id, self._verdict)
            if self._verdict is Verdict.LANDED:
                rows = self._inner.lower[Tier.SSD, transfer.sources[0]]
                self._inner.lower[Tier.DDR, transfer.targets[0]] = rows
            if took_s > 0.25:
                self._due.append((now_s + 0.25, Landing(transfer.id, Verdict.LATE)))
                landing = Landing(transfer.id, Verdict.RETURNED)
            self._due.append((now_s + took_s, landing))

    def poll(self) -> list[Landing]:
        now_s = self._clock.now_s()
        news = [landing for due_s, landing in sorted(self._due, key=lambda due: due[0]) if due_s <= now_s]
        self._due = [due for due in self._due if due[0] > now_s]
        return [*self._inner.poll(), *news]

    def gauges(self) -> tuple[RouteGauges, ...]:
        return ()


def bench_with_doc_on_disk(*, fetch_blocks: int = 64) -> tuple[TierBench, Disk]:
    """A document whose blocks are on the disk only; DDR is a tier of its own."""
    disks: list[Disk] = []

    def wrap(mover: SimMover, clock: ManualClock) -> Disk:
        disks.append(Disk(mover, clock))
        return disks[0]

    bench = TierBench(
        blocks=40, host=30, disk=200, tokens=64, seqs=8, wrap=wrap,
        limits=TierLimits(always_loads=True, fetch_blocks=fetch_blocks),
    )  # fmt: skip
    bench.submit(DOC, max_tokens=1)
    bench.run()
    for number in range(5):
        bench.submit([number] * 90, max_tokens=1)
        bench.run()
    assert bench.cache.peek(pack_tokens(DOC), b"") == 0, "it has left memory"
    return bench, disks[0]


def waited_s(bench: TierBench, seqs: list[SeqId]) -> float:
    """Return the virtual time until all of these have ended; the loop steps at least every 10 ms."""
    start_s = bench.clock.now_s()
    while any(seq not in bench.client.finished for seq in seqs):
        assert bench.clock.now_s() - start_s < 60, "somebody waits for ever"
        if not bench.loop.step():
            bench.clock.advance(0.01)
        bench.loop.check_integrity()
    return bench.clock.now_s() - start_s


def computing_s(prompt: list[int]) -> float:
    """Return the time of the request without fetching."""
    bench = TierBench(blocks=40, host=30, tokens=64, seqs=8)
    return waited_s(bench, [bench.submit(prompt, max_tokens=2)])


def test_a_request_whose_prefix_is_on_a_disk_that_hangs_is_computed() -> None:
    bench, disk = bench_with_doc_on_disk()
    disk.slow_down(lambda _: 1e6)
    assert waited_s(bench, [bench.submit(DOC, max_tokens=2)]) <= computing_s(DOC) + PATIENCE_S + 0.02
    assert 0 < disk.reads <= 64


@pytest.mark.parametrize("count", [260, 3 * MAX_FETCHES])
def test_requests_on_a_disk_that_hangs_do_not_delay_others(count: int) -> None:
    bench, disk = bench_with_doc_on_disk()
    disk.slow_down(lambda _: 1e6)
    stuck = [bench.submit([*DOC, number % VOCAB], max_tokens=1) for number in range(count)]
    new = bench.submit([7] * 8, max_tokens=1)
    steps = 0
    while new not in bench.client.finished and not any(seq in bench.client.finished for seq in stuck):
        steps += 1
        assert steps < 100, "it waits behind the fetches of others"
        if not bench.loop.step():
            bench.clock.advance(0.01)
    waited_s(bench, [*stuck, new])


def test_a_fetch_ends_at_its_first_late_block_however_many_blocks_it_has() -> None:
    bench, disk = bench_with_doc_on_disk()
    disk.slow_down(lambda _: 0.3)
    assert waited_s(bench, [bench.submit(DOC, max_tokens=2)]) <= computing_s(DOC) + PATIENCE_S + 0.02
    assert disk.reads <= 64


def test_a_fetch_ends_at_a_torn_first_block() -> None:
    bench, disk = bench_with_doc_on_disk(fetch_blocks=4)
    disk.slow_down(lambda _: 0.002, Verdict.MISS)
    waited_s(bench, [bench.submit(DOC, max_tokens=2)])
    assert disk.reads <= 4, "blocks behind a hole were read"
    assert bench.client.finished[bench_last(bench)].num_cached == 0


def bench_last(bench: TierBench) -> int:
    return max(bench.requests)


def test_reads_that_are_slow_but_in_time_hold_a_request_no_longer_than_predicted_and_patience() -> None:
    bench, disk = bench_with_doc_on_disk(fetch_blocks=4)
    disk.slow_down(lambda _: 0.2)  # 20 blocks, 4 at a time: a second in all
    predicted_s = len(DOC) // BLOCK * BYTES / 2e6
    waited = waited_s(bench, [bench.submit(DOC, max_tokens=2)])
    assert waited <= computing_s(DOC) + predicted_s + PATIENCE_S + 0.02
    assert bench.client.finished[bench_last(bench)].num_cached == 4 * BLOCK, "what had landed is used"


def test_closing_a_tier_ends_every_wait_for_it() -> None:
    bench, disk = bench_with_doc_on_disk()
    disk.slow_down(lambda _: 0.24)
    seq = bench.submit(DOC, max_tokens=1)
    bench.loop.step()
    bench.cache.background.close_disk(is_readable=False)
    assert waited_s(bench, [seq]) <= computing_s(DOC) + 0.02
    again = bench.submit([*DOC, 1], max_tokens=1)
    reads = disk.reads
    waited_s(bench, [again])
    assert disk.reads == reads, "it is not asked any more"


def test_a_read_that_lands_after_its_request_was_preempted_again_is_not_held() -> None:
    bench, disk = bench_with_doc_on_disk(fetch_blocks=4)
    bench.book.switch_policy("priority", bench.clock.now_s(), step_ms=2.0, patience_s=1.0)
    disk.slow_down(lambda _: 0.24)
    seq = bench.submit(DOC, max_tokens=15)
    for _ in range(400):
        if bench.book[seq] in bench.book.running:
            break
        if not bench.loop.step():
            bench.clock.advance(0.01)
    other = bench.submit([8] * 8, max_tokens=60)
    for _ in range(4):
        bench.loop.step()
    assert bench.book[other] in bench.book.running
    bench.book.move(seq, 1)
    assert any(transfer.route is Route.PREFETCH for transfer in bench.cache.tiers.transfers.flying())
    share = TenantShare(name=DEFAULT_TENANT, kv_quota=KvQuota(hbm=3 * BYTES))
    bench.loop.take([SetTenants(Tenants(1, (share,)))])  # the lower of the two is preempted
    waited_s(bench, [other, seq])
    assert bench.client.finished[seq].preemptions == 1
    assert [pool.copies.num_retained(RetentionClass.WANTED) for _, pool in bench.cache.tiers.pools()] == [0, 0, 0]


# restores and spills in one plan


@pytest.mark.parametrize("is_reload", [False, True])
@pytest.mark.parametrize("steps", range(1, 20))
@pytest.mark.sampled(5)
def test_a_spill_never_evicts_blocks_that_a_restore_of_the_same_plan_reads(steps: int, is_reload: bool) -> None:
    bench = TierBench(blocks=64, host=8, seqs=8, tokens=64, chunk=8 if is_reload else 4, policy="fair", max_len=200)
    first, second = TenantId("q"), TenantId("r")

    def set_quota(blocks: int) -> None:
        shares = (TenantShare(name=first, band=1, kv_quota=KvQuota(hbm=blocks * BYTES)), TenantShare(name=second))
        bench.loop.take([SetTenants(Tenants(1, shares))])

    set_quota(60)
    kept, shared = [1, 2, 3, 4, 5, 6, 7, 8, 9], [5] * 33
    for _ in range(3):
        bench.submit(kept, max_tokens=2, tenant=second)
        bench.run()
    for number in range(12):  # evict it from HBM
        bench.submit([10, *[number % VOCAB] * 39, number % VOCAB], max_tokens=2, tenant=second)
        bench.run()
    bench.submit(shared, max_tokens=2, tenant=first)
    bench.run()
    if not is_reload:
        set_quota(26)
    bench.submit([6] * 64, max_tokens=20, tenant=first)
    bench.submit(shared, max_tokens=40, tenant=first)
    for _ in range(steps):
        bench.step()
    if is_reload:
        set_quota(15)
    bench.submit(kept, max_tokens=4, tenant=second)
    bench.run()
    assert set(bench.client.endings) == set(bench.requests)


# quotas below HBM


@pytest.mark.parametrize("spillers", [1, 4, 8])
@pytest.mark.parametrize("host", [80, 0])
def test_copies_in_progress_count_against_the_quotas_of_ddr_and_ssd(spillers: int, host: int) -> None:
    tenant, other = TenantId("q"), TenantId("hi")
    bench = TierBench(blocks=80, host=host, disk=100, seqs=16, tokens=64, policy="fair", max_len=200)
    quota = KvQuota(ddr=4 * BYTES, ssd=3 * BYTES)
    shares = (TenantShare(name=tenant, band=1, kv_quota=quota), TenantShare(name=other))
    bench.loop.take([SetTenants(Tenants(1, shares))])
    for number in range(spillers):
        bench.submit([number] * 25, max_tokens=60, tenant=tenant)
    for _ in range(12):
        bench.step()
    for number in range(6):
        bench.submit([9] * 60 + [number] * 4, max_tokens=8, tenant=other)
    most, quotas = {Tier.DDR: 0, Tier.SSD: 0}, bench.cache.tiers.quotas
    for _ in range(600):
        is_busy = bench.step()
        for tier, pool in bench.cache.tiers.pools():
            if tier is not Tier.HBM:
                there = sum(pool.copies.owner(slot) == 1 for slot in range(1, pool.blocks + 1))  # type: ignore[arg-type]
                assert there == quotas.held(tier, 1)
                most[tier] = max(most[tier], there)
        if not is_busy and bench.loop.is_idle:
            break
    assert most[Tier.DDR] <= 4
    assert most[Tier.SSD] == 3, "the quota is used"
    assert not host or most[Tier.DDR] == 4


# finished chains


def test_the_number_of_keys_of_finished_chains_is_limited() -> None:
    bench = TierBench(blocks=24, host=12, disk=300, limits=TierLimits(background_blocks=0))  # nothing is written
    for number in range(40):
        bench.submit([number % VOCAB, number // VOCAB, *DOC][:70], max_tokens=1)
        bench.step()
        bench.step()
        assert bench.cache.background.num_chain_keys <= 4 * (24 + 12)


def test_a_new_chain_is_written_although_older_chains_of_higher_value_have_left_memory() -> None:
    bench = TierBench(blocks=24, host=0, disk=300, limits=TierLimits(background_blocks=0))
    for number in range(6):
        bench.submit([number % VOCAB] * 90, max_tokens=1)
        for _ in range(10):
            bench.step()
    bench.submit(DOC[:50], max_tokens=1)
    for _ in range(10):
        bench.step()
    bench.cache.tiers.limits = TierLimits()
    bench.run()
    disk = bench.cache.tiers.disk
    assert disk is not None
    assert bench.cache.peek(pack_tokens(DOC[:50]), b"") // BLOCK == 12
    assert len(disk.slot_by_key) >= 12
