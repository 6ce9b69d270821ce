"""Fixtures of all kernel tests: one thread, and NaN in memory that was not written."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.kernels.bfloat16 import rounded_bfloat16 as rounded_bfloat16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new tensors of floats with NaN and new tensors of integers with their largest number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
