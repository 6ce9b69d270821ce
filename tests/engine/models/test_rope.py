"""The table of angles in host memory against the angles of one forward."""

import random

import numpy as np
import pytest
import torch

from tests.seeds import fresh_seeds
from tiercel.engine.models.config import RopeConfig
from tiercel.engine.models.rope import Rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_rows_of_the_table_have_the_bits_of_angles_computed_alone(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    head_dim = rng.choice((2, 6, 20, 64, 128))
    config = RopeConfig(kind="default", theta=10_000.0, attention_factor=1.3)
    rotary = Rotary(config, head_dim, dtype, torch.device("cpu"))

    for most in (3, 1024, 1025, 700, 20_000):  # the table grows, and serves smaller positions afterwards
        positions = np.array([rng.randrange(most) for _ in range(rng.choice((1, 2, 7, 33)))])
        wanted = rotary.angles(torch.from_numpy(positions))

        for mine, theirs in zip(rotary.table.rows(positions), wanted, strict=True):
            assert mine.flags.c_contiguous
            assert torch.equal(torch.from_numpy(mine), theirs[:, 0, : head_dim // 2].float())


def test_no_positions() -> None:
    rotary = Rotary(RopeConfig(kind="default", theta=10_000.0), 8, torch.float32, torch.device("cpu"))
    assert [part.shape for part in rotary.table.rows(np.empty(0, np.int64))] == [(0, 4), (0, 4)]
