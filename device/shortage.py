"""When memory was short: what torch and the libraries under it say then."""

import torch

# torch has a class for its own caching allocator only: the rest is told in words.
_SAYINGS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_shortage(error: Exception) -> bool:
    """Whether a job failed for lack of memory, so that a smaller one may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)
