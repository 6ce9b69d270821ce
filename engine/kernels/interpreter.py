"""Whether kernels run in Triton's interpreter: slowly, on any machine, for tests."""

import triton


def is_interpreted() -> bool:
    """As TRITON_INTERPRET said when the kernels were imported."""
    return bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
