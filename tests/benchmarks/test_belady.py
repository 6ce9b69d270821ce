"""The clairvoyant policies of benchmarks/cache_policy.py: Belady compared with the best of all possible evictions."""

import random
from functools import cache
from itertools import combinations

import pytest

from benchmarks.cache_policy import Belady, Gdsf, Lookahead, PoolCache, Visit


def tiny_trace(seed: int) -> tuple[int, list[Visit]]:
    """Return a cache size and requests whose chains are paths of one small tree, as prefixes are."""
    rng = random.Random(seed)
    parents = {block: rng.randrange(-1, block) for block in range(rng.randint(6, 10))}  # -1: a root
    visits: list[Visit] = []
    for _ in range(rng.randint(8, 12)):
        path, block = [], rng.randrange(len(parents))
        while block >= 0:
            path.append(block)
            block = parents[block]
        chain = tuple(reversed(path))
        visits.append(Visit(0, rng.randint(min(len(chain), 1), len(chain)), chain))
    longest = max(len(visit.chain) for visit in visits)
    return rng.randint(longest, longest + 2), visits


def hits_of(visit: Visit, cached: frozenset[int]) -> int:
    return next((depth for depth in range(visit.prompt) if visit.chain[depth] not in cached), visit.prompt)


def best_hits(blocks: int, visits: list[Visit]) -> int:
    """Return the most hits that any sequence of evictions can have."""

    @cache
    def best(number: int, cached: frozenset[int]) -> int:
        if number == len(visits):
            return 0
        visit = visits[number]
        others = cached.difference(visit.chain)
        kept = min(len(others), blocks - len(visit.chain))  # keeping fewer blocks is never better
        after = [best(number + 1, frozenset(visit.chain).union(some)) for some in combinations(others, kept)]
        return hits_of(visit, cached) + max(after)

    return best(0, frozenset())


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_belady_is_as_good_as_the_best_of_all_choices(first: int) -> None:
    losses = 0
    for seed in (*range(first, first + 100), random.randrange(1 << 40)):
        blocks, visits = tiny_trace(seed)
        assert Belady(blocks).replay(visits).hits == best_hits(blocks, visits), f"seed {seed}"
        losses += Lookahead(blocks, 1).replay(visits).hits < best_hits(blocks, visits)
    assert losses > 0  # the traces distinguish policies: one that knows a single request ahead loses some


@pytest.mark.parametrize("seed", range(50))
def test_no_policy_has_more_hits_than_belady(seed: int) -> None:
    blocks, visits = tiny_trace(1000 + seed)
    most = Belady(blocks).replay(visits).hits
    others = (PoolCache(blocks), PoolCache(blocks, window=4), Gdsf(blocks), Lookahead(blocks, 2))
    assert all(other.replay(visits).hits <= most for other in others)
