"""Gumbel noise as a pure function of (seed, position, token id).

There is no state and no generator: a stream that is resumed in another row, in another process or beside other rows
gets the same noise. Adding the noise to the logits and taking the largest one draws from their softmax (the Gumbel-max
trick, arXiv 1611.01144 section 2). A change in the last bit of the logits changes the token only if two perturbed
logits are that close, unlike with a draw by rank or by inverse CDF.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX64 = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT64 = np.uint64(31)

_MUL_1 = 0x7FEB352D
_MUL_2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit integer
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


def noise_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return two 32-bit keys for each (seed, position).

    Shapes: seeds [M], any int64; positions [M] of the tokens to be drawn; returns [M, 2].
    Source: the finaliser of SplitMix64 (doi 10.1145/2660193.2660195), applied to the seed, and then to the sum of the
            result and the position, so that neighbouring seeds or positions have unrelated keys.
    """
    stream = _mix64(seeds.view(np.uint64) + _GOLDEN)
    keys = _mix64(stream + positions.view(np.uint64) * _GOLDEN)
    return keys.view(np.int32).reshape(-1, 2)


def gumbel_no_sync(keys: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise for every token id.

    The hash gives h in [0, 2^31) and v = (h + 1/2) / 2^31. -log(-log(1 - v)) is computed as -log(-log1p(-v)), so that
    the resolution is finest where the noise is large enough to decide: the largest value is 22.2 instead of the 16.6
    of a float32 uniform. v is never 0, and is kept below 1.

    Shapes:  keys [M, 2] int32 on the device; returns [M, vocab_size] float32.
    Cost:    20 elementwise kernels over [M, vocab_size], 12 of them integer.
    Source:  the 32-bit mixer found by github.com/skeeto/hash-prospector (16, 15, 16), keyed before each round.
    """
    bits = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) ^ keys[:, :1]
    shifted = bits >> 16
    bits ^= shifted.bitwise_and_(0xFFFF)  # int32 shifts keep the sign; a logical shift is a bijection
    bits *= _MUL_1
    bits ^= keys[:, 1:]
    torch.bitwise_right_shift(bits, 15, out=shifted)
    bits ^= shifted.bitwise_and_(0x1FFFF)
    bits *= _MUL_2
    torch.bitwise_right_shift(bits, 16, out=shifted)
    bits ^= shifted  # the arithmetic shift is intended: the sign bit cancels, which leaves 31 bits
    uniform = bits.to(torch.float32).mul_(2.0**-31).add_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX64:
        values = (values ^ (values >> np.uint64(shift))) * factor
    return values ^ (values >> _LAST_SHIFT64)
