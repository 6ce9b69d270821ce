"""The length of the slices of a chunked prefill."""


def chunk_length(start: int, want: int, budget: int, block_size: int) -> int:
    """Return the tokens of the next slice: at most `want` and at most `budget`.

    A slice that does not finish the prompt ends on a block boundary if the budget reaches one, so that its last block
    is full and can be hit. Otherwise the slice takes the whole budget, so that a budget below the block size makes
    progress.
    """
    length = min(want, budget)
    if length < want:
        aligned = (start + length) // block_size * block_size - start
        if aligned > 0:
            return aligned
    return length
