"""bfloat16 in Triton's interpreter: stored as bfloat16 and computed in float32, rounded to nearest even.

The interpreter keeps bfloat16 numbers as 16-bit integers. It multiplies those integers in `tl.dot`, adds them in
arithmetic and truncates where it should round. The fixture below replaces exactly these three behaviours, so that the
loads, stores, casts and products of our kernels can be compared with those of torch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl

from tiercel.engine.kernels.interpreter import is_interpreted


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 numbers given as 16-bit integers. Exact."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return float32 values as the 16-bit integers of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@pytest.fixture(autouse=True)
def rounded_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Repair the interpreter's bfloat16 for one test. Arithmetic on bfloat16 numbers fails, as no kernel needs it."""
    if not is_interpreted():
        yield
        return
    # lazy: the interpreter is imported only where it is used
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, product, arithmetic = (
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.create_dot,
        InterpreterBuilder.binary_op,
    )

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:  # Any: the interpreter's own values
        match src.dtype.scalar, dst_type.scalar:
            case (tl.bfloat16, tl.float32):
                return TensorHandle(widen(src.data), tl.float32)
            case (tl.float32, tl.bfloat16):
                return TensorHandle(narrow(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            TensorHandle(widen(side.data), tl.float32) if side.dtype.scalar is tl.bfloat16 else side for side in (a, b)
        ]
        return product(self, *wide, *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        assert tl.bfloat16 not in (lhs.dtype.scalar, rhs.dtype.scalar), f"{op} on bfloat16 numbers"
        return arithmetic(self, lhs, rhs, op)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "binary_op", binary_op)
    yield
