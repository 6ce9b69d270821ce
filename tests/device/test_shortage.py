"""Errors that report a shortage of memory, and others."""

import pytest
import torch

from tiercel.device.shortage import is_shortage


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
    ],
)
def test_a_shortage_of_memory_is_recognised(error: Exception) -> None:
    assert is_shortage(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shape mismatch: out of memory is what this request says"),
        ValueError("CUDA error: out of memory"),
    ],
)
def test_other_errors_are_not_shortages(error: Exception) -> None:
    assert not is_shortage(error)


def test_a_shortage_of_the_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58)
    assert is_shortage(caught.value)
