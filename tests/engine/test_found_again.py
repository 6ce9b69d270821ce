"""A prefix restored from DDR for one sequence is found by the others that wait for it."""

import random

from tests.engine.test_loop import VOCAB
from tests.engine.test_loop_tiers import TierBench
from tiercel.kvcache.slot_index import as_slots
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.ids import TenantId
from tiercel.wire.frames import Abort

BLOCKS, WAITING = 2000, 8
LOOKS_OF_STEP, BLOCKS_OF_LOOK = 1024, 4


def test_a_long_prefix_is_found_again_without_looking_it_up_anew() -> None:
    rng = random.Random(2)
    bench = TierBench(
        blocks=2 * BLOCKS - 500, host=2 * BLOCKS, seqs=WAITING + 4, tokens=BLOCKS, block=1, max_len=2 * BLOCKS,
        policy="fair", limits=TierLimits(shadow_share=1.0, always_loads=True, background_blocks=512),
    )  # fmt: skip
    bench.loop.check_integrity = lambda: None  # slow, and not tested here
    document = [rng.randrange(VOCAB) for _ in range(BLOCKS)]
    bench.submit(document, max_tokens=1)
    bench.run()
    for _ in range(50):
        bench.step()
        bench.clock.advance(0.1)
    device = bench.cache.tiers.device
    device.evict_many(as_slots(tuple(device.copies)))  # it is in DDR only
    hog = bench.submit(document[: BLOCKS - 400], max_tokens=300, scope=b"other", tenant=TenantId("hog"))
    for _ in range(10):
        bench.step()
    seqs = [bench.submit([*document, n], max_tokens=30, tenant=TenantId(f"tenant {n}")) for n in range(WAITING)]
    for _ in range(60):
        bench.step()
    # Private state, because a waiting sequence does not expose the blocks that it has found.
    assert all(bench.cache._table_by_seq[seq].prefix.num_loads == BLOCKS for seq in seqs), "all know where it lies"
    bench.loop.take([Abort((hog,))])
    num_short = 0
    while bench.book.waiting:
        bench.step()
        num_short += bench.cache.has_more
    assert num_short <= 1 + WAITING * BLOCKS // (BLOCKS_OF_LOOK * LOOKS_OF_STEP), "steps that spent all look-ups"
