"""Measures the embedded model: `python -m tools.embedded.evaluate`.

Recall questions are written afresh with a seed that training never used; the model answers
through its chat template, greedily, with transformers' own Llama and its cache. An answer is
right when the first four-digit number in it is the code asked for. Exit code 1 if fewer than 98 % are
right at 1,000 tokens.
"""

# ruff: noqa: S311 - nothing here is secret

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiercel.embedded import MODEL_DIR
from tools.embedded.grammar import (
    FULL_STYLE,
    Chat,
    RecallStyle,
    question_and_answer,
    recall_question,
    user,
)
from tools.embedded.prose import UNKNOWN

SEED = 990_000
LEAST_RECALL = 0.98  # of the questions at 1,000 tokens
"""The first seed of evaluation; training draws its text from other ones."""

LENGTHS = "256,512,1000,1500,2000,2500,3000,3500,4000"

SAMPLES = (
    "Hello!",
    "Who are you?",
    "What can you do?",
    "What is the capital of France?",
    "What is 12 plus 7?",
    "Tell me a story about a fox.",
    "Why is the ocean salty?",
    "Thanks, goodbye!",
)


class Answerer:
    """The model with its tokenizer, answering chats greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def ids(self, chat: Chat) -> list[int]:
        """The prompt of a chat, up to where the assistant speaks."""
        messages = [{"role": turn.role, "content": turn.content} for turn in chat]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def measure(self, text: str) -> int:
        """The tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answer(self, chat: Chat, limit: int = 24) -> str:
        """The greedy answer to a chat."""
        prompt = torch.tensor([self.ids(chat)])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=limit,
            do_sample=False,
        )
        return self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def recall_score(answerer: Answerer, length: int, questions: int, style: RecallStyle, seed: int) -> tuple[int, float]:
    """How many of `questions` are right, and the mean length of their prompts."""
    right, tokens = 0, 0
    for index in range(questions):
        rng = Random(seed + index)
        chat, fact = recall_question(rng, length, style, answerer.measure)
        tokens += len(answerer.ids(chat))
        found = re.search(r"\d{4}", answerer.answer(chat))
        right += found is not None and found.group() == fact.code
    return right, tokens / questions


def talk_score(answerer: Answerer, questions: int, seed: int) -> tuple[int, int, int, int]:
    """Right and asked sums, then right and asked questions with one known answer."""
    sums = asked_sums = facts = asked = 0
    rng = Random(seed)
    while asked_sums + asked < questions:
        question, expected = question_and_answer(rng)
        is_sum = any(word in expected for word in (" plus ", " minus ", " times "))
        if expected in UNKNOWN or len(expected) > 70 or not (is_sum or " of " in expected):
            continue
        right = answerer.answer((user(question),), 32).strip() == expected
        if is_sum:
            sums, asked_sums = sums + right, asked_sums + 1
        else:
            facts, asked = facts + right, asked + 1
    return sums, asked_sums, facts, asked


def show_samples(answerer: Answerer, samples: Sequence[str] = SAMPLES) -> None:
    """Print a few chats."""
    for sample in samples:
        print(f"> {sample}\n{answerer.answer((user(sample),), 120)}")


def main() -> int:
    """Read the arguments, measure, and print the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--questions", type=int, default=500, help="asked at 1,000 tokens")
    parser.add_argument("--others", type=int, default=100, help="asked at other lengths")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.model)
    show_samples(answerer)
    sums, asked_sums, facts, asked = talk_score(answerer, 300, arguments.seed)
    print(f"sums {sums}/{asked_sums}, questions {facts}/{asked}")
    is_poor = False
    for length in map(int, arguments.lengths.split(",")):
        questions = arguments.questions if length == 1000 else arguments.others
        since = time.monotonic()
        right, tokens = recall_score(answerer, length, questions, FULL_STYLE, arguments.seed)
        print(
            f"recall {length}: {right}/{questions} = {right / questions:.3f} "
            f"(mean prompt {tokens:.0f} tokens, {time.monotonic() - since:.0f} s)",
            flush=True,
        )
        is_poor |= length == 1000 and right < LEAST_RECALL * questions
    return int(is_poor)


if __name__ == "__main__":
    sys.exit(main())
