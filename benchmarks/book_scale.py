"""Memory and garbage-collection time of the cache's books with a million blocks.

    python benchmarks/book_scale.py [--blocks 1000000] [--tiers]

Fills a pool with keyed blocks of ended sequences, so that every slot is cached, keyed and listed for eviction. With
`--tiers` the blocks are spread over three tiers: a sixteenth in HBM, a quarter in DDR, the rest on the SSD; every block
in HBM has a copy in DDR. Exit code 1 above `--most-bytes` (300) per block.
"""

import argparse
import gc
import os
import resource
import statistics
import sys
import time
from array import array

from tiercel.kvcache.manager import CacheManager
from tiercel.values.ids import BlockKey, SeqId, SlotId
from tiercel.values.plan import NanoBatch, Plan, Slice

BLOCK_SIZE = 16
SEQUENCE_BLOCKS = 1000


def resident_bytes() -> int:
    """Return the peak resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fill(cache: CacheManager, sequences: int) -> None:
    """Compute and end `sequences` sequences of SEQUENCE_BLOCKS blocks each."""
    tokens = SEQUENCE_BLOCKS * BLOCK_SIZE
    for number in range(1, sequences + 1):
        seq = SeqId(number)
        cache.open(seq, array("I", [number] * tokens), b"benchmark")
        ledger = cache.ledger()
        if not ledger.reserve(seq, tokens):
            raise SystemExit("the pool is too small")
        cache.seal(Plan((NanoBatch((Slice(seq, 0, tokens, False),)),)), ledger, number)
        cache.commit(number, [(seq, tokens)])
        cache.close(seq)


def fill_tiers(cache: CacheManager) -> None:
    """Index random keys in every slot of the lower tiers; DDR has a copy of every block in HBM."""
    (_, device), *lower = cache.tiers.pools()
    shared = list(device.slot_by_key)
    for _, pool in lower:
        for slot in range(1, pool.blocks + 1):
            pool.adopt(SlotId(slot), shared.pop() if shared else BlockKey(os.urandom(32)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--most-bytes", type=float, default=300.0, help="of memory, a block")
    args = parser.parse_args()
    before = resident_bytes()
    started_s = time.perf_counter()
    device, host = (args.blocks // 16, args.blocks // 4) if args.tiers else (args.blocks, 0)
    disk = args.blocks - device - host
    cache = CacheManager(device, BLOCK_SIZE, b"benchmark", host_blocks=host, disk_blocks=disk)
    fill(cache, device // SEQUENCE_BLOCKS)
    if args.tiers:
        fill_tiers(cache)
    filled_s = time.perf_counter() - started_s
    collections_ms: list[float] = []
    for _ in range(5):
        at_s = time.perf_counter()
        gc.collect()
        collections_ms.append(1e3 * (time.perf_counter() - at_s))
    cached = sum(pool.num_cached for _, pool in cache.tiers.pools())
    print(f"{args.blocks} blocks, {cached} cached, filled in {filled_s:.1f} s")
    block_bytes = (resident_bytes() - before) / args.blocks
    print(f"{block_bytes:.0f} bytes a block (peak resident)")
    print(f"full collection: median {statistics.median(collections_ms):.1f} ms")
    return int(block_bytes > args.most_bytes)


if __name__ == "__main__":
    sys.exit(main())
