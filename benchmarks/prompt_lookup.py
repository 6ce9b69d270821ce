"""Prompt lookup on a copying task: the speed of one stream, and of a loaded engine, with and without it.

    python benchmarks/prompt_lookup.py [--model FOLDER] [--pairs 20] [--streams 24] [--tokens 8] [--wrong]

The task is to go on with a text that has been repeated several times. The engine runs in this process. Runs with and
without prompt lookup take turns on one engine, after one of each that is not counted.

Exit code 1 unless

* every text is the same with and without it, greedy and sampled;
* one stream is at least 1.5 times as fast, greedy (median of the pairs);
* a loaded engine, with `--streams` streams of which half sample and as many again waiting, is not slower: the 95 %
  interval of the mean ratio of times, over the pairs, reaches down to 1.

`--wrong` proposes random tokens at any price: it must fail. Prints the rates of acceptance.
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.checks import missed_checks
from tiercel.embedded import MODEL_DIR
from tiercel.engine.offline import OfflineAnswer, OfflineEngine, OfflineRequest, OfflineRun
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.draft import Draft
from tiercel.scheduler.prompt_lookup import PromptLookup
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.request import SamplingParams, pack_tokens

LEAST_SPEED = 1.5
OUTPUTS = 160  # tokens
_TIMES = 4  # that the text stands in the prompt
_TEXT = 48  # tokens


def requests(count: int, vocab_size: int, lookup_tokens: int, *, samples: bool) -> list[OfflineRequest]:
    """Return requests to continue texts that repeat; every other one samples if `samples`."""
    made: list[OfflineRequest] = []
    for number in range(count):
        rng = random.Random(number)
        text = [rng.randrange(vocab_size // 4, vocab_size - 1) for _ in range(_TEXT)]
        params = SamplingParams(
            temperature=0.6 if samples and number % 2 else 0.0, seed=number, max_tokens=OUTPUTS, ignore_eos=True,
            prompt_lookup_num_tokens=lookup_tokens,
        )  # fmt: skip
        made.append(OfflineRequest(pack_tokens(text * _TIMES + text[: number % _TEXT]), params))
    return made


class Pairs:
    """Runs of the same requests, with and without prompt lookup by turns."""

    def __init__(self, engine: OfflineEngine, pairs: int, tokens: int, count: int, *, samples: bool) -> None:
        self.ratios: list[float] = []  # of the time with prompt lookup to the time without, by pair
        self.are_equal = True
        self.accepted = self.proposed = 0
        vocab_size = engine.facts.vocab_size
        for number in range(-1, pairs):
            runs: dict[int, OfflineRun] = {}
            for lookup_tokens in (0, tokens) if number % 2 else (tokens, 0):
                runs[lookup_tokens] = engine.run(requests(count, vocab_size, lookup_tokens, samples=samples))
            plain, with_lookup = runs[0], runs[tokens]
            self.are_equal &= _texts(plain.answers) == _texts(with_lookup.answers)
            self.accepted += with_lookup.after.accepted_tokens - with_lookup.before.accepted_tokens
            self.proposed += with_lookup.after.proposed_tokens - with_lookup.before.proposed_tokens
            if number >= 0:
                self.ratios.append(with_lookup.elapsed_s / plain.elapsed_s)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the geometric mean of the ratios."""
        logs = [math.log(ratio) for ratio in self.ratios]
        mean, error = statistics.fmean(logs), 2.09 * statistics.stdev(logs) / math.sqrt(len(logs))  # t of 19 degrees
        return math.exp(mean - error), math.exp(mean + error)

    def describe(self, title: str) -> None:
        low, high = self.interval
        print(
            f"{title}: {1 / statistics.median(self.ratios):.2f} times as fast (median of {len(self.ratios)}), "
            f"time ratio {low:.3f} to {high:.3f}, accepted {self.accepted} of {self.proposed} proposed tokens"
        )


def _texts(answers: Sequence[OfflineAnswer]) -> list[list[int]]:
    return [answer.tokens.tolist() for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--wrong", action="store_true")
    asked = parser.parse_args()
    settings = EngineSettings(model=str(asked.model), dtype="float32", max_num_seqs=asked.streams)
    with OfflineEngine.open(settings, MonotonicClock()) as engine:
        if asked.wrong:
            engine._engine.loop._planner._lookup = WrongLookup()
        alone = Pairs(engine, asked.pairs, asked.tokens, 1, samples=False)
        alone.describe("one stream, greedy")
        loaded = Pairs(engine, asked.pairs, asked.tokens, 2 * asked.streams, samples=True)
        loaded.describe(f"{asked.streams} streams, as many waiting")
        full = Pairs(engine, asked.pairs, asked.tokens, asked.streams, samples=True)
        full.describe(f"{asked.streams} streams, none waiting")
    return bool(
        missed_checks(
            (
                ("all texts are the same", alone.are_equal and loaded.are_equal and full.are_equal),
                (f"one stream is {LEAST_SPEED} times as fast", 1 / statistics.median(alone.ratios) >= LEAST_SPEED),
                ("a loaded engine is not slower", loaded.interval[0] <= 1),
                ("an engine with all streams running is not slower", full.interval[0] <= 1),
            )
        )
    )


class WrongLookup(PromptLookup):
    """Proposes wrong tokens for every decode, whatever they cost."""

    def __init__(self) -> None:
        super().__init__(lambda tokens, skip, count: tuple(random.choices(range(9), k=count)))

    def add_to(self, draft: Draft, decoding: Collection[SequenceProgress], costs: StepCosts) -> None:
        for one in decoding:
            tokens = self._proposal(one) if one.lookup_tokens else ()
            if tokens and draft.cache.reserve(one.id, one.scheduled + 1 + len(tokens)):
                draft.propose(one.id, tokens)


if __name__ == "__main__":
    sys.exit(main())
