"""Random walks of the loop over all tiers at once: quotas, reloads, aborts, refused launches and bad I/O.

A walk draws everything from its seed: sizes, policy, tenants and every event. After each step all books must agree, and
every tenant must keep its quotas. At the end each request has ended once, with the right tokens, and no block is
held any more.
"""

import random
from collections.abc import Sequence

import pytest

from tests.engine.test_loop import END, MAX_MODEL_LEN, VOCAB, Client
from tests.foreign import foreign_numbers
from tests.seeds import fresh_seeds
from tiercel.device.sim import SimMachine, expected_outputs
from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.engine.loop import EngineLoop
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.slot_state import SlotState
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import PolicyName, open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import PreemptionMode
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, SlotId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.rates import Rates
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import KvQuota, Slo, Tenants, TenantShare
from tiercel.values.tier import Route, Tier, Transfer, Verdict
from tiercel.wire.frames import Abort, SetTenants, Submit

BLOCK, BYTES = 4, 4096
TENANTS = tuple(map(TenantId, ("ann", "bob", "cyn", "dan")))
POLICIES: tuple[PolicyName, ...] = ("fair", "priority", "fcfs")
MODES: tuple[PreemptionMode, ...] = ("swap", "swap", "auto", "recompute")
RATES = SimRates(
    block_bytes=BYTES, spill_bytes_per_s=4e6, restore_bytes_per_s=4e6, disk_write_bytes_per_s=2e6,
    disk_read_bytes_per_s=2e6, copy_s=1e-4,
)  # fmt: skip
WEATHER = (
    (Verdict.LANDED,),  # calm
    (Verdict.LANDED,) * 4 + (Verdict.FAILED, Verdict.MISS),
    (Verdict.LANDED, Verdict.LATE),
    (Verdict.LATE,),  # a disk that hangs
    (Verdict.FAILED,),
)


class Walk:
    """A simulated machine with its tenants, and the events of a walk."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.clock, self.client = ManualClock(100.0), Client()
        self.docs = [[rng.randrange(VOCAB) for _ in range(rng.choice([9, 17, 33, 50]))] for _ in range(6)]
        blocks, host, disk = rng.choice([26, 40, 64]), rng.choice([0, 8, 12, 60]), rng.choice([0, 6, 40, 120])
        seqs, mode, chunk, tokens = (
            rng.choice([2, 5, 8]),
            rng.choice(MODES),
            rng.choice([0, 4, 8]),
            rng.choice([8, 16, 64]),
        )
        is_narrow = rng.random() < 0.5
        if is_narrow:  # many long prompts at once, and few blocks in DDR
            blocks, host, disk = 64, 8, 0
            seqs, mode, chunk, tokens = 8, "swap", rng.choice([4, 8]), 64
        speeds = {
            Route.SPILL: host and RATES.spill_bytes_per_s,
            Route.RESTORE: host and RATES.restore_bytes_per_s,
            Route.PERSIST: disk and RATES.disk_write_bytes_per_s,
            Route.PREFETCH: disk and RATES.disk_read_bytes_per_s,
        }
        known = Rates(
            bytes_per_s_by_route={route: speed for route, speed in speeds.items() if speed},
            prefill_token_s=1e-2, block_bytes=BYTES, block_size=BLOCK,
        )  # fmt: skip
        limits = TierLimits(always_loads=mode == "swap", fetch_blocks=rng.choice([2, 64]))
        policy = open_policy(rng.choice(POLICIES), step_ms=2.0, patience_s=rng.choice([0.01, 0.1, 1.0]))
        self.book = SequenceBook(policy, MAX_MODEL_LEN, END)
        self.cache = CacheManager(
            blocks, BLOCK, b"sim", host_blocks=host, disk_blocks=disk, rates=lambda: known, limits=limits
        )
        self.machine = SimMachine(self.book, BLOCK, VOCAB, self.clock, max_rows=seqs + 1)
        self.mover = SimMover(self.machine, self.clock, has_host=host > 0, rates=RATES, fate=self._fate)
        step = StepLimits(seqs, tokens, chunk, block_bytes=BYTES)
        planner = Planner(self.book, step, SwapChooser(mode, lambda: known))
        self.loop = EngineLoop(
            self.book, self.cache, planner, self.machine, self.client, self.clock, rng.choice([0, 1, 2]),
            mover=self.mover,
        )  # fmt: skip
        self.weather = WEATHER[0]
        self.refusals = 0
        self.requests: dict[int, Request] = {}
        self.hbm_by_seq: dict[int, int | None] = {}  # quota in blocks when the request arrived
        self.quotas: dict[tuple[Tier, TenantId], int] = {}
        self.owners: dict[TenantId, int] = {}  # tenants are numbered in the order of their arrival
        self.held: dict[tuple[Tier, TenantId], int] = {}  # after the step before
        self.reload()
        if is_narrow:
            self.ambush()

    def _fate(self, transfer: Transfer) -> Verdict:
        verdict = self.rng.choice(self.weather)
        if transfer.route in (Route.SPILL, Route.RESTORE):
            return Verdict.FAILED if self.rng.random() < 0.03 else Verdict.LANDED
        return verdict if transfer.route is Route.PREFETCH or verdict is not Verdict.LATE else Verdict.LANDED

    # ---- events

    def submit(
        self,
        tenant: TenantId | None = None,
        doc: list[int] | None = None,
        own: int = 0,
        band: int | None = None,
        outputs: int = 0,
    ) -> None:
        """Submit a new prompt, an earlier prompt, or an earlier prompt with a new end."""
        rng, is_doc = self.rng, doc is not None
        tenant, doc = tenant or rng.choice(TENANTS), doc or rng.choice(self.docs)
        added = [rng.randrange(VOCAB) for _ in range(own or (0 if is_doc else rng.choice([0, 0, 2, 11, 30])))]
        length = len(doc) if is_doc else rng.choice([len(doc), rng.randrange(1, len(doc))])
        prompt = (doc[:length] + added)[: MAX_MODEL_LEN - 2]
        seq = SeqId(len(self.requests) + 1)
        params = SamplingParams(
            temperature=0.0, max_tokens=outputs or rng.randrange(1, 40), ignore_eos=rng.random() < 0.5
        )
        self.requests[seq] = Request(
            id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=self.clock.now_s(), scope=self.scope(tenant),
            tenant=tenant, band=rng.choice([0, 0, 1]) if band is None else band,
        )  # fmt: skip
        self.owners.setdefault(tenant, len(self.owners) + 1)
        self.hbm_by_seq[seq] = self.quotas.get((Tier.HBM, tenant))
        self.loop.take([Submit(self.requests[seq])])

    def ambush(self) -> None:
        """Lower a tenant's quota to its use at the moment when another tenant requests blocks that are in DDR only.

        In one step the first tenant's prompt preempts its own newer sequence, whose blocks are spilled, and the other
        tenant's request is admitted to restored blocks.
        """
        rng, squeezed, other = self.rng, TENANTS[2], TENANTS[3]
        self.reload(squeezed, hbm=64)
        doc = [rng.randrange(VOCAB) for _ in range(9)]
        for _ in range(3):
            self.submit(other, doc, outputs=2)
            self.drain()
        for _ in range(12):  # evict it from HBM
            self.submit(other, [rng.randrange(VOCAB) for _ in range(41)], outputs=2)
            self.drain()
        shared = [rng.randrange(VOCAB) for _ in range(33)]
        self.submit(squeezed, shared, outputs=2)
        self.drain()
        self.submit(squeezed, [rng.randrange(VOCAB) for _ in range(64)])
        self.submit(squeezed, shared, outputs=40)
        for _ in range(30):
            if self._is_ripe(squeezed) and rng.random() < 0.5:
                break
            self.step()
        self.reload(squeezed, hbm=max(1, self.held.get((Tier.HBM, squeezed), 20) - rng.choice([0, 0, 4, 8])))
        self.submit(other, doc, band=0)

    def drain(self) -> None:
        """Step until all requests have ended."""
        for _ in range(200):
            if not self.step() and self.loop.is_idle and self.mover.next_landing_s is None:
                return

    def _is_ripe(self, tenant: TenantId) -> bool:
        """Return whether an older prompt and a newer sequence of a tenant run, and no decode of it needs a block."""
        mine = [one for one in self.book.running if one.request.tenant == tenant]
        has_both = any(one.want > 1 and any(other.rank > one.rank for other in mine) for one in mine)
        return has_both and not any(one.want == 1 and one.scheduled % BLOCK == 0 for one in mine)

    def scope(self, tenant: TenantId) -> bytes:
        """The first two tenants share a cache group."""
        return b"" if tenant in TENANTS[:2] else tenant.encode()

    def reload(self, squeezed: TenantId | None = None, hbm: int = 0) -> None:
        """Change quotas, weights, bands and goals of all tenants; one tenant gets the last band and little HBM."""
        rng, shares = self.rng, list[TenantShare]()
        self.quotas.clear()
        for tenant in TENANTS:
            most = {Tier.HBM: rng.randrange(6, 30), Tier.DDR: rng.randrange(0, 9), Tier.SSD: rng.randrange(0, 13)}
            quotas = dict[Tier, int]()
            if squeezed is None:
                quotas = {tier: blocks for tier, blocks in most.items() if rng.random() < 0.4}
            elif tenant == squeezed:
                quotas = {Tier.HBM: hbm}
            self.quotas |= {(tier, tenant): blocks for tier, blocks in quotas.items()}
            in_bytes = {tier.value: blocks * BYTES for tier, blocks in quotas.items()}
            slo = Slo(ttft_s=0.1) if rng.random() < 0.3 else Slo()
            share = TenantShare(
                name=tenant, weight=rng.choice([0.5, 1, 4]), slo=slo,
                band=rng.choice([0, 0, 1]) if squeezed is None else int(tenant == squeezed),
                kv_quota=KvQuota(**in_bytes),
            )  # fmt: skip
            shares.append(share)
        self.loop.take([SetTenants(Tenants(1, tuple(shares)))])

    def event(self) -> None:
        """Change the behaviour of the machine."""
        rng = self.rng
        match rng.choice(
            ("submit",) * 12 + ("burst",) * 2 + ("abort", "reload", "refuse", "weather", "weather", "pause")
        ):
            case "submit":
                self.submit()
            case "burst":
                tenant = rng.choice(TENANTS)
                for _ in range(rng.choice([2, 3])):
                    self.submit(tenant, own=30)
            case "abort":
                self.loop.take([Abort((SeqId(rng.randrange(1, len(self.requests) + 2)),))])
            case "reload":
                self.reload()
            case "refuse":
                self.refusals += 1
                self.machine.failing_launches += 1
                self.machine.begun = rng.choice([None, random.Random(rng.random())])
            case "weather":
                self.weather = rng.choice(WEATHER)
            case _:
                self.clock.advance(rng.choice([0.01, 0.3, 6.0]))

    # ---- steps

    def step(self) -> bool:
        """Run a step and check the books and quotas after it. Advance the clock if there was nothing to do."""
        is_busy = self.loop.step()
        self.loop.check_integrity()
        self._check_quotas()
        if not is_busy:
            due_s = self.mover.next_landing_s
            self.clock.advance(0.01 if due_s is None else min(0.1, max(0.0, due_s - self.clock.now_s())) + 1e-9)
        return is_busy

    def _check_quotas(self) -> None:
        """Check that no tenant exceeds its quota. An excess over a lowered quota must not grow."""
        running = [(one.request.tenant, one.id) for one in self.book.running]
        pools = [(tier, pool) for tier, pool in self.cache.tiers.pools() if tier is not Tier.HBM]
        held: dict[tuple[Tier, TenantId], int] = {}
        for tenant, owner in self.owners.items():
            mine = [seq for holder, seq in running if holder == tenant]
            # A single sequence may exceed the quota, because it was accepted under an earlier one.
            if len(mine) != 1:
                held[Tier.HBM, tenant] = len({slot for seq in mine for slot in self.cache.slots(seq)})
            for tier, pool in pools:  # cached, or held by transfers
                slots = [slot for slot in range(1, pool.blocks + 1) if pool.states[slot] != SlotState.FREE]
                held[tier, tenant] = sum(pool.copies.owner(SlotId(slot)) == owner for slot in slots)
        for key, blocks in held.items():
            most = self.quotas.get(key)
            assert most is None or blocks <= max(most, self.held.get(key, blocks if key[0] is Tier.HBM else 0)), (
                f"{key} holds {blocks} of {most}"
            )
        self.held = held

    def finish(self) -> None:
        """Step without faults until all requests have ended and no transfer is in progress."""
        self.weather = WEATHER[0]
        idle = 0
        while not self.loop.is_idle or self.mover.next_landing_s is not None or self.cache.background.is_busy:
            idle = 0 if self.step() else idle + 1
            assert idle < 3000, "somebody waits for ever"

    def assert_all_right(self) -> None:
        """Check that each request ended once with the right tokens, and that no block is held."""
        assert set(self.client.endings) == set(self.requests)
        assert set(self.client.endings.values()) <= {1}
        for seq, finished in self.client.finished.items():
            request, quota, output = self.requests[seq], self.hbm_by_seq[seq], self.client.tokens.get(seq, [])
            expected = expected_outputs(request, VOCAB, END, MAX_MODEL_LEN)
            if quota is not None:
                expected = expected[: max(0, quota * BLOCK + 1 - len(request.prompt) // 4)]
            if finished.reason is FinishReason.ERROR and "KV blocks" in (finished.error or ""):
                assert not output, finished
            elif finished.reason is FinishReason.ERROR:  # it was alone in a step that the machine rejected
                self.refusals -= 1
                assert output == expected[: len(output)], finished
            else:
                assert output == (expected[: len(output)] if finished.reason is FinishReason.ABORT else expected)
        assert self.refusals >= 0
        assert self.cache.blocks_used == 0
        assert not foreign_numbers((self.cache, self.book, self.mover))
        for tier, pool in self.cache.tiers.pools():
            left = (
                pool.num_owned,
                pool.copies.num_retained(RetentionClass.PREEMPTED),
                pool.copies.num_retained(RetentionClass.WANTED),
            )
            assert left == (0, 0, 0), f"{tier}: owned, kept for the preempted, kept for the waiting: {left}"


def walk(seed: int) -> None:
    one = Walk(seed)
    for _ in range(60):
        one.event()
        for _ in range(one.rng.choice([0, 1, 1, 2, 8])):
            one.step()
    one.finish()
    one.assert_all_right()


def some_slow(seeds: Sequence[int], fast: int) -> list[object]:
    """Return the seeds; those behind the first `fast` run with `make test-slow` only."""
    return [*seeds[:fast], *(pytest.param(seed, marks=pytest.mark.slow) for seed in seeds[fast:])]


@pytest.mark.parametrize("seed", some_slow(range(30), fast=10))
@pytest.mark.sampled(3)
def test_every_request_ends_right_and_every_quota_holds_in_a_hostile_walk(seed: int) -> None:
    walk(seed)


@pytest.mark.parametrize("seed", some_slow(fresh_seeds(20), fast=6))
@pytest.mark.sampled(2)
def test_a_hostile_walk_with_a_new_seed(seed: int) -> None:
    walk(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_a_thousand_hostile_walks(seed: int) -> None:
    walk(seed)
