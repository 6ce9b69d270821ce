"""Traces of FastSwitch: conversations of several turns, and priorities that change over time.

Source: FastSwitch (arXiv 2411.18424). Lengths are the means of ShareGPT, 161 tokens per question and 338 per answer
(PagedAttention, arXiv 2309.06180, figure 11).
"""

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

VOCAB = 97
MAX_TURNS = 16
TURN_DECAY = 0.8563  # so that the mean is 5.5
QUESTION_TOKENS = 161  # mean
ANSWER_TOKENS = 338  # mean
CONVERSATIONS_PER_S = 6.0
THINK_S = 1.0  # mean, from the end of an answer to the next question
MAX_MODEL_LEN = 8192
BANDS = 100
MARKOV_KEEP = 0.7
SERVED_SHARE = 0.4  # part of the conversations, by priority, that the device tier can hold

Pattern = Literal["random", "markov"]
PATTERNS: tuple[Pattern, ...] = ("random", "markov")
FREQUENCIES = (0.02, 0.04)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and the length of its answer."""

    question: "array[int]"
    answer_tokens: int
    think_s: float  # pause before the question


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation. The prompt of a turn is all earlier questions and answers and its question."""

    arrival_s: float
    turns: tuple[Turn, ...]


def conversations(count: int, seed: int, scale: float = 1.0) -> list[Conversation]:
    """Draw conversations: geometric numbers of turns, log-normal lengths, exponential pauses, all times `scale`."""
    rng = random.Random(seed)
    found: list[Conversation] = []
    arrival_s = 0.0
    for _ in range(count):
        arrival_s += scale * rng.expovariate(CONVERSATIONS_PER_S)
        turns: list[Turn] = []
        tokens = 0
        for _ in range(rng.choices(range(1, MAX_TURNS + 1), [TURN_DECAY**number for number in range(MAX_TURNS)])[0]):
            question = _length(rng, scale * QUESTION_TOKENS, 1.2)
            answer = _length(rng, scale * ANSWER_TOKENS, 0.9)
            tokens += question + answer
            if tokens > MAX_MODEL_LEN:
                break
            words = array("I", [rng.randrange(VOCAB) for _ in range(question)])
            turns.append(Turn(words, answer, scale * rng.expovariate(1 / THINK_S) if turns else 0.0))
        if turns:
            found.append(Conversation(arrival_s, tuple(turns)))
    return found


def _length(rng: random.Random, mean: float, sigma: float) -> int:
    return min(max(int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), 4), 2048)


def priorities(pattern: Pattern, count: int, seed: int) -> Iterator[list[float]]:
    """Yield one row per update: a priority in [0, 1) for each conversation; higher is more urgent.

    Pattern random draws all priorities anew. Pattern markov keeps seven of ten; the others are drawn with a weight that
    falls with the updates since the conversation was last among the most urgent. Rows do not depend on the replay.
    """
    rng = random.Random(f"{pattern} {seed}")
    row = [rng.random() for _ in range(count)]
    unserved = [0] * count  # updates since it was last among the most urgent
    while True:
        yield row
        if pattern == "random":
            row = [rng.random() for _ in range(count)]
            continue
        unserved = [
            0 if priority >= 1 - SERVED_SHARE else since + 1 for priority, since in zip(row, unserved, strict=True)
        ]
        row = [
            priority if rng.random() < MARKOV_KEEP else rng.random() ** (1 + since)
            for priority, since in zip(row, unserved, strict=True)
        ]
