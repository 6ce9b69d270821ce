"""Ten thousand preemptions over three tiers; counts lost and changed tokens.

    python benchmarks/preemptions.py [--preemptions 10000] [--seed 1] [--check]

A tiny random Llama in float32 on the CPU with a separate device pool. Victims are swapped, recomputed, or whichever is
cheaper; prefixes are restored from HBM, DDR and SSD. The reference is transformers' `generate`. A token that differs
where the margin of the two likeliest is below 1e-4 is excused, and the tokens after it are not compared. Exit code 1 if
a token is lost or wrong."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.conformance.churn import Tally, churn, make_answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preemptions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="walk every book after every step (slow)")
    args = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = make_answers(folder / "model")
        tally = Tally()
        churn(answers, tally, folder / "kv", args.preemptions, args.seed, is_checked=args.check)
    counts = ", ".join(f"{count} {how}" for how, count in sorted(tally.preempted.items()))
    print(f"{tally.preemptions} preemptions ({counts}) in {time.monotonic() - began_s:.0f} s")
    print(f"{tally.requests} requests, {tally.tokens} tokens; prompt tokens found: {dict(tally.hit_tokens)}")
    print(f"{tally.lost} tokens lost, {tally.wrong} wrong, {tally.excused} requests excused at a tie")
    return 1 if tally.lost or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
