"""A book of sequences and a planner over a cache that only counts blocks."""

from collections.abc import Mapping
from dataclasses import dataclass

from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import Policy, open_policy
from tiercel.scheduler.preemption_limiter import StarvationCounter
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import Plan
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import DEFAULT_TENANT

BLOCK = 4


@dataclass(frozen=True)
class Hit:
    """A scripted prefix hit."""

    tokens: int
    load_blocks: int = 0

    @property
    def hit_blocks(self) -> int:
        return self.tokens // BLOCK - self.load_blocks


class CountingCache:
    """A cache that counts blocks. Its prefix hits are scripted; None: another sequence computes the prefix."""

    block_size = BLOCK

    def __init__(self, blocks: int, hits: Mapping[int, int | None] | None = None) -> None:
        self.quota_by_tenant: dict[str, int] = {}  # blocks
        self.tenant_by_seq: dict[int, str] = {}
        self.blocks_by_seq: dict[int, int] = {}
        self.available_blocks = blocks
        self.coming_blocks = self.touched_blocks = 0
        self.released: list[int] = []
        self._hits = hits or {}

    def num_blocks(self, seq: SeqId) -> int:
        return self.blocks_by_seq.get(seq, 0)

    def quota_left(self, seq: SeqId) -> int | None:
        tenant = self.tenant_by_seq[seq]
        held = sum(blocks for one, blocks in self.blocks_by_seq.items() if self.tenant_by_seq[one] == tenant)
        return self.quota_by_tenant[tenant] - held if tenant in self.quota_by_tenant else None

    def match(self, seq: SeqId, *, may_load: bool = True) -> Hit | None:
        hit = self._hits.get(seq, 0)
        if hit:
            self.blocks_by_seq[seq] = hit // BLOCK
        return None if hit is None else Hit(hit)

    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]:
        return 0, 0, 0

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        missing = max(0, -(-tokens // BLOCK) - self.num_blocks(seq))
        if missing > self.available_blocks:
            return False
        self.available_blocks -= missing
        self.blocks_by_seq[seq] = self.num_blocks(seq) + missing
        return True

    def claim(self, seq: SeqId, start: int, end: int) -> None:
        pass

    def follow(self, seq: SeqId, start: int) -> None:
        pass

    def computing(self, seq: SeqId, tokens: int) -> SeqId | None:
        return None

    def release(self, seq: SeqId, *, spills: bool = False) -> None:
        self.available_blocks += self.blocks_by_seq.pop(seq, 0)
        self.released.append(seq)


class PlannerBench:
    """A book, a planner and a cache that lives across steps."""

    def __init__(self, blocks: int = 100, seqs: int = 8, tokens: int = 16, threshold: int = 0,
                 hits: Mapping[int, int | None] | None = None, policy: Policy | None = None,
                 block_bytes: int = 0) -> None:  # fmt: skip
        self.now_s = 0.0
        self.book = SequenceBook(policy or open_policy("fcfs"), 1000, (2,))
        self.starvation = StarvationCounter()
        limits = StepLimits(seqs, tokens, threshold, block_bytes=block_bytes)
        self.planner = Planner(self.book, limits, starvation=self.starvation)
        self.cache = CountingCache(blocks, hits)
        self.block_bytes = block_bytes  # 0: no quotas

    def submit(
        self, seq: int, prompt: int, max_tokens: int = 50, arrival_s: float | None = None, band: int = 0,
        tenant: str = DEFAULT_TENANT, lookup_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.cache.tenant_by_seq[seq] = tenant
        share = self.book.policy.share(TenantId(tenant))
        if self.block_bytes and share is not None and share.kv_quota.hbm is not None:
            self.cache.quota_by_tenant[tenant] = share.kv_quota.hbm // self.block_bytes
        self.book.add(
            Request(
                id=SeqId(seq),
                prompt=pack_tokens([1] * prompt),
                params=SamplingParams(max_tokens=max_tokens, prompt_lookup_num_tokens=lookup_tokens),
                arrival_s=float(seq) if arrival_s is None else arrival_s,
                band=band,
                tenant=TenantId(tenant),
            ),
            self.now_s,
        )

    def launch(self) -> Plan:
        plan = self.planner.plan(self.cache, self.now_s)
        self.book.defer(plan, self.now_s)
        self.book.launch(plan, self.now_s)
        self.book.check_integrity()
        return plan

    def commit(self, plan: Plan) -> None:
        samples = sum(piece.num_sampled for batch in plan.nano_batches for piece in batch.slices)
        for finished in self.book.commit(plan.nano_batches, [5] * samples, self.now_s).finished:
            self.cache.release(finished.seq)
        self.book.check_integrity()

    def step(self) -> Plan:
        plan = self.launch()
        self.commit(plan)
        return plan


def slices(plan: Plan) -> list[tuple[int, int, int]]:
    return [(piece.seq, piece.start, piece.length) for batch in plan.nano_batches for piece in batch.slices]


def victims(plan: Plan) -> tuple[int, ...]:
    return tuple(one.victim for one in plan.preemptions)
