"""Byte hit rates of eviction policies on block traces.

    python benchmarks/cache_policy.py [--trace NAME ...] [--window 32] [--wanted 0.5]
    python benchmarks/cache_policy.py --shares 0,0.25,0.5,0.8
    python benchmarks/cache_policy.py --generate

Replays the traces of `benchmarks/traces/` through the real SlotPool as a cache of several sizes. All blocks have the
same bytes, so a share of blocks is a share of bytes. A prompt hits its longest cached prefix. Columns:

    lru      the pool with one segment
    ours     the pool's segments: seen once, reused
    gdsf     clock + uses * cost to compute again, leaves of the prefix tree only (local to this file)
    plan     ours, with the next W requests known and the blocks that they need marked WANTED, as the engine does
    look W   heuristic with the next W requests known: evicts blocks that none needs, least recent first; not a bound
    belady   knows the whole future: the most hits that any policy can reach (tests/benchmarks/test_belady.py)

Exit code 1 if in any row `plan` has less than 80 % of Belady's hits or fewer than LRU, if GDSF is more than one point
better than `ours`, or if any policy exceeds Belady. With `--window 0`, which publishes nothing, the check must fail.

A trace has one line per request: tenant, blocks of the prompt, and the chain of blocks (prompt, then answer) as runs
first+length of block numbers. A block is 128 tokens. `--generate` writes the traces again from their seed.
"""

import argparse
import heapq
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import PROTECTED_SHARE, SlotPool
from tiercel.kvcache.slot_state import SlotState
from tiercel.values.ids import BlockKey, SlotId

TRACES = Path(__file__).parent / "traces"
NAMES = ("conversations", "scans", "long", "mixed")
CACHE_SHARES = (0.05, 0.1, 0.2, 0.4)  # of the distinct blocks of a trace
BLOCK_TOKENS = 128
SEED = 3
WANTED_SHARE = 0.5  # of the cache, at most, for what waits
NEVER = 1 << 30
MIN_OF_BELADY = 0.8  # of the hits, by ours with the plan, in every row
MAX_GAIN_OF_GDSF = 0.01  # of the blocks asked for; with a larger gain GDSF would be worth building


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a trace."""

    tenant: int
    prompt: int  # leading blocks that are looked up
    chain: tuple[int, ...]  # block numbers, prompt and answer


def block_cost(depth: int) -> float:
    """Return the microseconds to recompute a block: an 8B model on an H200, from rates at 0 and 32k tokens."""
    return 26.8 + 13.9 * depth * BLOCK_TOKENS / 32_768


# ---- traces


class Generator:
    """Draws requests in virtual time; every chain has its own runs of block numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.next_block = 0
        self.events: list[tuple[float, int, int, list[tuple[int, int]]]] = []
        self.systems = [self.fresh(length) for length in (8, 16, 24, 48)]

    def fresh(self, length: int, room: int = 0) -> tuple[int, int]:
        """Return a run of unused block numbers, with numbers to spare."""
        first = self.next_block
        self.next_block += max(length, room)
        return first, length

    def add(self, at_s: float, tenant: int, prompt: int, runs: list[tuple[int, int]]) -> None:
        self.events.append((at_s, tenant, prompt, runs))

    def conversations(self, count: int, span_s: float) -> None:
        """Draw conversations: 5.5 turns on average, exponential think times, one of four shared system prompts each."""
        rng = self.rng
        for _ in range(count):
            tenant = rng.choices(range(4), (4, 3, 2, 1))[0]
            turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / 5.5))
            first, length = self.fresh(0, room=24 * turns)
            at_s = rng.uniform(0, span_s)
            for _ in range(turns):
                length += rng.randint(1, 12)  # question
                prompt = self.systems[tenant][1] + length
                length += rng.randint(1, 8)  # answer
                self.add(at_s, tenant, prompt, [self.systems[tenant], (first, length)])
                at_s += 5 + rng.expovariate(1 / 60)

    def scans(self, count: int, span_s: float) -> None:
        """Draw documents that are read once."""
        for _ in range(count):
            length = self.rng.randint(60, 240)
            self.add(self.rng.uniform(0, span_s), 3, length, [self.fresh(length)])

    def long_contexts(self, count: int, span_s: float) -> None:
        """Draw prompts as long as in Mooncake's conversation trace (median 6.9k, mean 12k); a part is repeated."""
        rng = self.rng
        known: list[tuple[int, int]] = []
        for at_s in sorted(rng.uniform(0, span_s) for _ in range(count)):
            if known and rng.random() < 0.45:
                first, length = known[-1 - min(int(rng.expovariate(1 / 25)), len(known) - 1)]
                shared = max(1, int(length * rng.uniform(0.5, 1)))
                runs = [(first, shared), self.fresh(rng.randint(2, 12))]
            else:
                length = min(max(int(rng.lognormvariate(math.log(54), 1.05)), 2), 800)
                runs = [self.fresh(length)]
                known.append(runs[0])
            self.add(at_s, rng.randrange(4), sum(length for _, length in runs) - 1, runs)

    def text(self) -> str:
        lines = [
            f"{tenant} {prompt} {' '.join(f'{first}+{length}' for first, length in runs)}"
            for _, tenant, prompt, runs in sorted(self.events)
        ]
        return "\n".join(lines) + "\n"


def generate(name: str) -> str:
    """Return the text of one shipped trace."""
    generator = Generator(SEED)
    match name:
        case "conversations":
            generator.conversations(320, 2400)
        case "scans":
            generator.conversations(220, 2400)
            generator.scans(260, 2700)
        case "long":
            generator.long_contexts(900, 3600)
        case _:
            generator.conversations(160, 2400)
            generator.scans(80, 2700)
            generator.long_contexts(300, 2700)
    return generator.text()


def read(name: str) -> list[Visit]:
    """Read a shipped trace."""
    visits: list[Visit] = []
    for line in (TRACES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        tenant, prompt, *runs = line.split()
        pairs = [run.split("+") for run in runs]
        chain = tuple(block for first, length in pairs for block in range(int(first), int(first) + int(length)))
        visits.append(Visit(int(tenant), int(prompt), chain))
    return visits


# ---- policies


@dataclass(slots=True)
class Score:
    """Hit rates of a replay: by blocks and by the time to compute them."""

    hits: int = 0
    asked: int = 0
    saved: float = 0.0
    cost: float = 0.0

    def count(self, visit: Visit, hits: int) -> None:
        self.hits += hits
        self.asked += visit.prompt
        self.saved += sum(map(block_cost, range(hits)))
        self.cost += sum(map(block_cost, range(visit.prompt)))

    @property
    def rate(self) -> float:
        return self.hits / self.asked


class PoolCache:
    """The real pool as a cache: hits are held, other blocks are allocated, and a table is freed from its end."""

    def __init__(
        self,
        blocks: int,
        *,
        has_segments: bool = True,
        share: float = PROTECTED_SHARE,
        window: int = 0,
        wanted: float = WANTED_SHARE,
    ) -> None:
        self.pool = SlotPool(blocks, protected_share=share)
        self.has_segments = has_segments
        self.window = window
        self.most_wanted = int(wanted * blocks)
        self.wishes = Counter[int]()  # blocks that waiting requests need
        self.marked: list[bool] = []

    def replay(self, visits: list[Visit]) -> Score:
        score = Score()
        self.marked = [False] * len(visits)
        for number, visit in enumerate(visits):
            if self.window:
                self.mark(visits, number)
            score.count(visit, self.visit(visit))
            self.pool.commit(number)
        return score

    def find(self, block: int) -> SlotId | None:
        return self.pool.slot_by_key.get(BlockKey(block.to_bytes(32, "big")))

    def visit(self, visit: Visit) -> int:
        pool, chain = self.pool, visit.chain
        table: list[SlotId] = []
        for block in chain[: visit.prompt]:
            slot = self.find(block)
            if slot is None:
                break
            pool.hold(slot, is_reuse=self.has_segments)
            table.append(slot)
        hits = len(table)
        for block, slot in zip(chain[hits:], pool.take_many(len(chain) - hits), strict=True):
            # Blocks after a gap may be cached: the table takes the canonical copy, as at a commit.
            canonical = pool.publish(slot, BlockKey(block.to_bytes(32, "big")))
            if canonical != slot:
                pool.hold(canonical, is_reuse=self.has_segments)
                pool.drop(slot, 0)
            table.append(canonical)
        for block, slot in zip(reversed(chain), reversed(table), strict=True):
            if self.wishes[block]:
                pool.copies.set_retention(slot, RetentionClass.WANTED)
            elif pool.copies.retention(slot) is RetentionClass.WANTED:
                pool.copies.set_retention(slot, RetentionClass.REUSED)
            pool.drop(slot, 0)
        return hits

    def mark(self, visits: list[Visit], number: int) -> None:
        """Mark the blocks that the next requests need, in order, up to the share for such blocks."""
        pool = self.pool
        if self.marked[number]:
            self.wishes.subtract(visits[number].chain[: visits[number].prompt])
        for ahead in range(number + 1, min(number + 1 + self.window, len(visits))):
            if self.marked[ahead]:
                continue
            if pool.copies.num_retained(RetentionClass.WANTED) >= self.most_wanted:
                return
            self.marked[ahead] = True
            needed = visits[ahead].chain[: visits[ahead].prompt]
            self.wishes.update(needed)
            for block in reversed(needed):
                slot = self.find(block)
                if slot is not None and pool.states[slot] == SlotState.CACHED:
                    pool.copies.set_retention(slot, RetentionClass.WANTED)


class HeapCache:
    """A cache that evicts the unpinned block with the lowest priority; priorities may change."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.priority: dict[int, tuple[float, ...]] = {}  # of every cached block
        self.heap: list[tuple[tuple[float, ...], int]] = []

    def put(self, block: int, priority: tuple[float, ...]) -> None:
        self.priority[block] = priority
        heapq.heappush(self.heap, (priority, block))

    def evict(self, count: int, pinned: frozenset[int]) -> None:
        aside: list[tuple[tuple[float, ...], int]] = []
        while count > 0:
            entry = heapq.heappop(self.heap)
            priority, block = entry
            if self.priority.get(block) != priority:
                continue
            if block in pinned:
                aside.append(entry)
                continue
            self.lose(block)
            count -= 1
        for entry in aside:
            heapq.heappush(self.heap, entry)

    def lose(self, block: int) -> None:
        del self.priority[block]

    def fit(self, visit: Visit) -> int:
        """Evict as many blocks as a request lacks. Return the hits of its prompt."""
        pinned = frozenset(visit.chain)
        hits = next((depth for depth in range(visit.prompt) if visit.chain[depth] not in self.priority), visit.prompt)
        missing = sum(block not in self.priority for block in visit.chain)
        self.evict(len(self.priority) + missing - self.blocks, pinned)
        return hits


class Lookahead(HeapCache):
    """A heuristic that knows the next `window` requests: evicts blocks that none of them needs, by recency."""

    def __init__(self, blocks: int, window: int) -> None:
        super().__init__(blocks)
        self.window = window

    def replay(self, visits: list[Visit]) -> Score:
        score = Score()
        following = next_uses(visits)
        for number, visit in enumerate(visits):
            score.count(visit, self.fit(visit))
            for depth, (block, after) in enumerate(zip(visit.chain, following[number], strict=True)):
                is_known = after <= number + self.window
                self.put(block, (1, -after, -depth) if is_known else (0, number, -depth))
            entering = number + 1 + self.window
            if entering < len(visits):
                for depth, block in enumerate(visits[entering].chain[: visits[entering].prompt]):
                    if self.priority.get(block, (1,))[0] == 0:
                        self.put(block, (1, -entering, -depth))
        return score


class Belady(HeapCache):
    """Evicts the block whose next hit is furthest in the future, the deepest among equals: the most hits possible."""

    def replay(self, visits: list[Visit]) -> Score:
        score = Score()
        for visit, following in zip(visits, next_uses(visits), strict=True):
            score.count(visit, self.fit(visit))
            for depth, (block, after) in enumerate(zip(visit.chain, following, strict=True)):
                self.put(block, (-after, -depth))
        return score


def next_uses(visits: list[Visit]) -> list[list[int]]:
    """Return, for every block of every request, the next request whose prompt has it.

    NEVER: there is none, or an answer writes the block into the cache before a prompt needs it.
    """
    following: list[list[int]] = []
    after: dict[int, int] = {}
    for number in range(len(visits) - 1, -1, -1):
        visit = visits[number]
        following.append([after.get(block, NEVER) for block in visit.chain])
        after.update(dict.fromkeys(visit.chain[: visit.prompt], number))
        after.update(dict.fromkeys(visit.chain[visit.prompt :], NEVER))
    return following[::-1]


class Gdsf(HeapCache):
    """Greedy dual: clock + uses * cost, over the leaves of the tree of prefixes (RAGCache)."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.clock = 0.0
        self.uses = Counter[int]()
        self.parent: dict[int, int] = {}
        self.children = Counter[int]()  # cached ones
        self.worth: dict[int, float] = {}

    def replay(self, visits: list[Visit]) -> Score:
        score = Score()
        for visit in visits:
            score.count(visit, self.fit(visit))
            for depth, block in enumerate(visit.chain):
                if block not in self.priority:
                    self.uses[block] = 0
                    if depth:
                        self.parent[block] = visit.chain[depth - 1]
                        self.children[visit.chain[depth - 1]] += 1
                    self.priority[block] = ()
                self.uses[block] += 1
                self.worth[block] = self.clock + self.uses[block] * block_cost(depth)
                self.priority[block] = ()
            for block in visit.chain:
                if not self.children[block]:
                    self.put(block, (self.worth[block],))
        return score

    def lose(self, block: int) -> None:
        self.clock = max(self.clock, self.priority[block][0])
        super().lose(block)
        parent = self.parent.pop(block, None)
        if parent is not None:
            self.children[parent] -= 1
            if not self.children[parent] and parent in self.priority:
                self.put(parent, (self.worth[parent],))


# ---- report


def compare(name: str, window: int, wanted: float) -> list[str]:
    """Print the table of one trace. Return the checks that its rows miss."""
    broken: list[str] = []
    visits = read(name)
    distinct = len({block for visit in visits for block in visit.chain})
    largest = max(len(visit.chain) for visit in visits)
    endless = PoolCache(distinct + largest).replay(visits).rate
    print(f"\n{name}: {len(visits)} requests, {distinct} blocks, an endless cache hits {endless:.1%}")
    print("  cache    lru   ours   gdsf   plan  look W  belady | plan/look W  plan/belady | saved: ours  gdsf")
    for share in CACHE_SHARES:
        blocks = max(int(share * distinct), largest + 1)
        lru = PoolCache(blocks, has_segments=False).replay(visits)
        ours = PoolCache(blocks).replay(visits)
        gdsf = Gdsf(blocks).replay(visits)
        plan = PoolCache(blocks, window=window, wanted=wanted).replay(visits)
        near = Lookahead(blocks, window).replay(visits)
        full = Belady(blocks).replay(visits)
        print(
            f"{blocks:7d} {lru.rate:6.1%} {ours.rate:6.1%} {gdsf.rate:6.1%} {plan.rate:6.1%} {near.rate:7.1%}"
            f" {full.rate:7.1%} | {plan.rate / near.rate:11.1%} {plan.rate / full.rate:12.1%}"
            f" | {ours.saved / ours.cost:11.1%} {gdsf.saved / gdsf.cost:5.1%}"
        )
        gains = gdsf.rate - ours.rate, gdsf.saved / gdsf.cost - ours.saved / ours.cost
        checks = {
            f"the plan has less than {MIN_OF_BELADY:.0%} of Belady's hits": plan.rate < MIN_OF_BELADY * full.rate,
            "the plan has fewer hits than LRU": plan.hits < lru.hits,
            "GDSF is more than a point better than the segments": max(gains) > MAX_GAIN_OF_GDSF,
            "a policy has more hits than Belady": max(lru.hits, ours.hits, gdsf.hits, plan.hits, near.hits) > full.hits,
        }
        broken += [f"{name}, {blocks} blocks: {text}" for text, is_broken in checks.items() if is_broken]
    return broken


def sweep(name: str, shares: list[float]) -> None:
    """Print the hit rates of the segments by protected share."""
    visits = read(name)
    distinct = len({block for visit in visits for block in visit.chain})
    largest = max(len(visit.chain) for visit in visits)
    print(f"\n{name}: hit rate by protected share")
    print("  cache " + "".join(f"{share:7.2f}" for share in shares))
    for part in CACHE_SHARES:
        blocks = max(int(part * distinct), largest + 1)
        rates = [PoolCache(blocks, share=share).replay(visits).rate for share in shares]
        print(f"{blocks:7d} " + "".join(f"{rate:7.1%}" for rate in rates))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--window", type=int, default=32, help="requests that are known ahead")
    parser.add_argument("--wanted", type=float, default=WANTED_SHARE, help="share of the cache for what they need")
    parser.add_argument("--shares", help="protected shares to compare, instead of policies")
    parser.add_argument("--generate", action="store_true", help="write the traces again")
    args = parser.parse_args()
    if args.generate:
        TRACES.mkdir(exist_ok=True)
        for name in args.trace:
            (TRACES / f"{name}.txt").write_text(generate(name), encoding="utf-8")
        return 0
    broken: list[str] = []
    for name in args.trace:
        if args.shares:
            sweep(name, [float(share) for share in args.shares.split(",")])
        else:
            broken += compare(name, args.window, args.wanted)
    for text in broken:
        print(f"FAILED: {text}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
