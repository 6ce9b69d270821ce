"""The cache that tenants share by weight."""

import random
from collections import Counter

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.system.shared_cache import SharedCache
from tiercel.values.ids import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def test_a_value_is_found_by_the_tenant_that_put_it_only() -> None:
    cache = SharedCache[str, int](100)
    cache.put(A, "x", 1, 10)
    assert (cache.get(A, "x"), cache.get(B, "x")) == (1, None)
    cache.put(B, "x", 2, 10)
    assert (cache.get(A, "x"), cache.get(B, "x"), cache.held_bytes, len(cache)) == (1, 2, 20, 2)
    assert (cache.pop(A, "x"), cache.pop(A, "x"), cache.held_bytes) == (1, None, 10)


def test_the_value_used_least_recently_goes_first() -> None:
    cache = SharedCache[int, int](30)
    for key in range(3):
        cache.put(A, key, key, 10)
    cache.get(A, 0)
    cache.put(A, 3, 3, 10)
    assert [key for key in range(4) if cache.get(A, key) is not None] == [0, 2, 3]
    cache.put(A, 4, 4, 31)  # larger than the limit
    assert (cache.get(A, 4), len(cache)) == (None, 3)
    cache.put(A, 3, 5, 12)  # in place of the earlier one
    assert (cache.get(A, 3), cache.held_bytes <= 30) == (5, True)


def test_tenants_share_by_weight() -> None:
    weights = {A: 3.0, B: 1.0}
    cache = SharedCache[int, int](40, lambda tenant: weights[tenant])
    for key in range(100):
        cache.put(A, key, key, 1)
    for key in range(100):
        cache.put(B, key, key, 1)
    held = {tenant: sum(cache.get(tenant, key) is not None for key in range(100)) for tenant in (A, B)}
    assert held == {A: 30, B: 10}


@pytest.mark.parametrize("seed", fast_and_slow([8, *fresh_seeds(1)], list(range(20))))
def test_a_tenant_below_its_share_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    weights = {A: 1.0, B: rng.choice([0.5, 2.0]), C: 4.0}
    limit = 1000
    cache = SharedCache[int, int](limit, lambda tenant: weights[tenant])
    sizes: dict[tuple[TenantId, int], int] = {}
    lost: Counter[bool] = Counter()
    for _ in range(3000):
        tenant, key = rng.choice([A, B, C]), rng.randrange(60)
        held = {pair: size for pair, size in sizes.items() if cache.get(*pair) is not None}
        sums = {one: sum(size for (owner, _), size in held.items() if owner == one) for one in weights}
        sizes[tenant, key] = rng.randrange(1, 60)
        cache.put(tenant, key, key, sizes[tenant, key])
        total = sum(weights.values())
        for pair in held:
            if cache.get(*pair) is None:
                now = sums[pair[0]] + (sizes[tenant, key] if pair[0] == tenant else 0)
                lost[now > limit * weights[pair[0]] / total] += 1
        now = sum(size for pair, size in sizes.items() if cache.get(*pair) is not None)
        assert cache.held_bytes == now <= limit
    assert lost[True]
    assert not lost[False]
