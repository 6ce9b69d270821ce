"""Launches refused before or after the step ran: the real runner with an exact model gives no wrong token."""

import random
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from tests.engine.recording import FakeRecorder, GraphBench
from tiercel.device.cpu import CpuDevice, Done, InlineLane

R = TypeVar("R")


class RefusingLane(InlineLane):
    """A lane that, once it is full, has no memory for one job in seven, before or after doing the work."""

    def __init__(self, seed: int, *, is_late: bool) -> None:
        self.is_full = False
        self.num_refused = 0
        self._rng = random.Random(seed)
        self._is_late = is_late

    def run(self, job: Callable[[], R]) -> Done[R]:
        if not self.is_full or self._rng.random() > 0.15:
            return super().run(job)
        self.num_refused += 1
        if self._is_late:
            job()
        raise torch.OutOfMemoryError("CUDA out of memory")


class RefusingDevice(CpuDevice):
    """A CPU with such a lane."""

    def __init__(self, lane: RefusingLane) -> None:
        super().__init__(threads=1)
        self._lane = lane

    def open_lane(self) -> RefusingLane:  # type: ignore[override]
        return self._lane


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2, 40])
@pytest.mark.sampled(6)
def test_no_token_is_wrong_after_refused_launches(seed: int, depth: int, is_late: bool) -> None:
    rng = random.Random(seed)
    lane = RefusingLane(seed, is_late=is_late)
    bench = GraphBench(
        FakeRecorder(), RefusingDevice(lane), depth=depth, seqs=rng.choice([3, 8]), tokens=rng.choice([8, 64]),
        blocks=rng.choice([24, 60]), splits=seed % 2 > 0,
    )  # fmt: skip
    lane.is_full = True
    bench.run_random(rng)
    assert lane.num_refused > 0
