"""How long the slice of a chunked prefill is."""


def chunk_length(start: int, want: int, budget: int, block_size: int) -> int:
    """Tokens of the next slice, at most `want` and `budget`.

    A slice that cannot finish ends on a block boundary if at least one block remains, so that the block is full and
    can be hit; else it takes the budget as it is (a budget of 12 with blocks of 16 must not stall).
    """
    length = min(want, budget)
    if length < want:
        aligned = (start + length) // block_size * block_size - start
        if aligned > 0:
            return aligned
    return length
