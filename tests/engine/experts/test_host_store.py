"""Experts in host memory: slots of a device are not overwritten while queued work may still read them."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.engine.experts.checking_lane import CheckingLane
from tests.seeds import fresh_seeds
from tiercel.engine.experts.cache import ExpertCache
from tiercel.engine.experts.host_store import HostExperts
from tiercel.values.clock import ManualClock
from tiercel.values.errors import DeviceLostError

CPU = torch.device("cpu")


def open_cache(lane: CheckingLane, slots: int) -> tuple[ExpertCache, Tensor]:
    store = HostExperts(CPU, lane)
    for number in range(8):
        parts: Sequence[Tensor] = (torch.full((100,), number, dtype=torch.uint8), torch.zeros(28, dtype=torch.uint8))
        assert store.append(parts) == number
    assert (store.record_bytes, store.stored_bytes, store.num_records) == (256, 8 * 128, 8)
    opened = store.open_slots(slots)
    rows = opened.memory.view(slots, 256)
    lane.slot_of = {rows[slot].data_ptr(): slot for slot in range(slots)}
    cache = ExpertCache(opened, 2, ManualClock())
    cache.start()
    return cache, rows


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(3)])
def test_a_slot_is_overwritten_only_behind_its_last_use(seed: int) -> None:
    rng, lane = random.Random(seed), CheckingLane()
    cache, rows = open_cache(lane, rng.randrange(1, 8))
    for _ in range(200):
        wanted = rng.sample(range(8), rng.randrange(1, 9))
        for key, slot in cache.take(wanted, rng.sample(range(8), rng.randrange(0, 9))):
            lane.use(slot)
            assert rows[slot, 0] == key, seed
        if rng.random() < 0.1:  # a step that fails
            taking = cache.take(wanted)
            lane.use(next(taking)[1])
            taking.close()
    assert not lane.too_early, seed
    assert cache.gauges().evictions
    cache.close()


def test_a_copy_that_fails_ends_the_engine() -> None:
    lane = CheckingLane()
    cache, _ = open_cache(lane, 2)
    lane.fails = True
    with pytest.raises(DeviceLostError, match="an expert cannot be copied to the device: CUDA error"):
        list(cache.take([3]))
    cache.close()
