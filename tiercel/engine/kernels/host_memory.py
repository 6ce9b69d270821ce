"""Move small arrays between mapped host memory and the device by kernels instead of the copy engines.

A copy engine takes the copies of all streams in their order and ignores priorities, so a copy of a step would wait
behind the pieces of a running swap. A kernel of the compute lane reads and writes locked host memory itself.

Locked memory has one address for the host and the device where addresses are unified; a tensor in it is passed to a
kernel as it is, because the launcher asks the driver for the device's address of every pointer
(`cuPointerGetAttribute` in Triton's backends/nvidia/driver.c; triton pull request 1197). Order: what the host wrote
before a launch is seen by the kernel, and what a kernel wrote is seen by the host when an event behind it is past (CUDA
C++ programming guide, "Mapped Memory": accesses are to be ordered by streams or events). No fence is needed within the
kernel, because the host reads nothing before that event. Not yet run on a GPU.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # elements of a program: 2 KiB, so that several processors read an array of a step at once
_WARPS = 2
_LINE_BYTES = 64
_ELEMENT_BY_BYTES = {1: torch.uint8, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=("lines", "patches"))
def take_inputs_kernel(source, target, tables, lines, patches, BLOCK: tl.constexpr):
    """Copy lines; the programs behind them write the patches, pairs of a place in the tables and a slot."""
    words = lines * 8  # the compiler sees that masks end at multiples of 8, and loads 16 bytes at a time
    block, blocks = tl.program_id(0), tl.cdiv(words, BLOCK)
    at = tl.arange(0, BLOCK)
    if block < blocks:
        at += block * BLOCK
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
    else:
        at += (block - blocks) * BLOCK
        place = tl.load(source + words + 2 * at, mask=at < patches, other=0)
        slot = tl.load(source + words + 2 * at + 1, mask=at < patches, other=0)
        tl.store(tables + place, slot, mask=at < patches)


@triton.jit(do_not_specialize=("count",))
def move_kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


# The arrays are parts of larger ones and may begin anywhere: one compilation serves all.
@triton.jit(
    do_not_specialize=("count",),
    do_not_specialize_on_alignment=("tokens", "bad_rows", "rows", "host_tokens", "host_bad_rows"),
)
def report_kernel(tokens, bad_rows, rows, last_tokens, host_tokens, host_bad_rows, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(tokens + at, mask=inside)
    tl.store(last_tokens + tl.load(rows + at, mask=inside), token, mask=inside)
    tl.store(host_tokens + at, token, mask=inside)
    tl.store(host_bad_rows + at, tl.load(bad_rows + at, mask=inside), mask=inside)


def take_inputs_no_sync(source: Tensor, target: Tensor, num_bytes: int, tables: Tensor, patches: int) -> None:
    """Fill `target` from host memory, and write the patches behind these bytes into the block tables.

    Shapes:  source [bytes] uint8 in host memory: `num_bytes`, a multiple of 64, then `patches` pairs of int64, a flat
             index into tables and a slot; target [bytes or more] uint8 on the device; tables [rows, blocks] int64.
             Pairs with equal places have equal slots.
    Cost:    one kernel; every byte is read once over the link.
    Effects: `source` must not change before an event behind this call is past.
    """
    programs = triton.cdiv(num_bytes // 8, _BLOCK) + triton.cdiv(patches, _BLOCK)
    if programs:
        words_of = (memory.narrow(0, 0, len(memory) // 8 * 8).view(torch.int64) for memory in (source, target))
        take_inputs_kernel[(programs,)](*words_of, tables, num_bytes // _LINE_BYTES, patches, _BLOCK, num_warps=_WARPS)


def move_no_sync(source: Tensor, target: Tensor) -> None:
    """Copy a tensor between host memory and the device.

    Shapes:  equal, contiguous, with elements of 1, 4 or 8 bytes.
    Cost:    one kernel.
    Effects: the memory on the host must neither change nor be read before an event behind this call is past.
    """
    if source.numel():
        kind = _ELEMENT_BY_BYTES[source.element_size()]
        sides = (side.view(kind) for side in (source, target))
        move_kernel[(triton.cdiv(source.numel(), _BLOCK),)](*sides, source.numel(), _BLOCK, num_warps=_WARPS)


def report_no_sync(
    tokens: Tensor, bad_rows: Tensor, rows: Tensor, last_tokens: Tensor, host_tokens: Tensor, host_bad_rows: Tensor
) -> None:
    """Store the results of a step in host memory, and note the last token of each row.

    Shapes:  tokens and rows [N] int64, bad_rows [N] bool; last_tokens [rows] int64; host_tokens [N] int64 and
             host_bad_rows [N] bool in host memory. If a row occurs several times, its last token is one of them.
    Cost:    one kernel, which writes 9 bytes per token over the link.
    Effects: the host may read the results when an event behind this call is past.
    """
    count = len(tokens)
    if count:
        flags = bad_rows.view(torch.uint8), host_bad_rows.view(torch.uint8)
        report_kernel[(triton.cdiv(count, _BLOCK),)](
            tokens, flags[0], rows, last_tokens, host_tokens, flags[1], count, _BLOCK, num_warps=_WARPS
        )
