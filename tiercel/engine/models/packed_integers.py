"""Integers of 4 or 8 bits that checkpoints pack into 32-bit words."""

import sys

import torch
from torch import Tensor


def split_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the integers of each row, the lowest bits of a word first. Shapes: [rows, words] int32 -> [rows, count].

    The result is uint8.
    """
    raw = words.contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        raw = raw.unflatten(1, (-1, 4)).flip(-1).flatten(1)
    if bits == 4:
        both = torch.empty(raw.shape[0], 2 * raw.shape[1], dtype=torch.uint8)
        torch.bitwise_and(raw, 15, out=both[:, ::2])
        torch.bitwise_right_shift(raw, 4, out=both[:, 1::2])
        raw = both
    return raw[:, :count]


def split_columns(words: Tensor, bits: int, count: int) -> Tensor:
    """Return integers that are packed along columns. Shapes: [words, columns] int32 -> [columns, count] uint8."""
    return split_words(words.t(), bits, count)


def with_sign(integers: Tensor, bits: int) -> Tensor:
    """Return unsigned integers minus half of their range, as int8."""
    return (integers ^ (1 << bits - 1)).view(torch.int8) if bits == 8 else integers.view(torch.int8) - 8
