"""Recognise errors that report a shortage of memory."""

import torch

# torch has an exception class for its own allocator only; other shortages are recognised by their messages.
_MESSAGES = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_shortage(error: Exception) -> bool:
    """Return whether a job failed for lack of memory, so that a smaller job may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
