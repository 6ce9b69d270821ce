"""What every backend is tested with: one thread, and memory that holds no number before it is written."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.kernels.bfloat16 import rounded_bfloat16 as rounded_bfloat16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New tensors of floats are full of NaN, those of integers of their largest number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
