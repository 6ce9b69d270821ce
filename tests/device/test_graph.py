"""Why a recording failed."""

import torch

from device.graph import is_from_shortage


def broken_off(first: Exception) -> RuntimeError:
    """What a capture says at its end when a job in it failed."""
    try:
        try:
            raise first
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        return error


def test_a_capture_that_ran_out_of_memory_is_known_behind_its_own_complaint() -> None:
    assert is_from_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_from_shortage(broken_off(torch.OutOfMemoryError("CUDA out of memory")))
    assert not is_from_shortage(broken_off(ValueError("something else")))
