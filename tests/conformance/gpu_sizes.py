"""The steps of a GPU for the suites of exactness: 2,048 and 8,192 tokens, 1,024 sequences.

With a CPU's defaults, and prompts of a few hundred tokens, tables grow by few blocks at a time, and much of the books
that works on arrays of blocks is never reached. At these scales a prompt fills more than one step.
"""

from dataclasses import replace

from tests.conformance.test_engine_exactness import OUTPUTS, Compare, Reference, Scale, bench

GPU_SCALES = {
    2048: Scale(
        short=8, sharing=2, shared=700, long=4000, step_tokens=2048, sequences=1024, max_len=4100, large=700,
        tier_bytes=9 << 20,
    ),
    8192: Scale(
        short=8, sharing=2, shared=700, long=9000, step_tokens=8192, sequences=1024, max_len=9100, large=1400,
        tier_bytes=18 << 20,
    ),
}  # fmt: skip

CROWDED = Scale(
    short=24, sharing=2, shared=700, long=1200, step_tokens=2048, sequences=1024, max_len=1240, small=84, large=400
)
"""Short prompts that fill a small pool in one step and then grow, beside long ones."""


def with_steps(reference: Reference, tokens: int) -> Reference:
    """Return the same prompts for engines with other steps."""
    return replace(reference, scale=replace(reference.scale, step_tokens=tokens))


def run_a_thousand(reference: Reference, exact: Compare) -> int:
    """Run the short prompts 1,024 times at once, and return how many sequences ran together."""
    many = bench(reference, enable_prefix_caching=False, num_gpu_blocks_override=8000)
    short = reference.scale.short
    got = many.greedy(reference.prompts[:short] * (1024 // short), OUTPUTS)
    for first in range(0, len(got), short):
        exact(got[first : first + short] + reference.tokens[short:])
    many.close()
    return many.inbox.most_running
