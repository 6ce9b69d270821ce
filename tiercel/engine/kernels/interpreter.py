"""Detect Triton's interpreter, which runs kernels slowly on any machine, for tests."""

import triton


def is_interpreted() -> bool:
    """Return whether TRITON_INTERPRET was set when the kernels were imported."""
    return bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
