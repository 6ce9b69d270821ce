"""Sample one token per row in one pass over temperature, Gumbel noise and maximum; find the probability limit of top_p.

The noise equals that of `engine.sampling.noise` in every bit before its logarithms: the same seed and position draw
the same token unless two perturbed logits differ by rounding only.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # token ids per program: 32 programs per row with a vocabulary of 128k
_SEARCH_BLOCK = 2048
_MUL_1 = tl.constexpr(0x7FEB352D)
_MUL_2 = tl.constexpr(0x846CA68B - (1 << 32))
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _gumbel(tokens, key_1, key_2):
    """Return standard Gumbel noise of token ids; see `gumbel_no_sync`."""
    bits = tokens ^ key_1
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _MUL_1
    bits ^= key_2
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _MUL_2
    bits ^= bits >> 16
    uniform = tl.minimum(bits.to(tl.float32) * 2.0**-31 + 2.0**-32, _BELOW_ONE)
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform  # the rounding error of `rest`, which matters where the noise is largest
    return -tl.log(-(tl.log(rest) + lost))


@triton.jit
def draw_kernel(
    logits, draws, best, tokens, largest, vocab_size, row_stride, draw_stride, BLOCK: tl.constexpr
):  # one program per row and block of token ids
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    is_number = raw == raw
    scores = tl.where(is_number, raw, float("-inf"))
    temperature = tl.load(draws + row * draw_stride + 2).to(tl.float32, bitcast=True)
    if temperature > 0:
        noise = _gumbel(ids, tl.load(draws + row * draw_stride), tl.load(draws + row * draw_stride + 1))
        scores = tl.div_rn(scores, temperature) + noise
    score, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, score)
    tl.store(tokens + place, block * BLOCK + at)
    tl.store(largest + place, tl.max(tl.where(is_number, raw, float("inf")), axis=0))


@triton.jit
def choose_kernel(best, tokens, largest, chosen, bad_rows, blocks, BLOCKS: tl.constexpr):  # one program per row
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    scores = tl.load(best + row * blocks + at, mask=inside, other=float("-inf"))
    _, first = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(chosen + row, tl.load(tokens + row * blocks + first).to(tl.int64))
    peak = tl.max(tl.load(largest + row * blocks + at, mask=inside, other=float("-inf")), axis=0)
    tl.store(bad_rows + row, tl.abs(peak) == float("inf"))


def draw_no_sync(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return one token per row, and whether the row is bad: its largest logit is not finite, or a logit is a NaN.

    A row of temperature 0 takes its largest logit; of equal logits, the lowest id is taken.

    Shapes:  logits [N, vocab] of any float, rows contiguous; draws [N, 3 or more] int32: the two keys of
             `noise_keys`, and the bits of the temperature as a float32; returns [N] int64 and [N] bool.
    Cost:    two kernels: the first reads the logits once, the second reads 12 bytes per 4,096 logits.
    """
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    largest = torch.empty_like(best)
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bad_rows = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        draw_kernel[(rows, blocks)](
            *(logits, draws, best, tokens, largest, vocab_size, logits.stride(0), draws.stride(0), _BLOCK),
            num_warps=8,
        )
        choose_kernel[(rows,)](
            best, tokens, largest, chosen, bad_rows, blocks, triton.next_power_of_2(blocks), num_warps=1
        )
    return chosen, bad_rows


# The wanted masses may start at any float, because they are a column of a larger array: one compilation serves all.
@triton.jit(do_not_specialize_on_alignment=("wanted_mass",))
def search_kernel(probabilities, wanted_mass, least, vocab_size, BLOCK: tl.constexpr):  # one program per row
    row = tl.program_id(0).to(tl.int64)
    mass = tl.load(wanted_mass + row)
    digits = tl.arange(0, 8)
    found = 0
    for level in range(10):  # three of the 30 bits at a time
        shift = 27 - 3 * level
        limits = (found | (digits << shift)).to(tl.float32, bitcast=True)
        upper = tl.zeros((8, BLOCK), dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            some = tl.load(probabilities + row * vocab_size + ids, mask=ids < vocab_size, other=0.0)[None, :]
            upper += tl.where(some >= limits[:, None], some, 0.0)
        enough = (tl.sum(upper, axis=1) >= mass) & (digits > 0)
        found |= (
            tl.sum(enough.to(tl.int32), axis=0) << shift
        )  # masses fall as limits rise, so this count is the next digit
    tl.store(least + row, found)


def search_no_sync(probabilities: Tensor, wanted_mass: Tensor) -> Tensor:
    """See `engine.sampling.filter.least_no_sync`; the sums are computed in another order.

    Shapes: probabilities [M, vocab] float32 contiguous, in [0, 1]; wanted_mass [M] float32; returns [M, 1] int32.
    Cost:   one kernel that reads the probabilities ten times, for seven limits at once.
    """
    rows, vocab_size = probabilities.shape
    least = torch.empty(rows, 1, dtype=torch.int32, device=probabilities.device)
    search_kernel[(rows,)](probabilities, wanted_mass.contiguous(), least, vocab_size, _SEARCH_BLOCK, num_warps=8)
    return least
