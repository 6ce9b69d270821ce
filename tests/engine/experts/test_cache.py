"""The slots for experts: which are kept, what is fetched when, and what a failed read does."""

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.seeds import fresh_seeds
from tiercel.device.volume_file import FileCalls
from tiercel.engine.experts.cache import ExpertCache
from tiercel.engine.experts.file import ExpertFile
from tiercel.values.clock import ManualClock
from tiercel.values.errors import ConfigError, DeviceLostError


def bytes_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Gate:
    """Reads that may be held up, damaged or counted."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.damaged = 0  # reads that return wrong bytes
        self.reads: list[int] = []

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(fd, views, offset)
        assert self.open.wait(20)
        self.reads.append(offset)
        if self.damaged:
            self.damaged -= 1
            views[0][0] ^= 1
        return count


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def file(tmp_path: Path, gate: Gate) -> Iterator[ExpertFile]:
    """Eight records with their number in every byte, of different lengths."""
    made = ExpertFile.create(tmp_path, FileCalls(preadv=gate.preadv))
    for number in range(8):
        whole = bytes([number]) * (5000 + number)
        assert made.append([bytes_of(whole[:100]), bytes_of(whole[100:])]) == number
    gate.reads.clear()
    yield made
    gate.open.set()
    made.close()


def open_cache(file: ExpertFile, slots: int, **more: bool) -> tuple[ExpertCache, memoryview]:
    opened = file.open_slots(slots)
    cache = ExpertCache(opened, 2, ManualClock(), **more)
    cache.start()
    return cache, opened.memory.numpy().data


def take(cache: ExpertCache, memory: memoryview, wanted: list[int], ahead: list[int] | None = None) -> list[int]:
    """Take experts, and check their bytes while they may be used."""
    size, found = len(memory) // cache.gauges().slots, list[int]()
    for key, slot in cache.take(wanted, ahead or []):
        assert bytes(memory[slot * size : slot * size + 5000]) == bytes([key]) * 5000, key
        found.append(key)
    return found


def test_experts_in_memory_are_hits_and_come_first(file: ExpertFile) -> None:
    cache, memory = open_cache(file, 4)
    assert sorted(take(cache, memory, [0, 1, 2])) == [0, 1, 2]
    assert take(cache, memory, [5, 1, 0])[:2] == [1, 0]  # while the other one is read
    gauges = cache.gauges()
    assert (gauges.hits, gauges.misses, gauges.evictions, gauges.experts, gauges.slots) == (2, 4, 0, 8, 4)
    assert gauges.fetched_bytes == sum(5000 + key for key in (0, 1, 2, 5))
    assert gauges.stalls
    cache.close()


def test_the_expert_with_the_fewest_uses_is_evicted(file: ExpertFile, gate: Gate) -> None:
    cache, memory = open_cache(file, 3)
    for wanted in ([0, 1], [0, 2], [0, 1]):
        take(cache, memory, wanted)
    take(cache, memory, [7])  # instead of 2
    gate.reads.clear()
    take(cache, memory, [0, 1, 7])
    assert not gate.reads
    assert cache.gauges().evictions == 1
    cache.close()


def test_more_experts_than_slots_pass_through_them(file: ExpertFile) -> None:
    cache, memory = open_cache(file, 2)
    for _ in range(3):
        assert sorted(take(cache, memory, list(range(8)), [1, 2, 3])) == list(range(8))
    cache.close()


def test_predicted_experts_are_there_when_they_are_asked_for(file: ExpertFile, gate: Gate) -> None:
    cache, memory = open_cache(file, 4)
    take(cache, memory, [0], ahead=[3, 4])
    before = cache.gauges()
    while len(gate.reads) < 3:  # 0, then 3 and 4 without being asked for again
        pass
    assert take(cache, memory, [3, 4]) == [3, 4]
    after = cache.gauges()
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 0)
    assert after.fetched_ahead == 2
    cache.close()


def test_without_predictions_nothing_is_fetched_ahead(file: ExpertFile, gate: Gate) -> None:
    cache, memory = open_cache(file, 4, fetches_ahead=False)
    take(cache, memory, [0], ahead=[3, 4])
    take(cache, memory, [1])
    assert len(gate.reads) == 2
    assert cache.gauges().fetched_ahead == 0
    cache.close()


def test_a_wrong_prediction_that_nobody_fetches_yet_is_given_up(file: ExpertFile, gate: Gate) -> None:
    cache, memory = open_cache(file, 8)
    gate.open.clear()
    taking = cache.take([0], [1, 2, 3, 4, 5])
    gate.open.set()
    assert next(taking)[0] == 0
    list(taking)
    assert sorted(take(cache, memory, [6, 7])) == [6, 7]
    cache.close()


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_read_is_tried_again_once(file: ExpertFile, gate: Gate, damaged: int) -> None:
    cache, memory = open_cache(file, 2)
    gate.damaged = damaged
    if damaged == 1:
        assert take(cache, memory, [6]) == [6]
    else:
        for _ in range(2):  # now and later
            with pytest.raises(DeviceLostError, match=r"an expert cannot be read from the SSD folder .*: other bytes"):
                take(cache, memory, [6])
    cache.close()


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(3)])
def test_random_layers_find_their_experts(file: ExpertFile, seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.randrange(1, 9)
    cache, memory = open_cache(file, slots, fetches_ahead=rng.random() < 0.8)
    asked = 0
    for _ in range(300):
        wanted = rng.sample(range(8), rng.randrange(1, 9))
        ahead = rng.sample(range(8), rng.randrange(0, 9))
        asked += len(wanted)
        assert sorted(take(cache, memory, wanted, ahead)) == sorted(wanted), seed
        if rng.random() < 0.1:  # a step that fails
            taking = cache.take(wanted, ahead)
            next(taking)
            taking.close()
            asked += len(wanted)
    gauges = cache.gauges()
    assert gauges.hits + gauges.misses == asked, seed
    cache.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(ConfigError, match=r"--expert-memory: cannot write to the folder .*/a"):
        ExpertFile.create(tmp_path / "a")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return 4096 if offset else os.pwritev(fd, views, offset)

    file = ExpertFile.create(tmp_path, FileCalls(pwritev=pwritev))
    file.append([bytes_of(bytes(5000))])
    with pytest.raises(ConfigError, match=r"cannot write the experts to .* after 8\.0 KiB: No space left on device"):
        file.append([bytes_of(bytes(5000))])
    assert not list(tmp_path.iterdir())  # the file has no name
    file.close()
