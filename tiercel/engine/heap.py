"""Keep freed heap memory in the process, so that no step of the loop waits for page faults."""

_MAX_THRESHOLD = 32 << 20  # bytes: the largest freed block by which glibc still raises its thresholds
_HEADER = 64 << 10  # bytes: more than the allocator and the page size add to a block


def keep_heap() -> None:
    """Have the C library keep 32 MiB of touched memory for later allocations. Call once, before serving.

    The books allocate arrays of 0.5 MB for a sequence of a million tokens. With its initial thresholds glibc maps each
    of them anew and returns it when it is freed, and every page of it costs a page fault: up to 15 ms in one step.
    Freeing one block of 32 MiB raises the thresholds to their largest values. Freeing a second one, which then comes
    from the heap, leaves its touched pages at the heap's end. With other C libraries the calls have no lasting effect.
    """
    for _ in range(2):
        block = bytearray(b"\1") * (_MAX_THRESHOLD - _HEADER)
        del block
