"""The room `fleet/` on simulated fleets, and the time of a choice.

    python benchmarks/routing.py [prefix] [fairness] [balance] [choice] [--replicas 32] [--off]

Without names all four run, for about four minutes. The engines' loop, scheduler and cache, the router and the account
are the real ones; machines only take time, in virtual time.

- prefix: six-turn conversations over 4 replicas reach 95 % of the hit rate of one replica with four times the cache.
- fairness: a tenant that is bound to one replica gets 0.9 of its share of all, from 5 s to 15 s after the start, and
  the Jain index of service by weight is 0.99, with 4 and with 64 replicas.
- balance: a saturated fleet of `--replicas` reaches 0.97 of as many times the throughput of one.
- choice: the 99th percentile of a choice among 64 engines for prompts of 8,192 tokens is 1 ms; hashing is apart.

Exit code 1 if one is missed. `--off` switches the mechanism of each off (round robin; no weights of the account; a
choice at random; the choice is made 64 times over) and must end with exit code 1, each check missed.
"""

import argparse
import os
import random
import sys
import time

from benchmarks.checks import missed_checks, percentile
from benchmarks.scenarios.replicas import run_bound, run_conversations, run_saturated_fleet
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.fleet.router import PromptWork, Router
from tiercel.values.block_key import namespace_key, prompt_heads
from tiercel.values.ids import EngineId, SeqId, TenantId
from tiercel.values.rates import EngineSpeed

LEAST_HITS, LEAST_PART, LEAST_JAIN, LEAST_BALANCE, MOST_CHOICE_MS = 0.95, 0.9, 0.99, 0.97, 1.0
_BLOCKS = 2048  # of a replica with conversations
_SINGLES = 4  # runs of one replica, whose mean a fleet is compared with

Check = tuple[str, bool]


def prefix_checks(is_off: bool) -> list[Check]:
    """Compare the hit rates of a fleet with those of one large replica; show round robin beside them."""
    large = run_conversations(1, 4 * _BLOCKS, speedup=4)
    turns = run_conversations(4, _BLOCKS, placement="in_turn")
    fleet = turns if is_off else run_conversations(4, _BLOCKS)
    for name, one in (("one replica, 4 x cache and speed", large), ("4 replicas", fleet), ("round robin", turns)):
        print(
            f"  {name:33} hits {one.hit_rate:.3f}  {one.requests:,} requests in {one.virtual_s:.0f} virtual s, "
            f"steps of {one.step_ms:.1f} ms, busy {one.busy:.0%}"
        )
    part = fleet.hit_rate / large.hit_rate
    return [(f"prefix: {part:.3f} of the hit rate of one, at least {LEAST_HITS}", part >= LEAST_HITS)]


def fairness_checks(is_off: bool) -> list[Check]:
    """Check the shares of bound tenants."""
    checks: list[Check] = []
    for replicas in (4, 64):
        found = run_bound(replicas, has_weights=not is_off)
        print(
            f"  {replicas} replicas, {found.bound} bound tenants: 15 virtual s, steps of {found.step_ms:.1f} ms, "
            f"12 requests at once by replica and bound tenant"
        )
        checks += [
            (
                f"fairness, {replicas}: {found.least_part:.3f} of the share, at least {LEAST_PART}",
                found.least_part >= LEAST_PART,
            ),
            (f"fairness, {replicas}: Jain {found.jain:.4f}, at least {LEAST_JAIN}", found.jain >= LEAST_JAIN),
        ]
    return checks


def balance_checks(is_off: bool, replicas: int) -> list[Check]:
    """Compare the throughput of a saturated fleet with that of single replicas."""
    one = sum(run_saturated_fleet(1, seed=seed).tokens_per_s for seed in range(_SINGLES)) / _SINGLES
    began_s = time.process_time()
    found = run_saturated_fleet(replicas, placement="at_random" if is_off else "router")
    spent_s = time.process_time() - began_s
    part = found.tokens_per_s / (replicas * one)
    print(
        f"  {replicas:,} replicas, 10 requests at once for each: {found.tokens_per_s:,.0f} tokens/s, 30 virtual s, "
        f"{found.steps:,} steps of {found.step_ms:.1f} ms in {spent_s:.0f} s of processor time"
    )
    return [(f"balance, {replicas}: {part:.3f} of perfect, at least {LEAST_BALANCE}", part >= LEAST_BALANCE)]


def choice_checks(is_off: bool) -> list[Check]:
    """Measure choices among 64 engines that hold prefixes of the prompts, with 1,000 sequences under way."""
    rng = random.Random(0)
    router = Router(PrefixIndex(), rng)
    for number in range(64):
        router.join(EngineId(number), EngineSpeed())
    root = namespace_key(b"benchmark", b"tenant")
    works: list[PromptWork] = []
    hashing_ms: list[float] = []
    for number in range(200):
        prompt = rng.randbytes(4 * 8192)
        began_s = time.perf_counter()
        heads = prompt_heads(root, prompt, 16)
        hashing_ms.append(1e3 * (time.perf_counter() - began_s))
        tenant = TenantId(f"tenant{number % 50}")
        works.append(PromptWork(tenant=tenant, num_tokens=8192, max_outputs=128, heads=heads))
        for engine in rng.sample(range(64), 16):
            router.index.store(EngineId(engine), heads.heads[: rng.randint(1, len(heads.heads))])
    times_ms: list[float] = []
    for seq in range(4000):
        work = rng.choice(works)
        began_s = time.perf_counter()
        choice = router.choose(work)
        for _ in range(63 if is_off else 0):
            router.choose(work)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
        assert choice is not None
        router.begin(SeqId(seq), work, choice)
        router.end(SeqId(seq - 1000), 64)
    p99 = percentile(times_ms, 0.99)
    print(
        f"  choice p50 {percentile(times_ms, 0.5):.3f} ms, p99 {p99:.3f} ms; hashing 8,192 tokens "
        f"p50 {percentile(hashing_ms, 0.5):.2f} ms, p99 {percentile(hashing_ms, 0.99):.2f} ms"
    )
    return [(f"choice: p99 {p99:.3f} ms, at most {MOST_CHOICE_MS} ms", p99 <= MOST_CHOICE_MS)]


def main() -> int:
    """Run the chosen parts; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("prefix", "fairness", "balance", "choice")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(names)}; default: all")
    parser.add_argument("--replicas", type=int, default=32, help="of the balance; default 32")
    parser.add_argument("--off", action="store_true", help="switch the mechanisms off: every check must be missed")
    flags = parser.parse_args()
    unknown = sorted(set(flags.parts) - set(names))
    if unknown or flags.replicas < 1:
        parser.error(f"PART is one of {', '.join(names)}, not {unknown}; --replicas is at least 1")
    checks: list[Check] = []
    for name in flags.parts or names:
        print(name, flush=True)
        match name:
            case "prefix":
                checks += prefix_checks(flags.off)
            case "fairness":
                checks += fairness_checks(flags.off)
            case "balance":
                checks += balance_checks(flags.off, flags.replicas)
            case _:
                checks += choice_checks(flags.off)
    missed = missed_checks(checks)
    print(f"{len(missed)} of {len(checks)} checks missed")
    return 1 if missed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without freeing millions of objects, one by one
