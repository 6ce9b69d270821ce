"""News of announced keys: the fronts know what any tier holds, on random walks over the indices of two tiers."""

import hashlib
import random

import numpy as np
import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.kvcache.key_index import KeyIndex
from tiercel.kvcache.key_news import KeyNews
from tiercel.kvcache.slot_index import SlotIndex
from tiercel.values.block_key import is_announced, key_head
from tiercel.values.ids import BlockKey, SlotId

SEEDS = fast_and_slow([*range(4), *fresh_seeds(2)], range(4, 40))
KEYS = [BlockKey(hashlib.sha256(bytes([number % 256, number // 256])).digest()) for number in range(400)]


@pytest.mark.parametrize("seed", SEEDS)
def test_fronts_know_what_any_tier_holds(seed: int) -> None:
    rng, tiers, news = random.Random(seed), (KeyIndex(501), KeyIndex(501)), KeyNews()
    for key in KEYS[:20]:
        tiers[0].name(SlotId(1 + KEYS.index(key)), key)
    for tier in tiers:
        tier.tell(news)
    told = set[int]()
    free = [set(range(1, 501)) - set(np.flatnonzero(tier.all_named).tolist()) for tier in tiers]
    for _ in range(200):
        number = rng.randrange(2)
        tier = tiers[number]
        match rng.randrange(5):
            case 0:
                slot = rng.choice(sorted(free[number]))
                if tier.name(SlotId(slot), rng.choice(KEYS)) == slot:
                    free[number].discard(slot)
            case 1:
                slot = rng.randrange(1, 501)
                tier.unname(slot)
                free[number].add(slot)
            case 2:
                slots = rng.sample(sorted(free[number]), min(len(free[number]), rng.randint(1, 60)))
                is_named = tier.name_many(np.array(slots, np.intp), rng.sample(KEYS, len(slots)))
                free[number] -= {slot for slot, named in zip(slots, is_named.tolist(), strict=True) if named}
            case 3:
                slots = np.array(rng.sample(range(1, 501), rng.randint(1, 120)), np.intp)
                named = slots[tier.all_named[slots] > 0]
                tier.unname_many(SlotIndex(named))
                free[number].update(named.tolist())
            case _:
                tier.tidy()
        held = {key_head(key) for tier in tiers for key in tier if is_announced(key)}
        assert news.heads == held
        if rng.random() < 0.3:
            changes = news.take()
            assert not told & set(changes.stored)
            assert told >= set(changes.dropped)
            told = (told | set(changes.stored)) - set(changes.dropped)
            assert told == held
            assert news.take().stored == news.take().dropped == ()
