"""Tells apart the compilations that serving would need on a Hopper GPU, where there is none: kernels are launched with
Triton's own keys for one, and nothing runs. A script, since Triton's interpreter, in which the other tests run, cannot
be left again: it reads a list of shapes (key heads, heads of a group, head_dim, dtype) from its input."""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState

_BLOCK_SIZE = 16
_PROCESSORS = 132


class Launches:
    """The keys of all launches, by kernel, and with which precision each multiplies."""

    def __init__(self) -> None:
        self.keys: dict[str, set[str]] = {}
        self.precisions: set[str] = set()
        self._backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self._binders: dict[str, Any] = {}

    def add(self, kernel: Any, *args: Any, grid: object, warmup: bool, **given: Any) -> None:
        name = kernel.fn.__name__
        if name not in self._binders:
            self._binders[name] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialisation, options = self._binders[name](*args, debug=False, **given)
        self.keys.setdefault(name, set()).add(str((specialisation, sorted(options.items()))))
        if "PRECISION" in bound:
            self.precisions.add(bound["PRECISION"])

    def counts(self) -> dict[str, int]:
        return {name: len(keys) for name, keys in self.keys.items()}


def serve(launches: Launches, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernels compiled by the first prompt, and by decoding sequences, alone and together with a prompt."""
    attention, params = TritonAttention(_PROCESSORS), AttentionParams(scale=1.0)
    kv = torch.zeros(2, 3, _BLOCK_SIZE, kv_heads, 2 * head_dim, dtype=dtype)[:, 1]

    def step(pieces: list[tuple[int, int]]) -> None:
        ends = [start + length for start, length in pieces]
        tables = torch.zeros(len(pieces), -(-max(ends) // _BLOCK_SIZE), dtype=torch.int64)
        state = ForwardState.of_slices(tables, [start for start, _ in pieces], ends, _BLOCK_SIZE)
        query = torch.zeros(sum(length for _, length in pieces), kv_heads * group, head_dim, dtype=dtype)
        attention.read(query, kv, state, params)

    step([(0, 100)])
    first = launches.counts()
    for sequences in range(1, 301):
        step([(33, 1)] * sequences)
        step([(0, 7), *[(sequences, 1)] * sequences])
    return {"first": first, "all": launches.counts(), "precisions": sorted(launches.precisions)}


def _main() -> None:
    found = []
    for kv_heads, group, head_dim, dtype in json.load(sys.stdin):
        launches = Launches()
        JITFunction.run = lambda kernel, *args, of=launches, **given: of.add(kernel, *args, **given)
        found.append(serve(launches, kv_heads, group, head_dim, getattr(torch, dtype)))
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
