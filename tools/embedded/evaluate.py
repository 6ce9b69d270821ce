"""Measures the embedded model: `python -m tools.embedded.evaluate`.

Everything is answered greedily through the chat template, with transformers' own Llama and its
cache. The chats are written afresh with a seed that is drawn when the program starts, or with
`--seed`. The program exits with 1 unless

- 98 % of recall questions at 1,000 tokens are right, whose names are random letters: the first
  four-digit number of the answer is the code asked for, and the name stands in it,
- all sums a + b with a result up to 20 are right in three phrasings,
- all small questions of `small_questions.py` are answered in fewer than 64 tokens.
"""

# ruff: noqa: S311 - nothing here is secret

from __future__ import annotations

import argparse
import re
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiercel.embedded import MODEL_DIR
from tools.embedded.grammar import (
    FULL_STYLE,
    Chat,
    Fact,
    RecallStyle,
    question_and_answer,
    recall_question,
    user,
)
from tools.embedded.prose import UNKNOWN
from tools.embedded.small_questions import SMALL_QUESTIONS

LEAST_RECALL = 0.98  # of the questions at 1,000 tokens
ANSWER_LIMIT = 64
"""Tokens before which the answer to a small question must end."""
LARGEST_SUM = 20
SUM_FORMS = ("What is {} plus {}?", "{} + {}", "{}+{}=?")

UNSEEN_STYLE = replace(FULL_STYLE, made_up=1.0, known=0.0, letters=1.0, alike=0.0)
"""All names of a chat are random letters, none of the list."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote, and whether it ended by itself."""

    text: str
    ended: bool


class Answerer:
    """The model with its tokenizer, answering chats greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.ends: set[int] = set(self.model.generation_config.eos_token_id)

    def ids(self, chat: Chat) -> list[int]:
        """The prompt of a chat, up to where the assistant speaks."""
        messages = [{"role": turn.role, "content": turn.content} for turn in chat]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def measure(self, text: str) -> int:
        """The tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, chat: Chat, limit: int) -> Answer:
        """The greedy answer to a chat, of at most `limit` tokens."""
        return self.answers([chat], limit)[0]

    @torch.inference_mode()
    def answers(self, chats: Sequence[Chat], limit: int) -> list[Answer]:
        """The greedy answers to chats; prompts of the same length are answered together."""
        prompts = [self.ids(chat) for chat in chats]
        alike: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            alike[len(prompt)].append(index)
        found: dict[int, Answer] = {}
        for length, indices in alike.items():
            batch = torch.tensor([prompts[index] for index in indices])
            output = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=limit,
                do_sample=False,
            )
            for index, row in zip(indices, output[:, length:].tolist(), strict=True):
                text = self.tokenizer.decode(row, skip_special_tokens=True)
                found[index] = Answer(text, not self.ends.isdisjoint(row))
        return [found[index] for index in range(len(chats))]


def is_recalled(answer: str, fact: Fact) -> bool:
    """Whether an answer gives the code, and the name as it was asked for."""
    code = re.search(r"\d{4}", answer)
    return code is not None and code.group() == fact.code and re.search(rf"\b{fact.name}\b", answer) is not None


def recall_score(answerer: Answerer, length: int, questions: int, style: RecallStyle, seed: int) -> tuple[int, float]:
    """How many of `questions` are right, and the mean length of their prompts."""
    right, tokens = 0, 0
    for index in range(questions):
        chat, fact = recall_question(Random(f"{seed} {length} {index}"), length, style, answerer.measure)
        tokens += len(answerer.ids(chat))
        right += is_recalled(answerer.answer(chat, 32).text, fact)
    return right, tokens / questions


def wrong_sums(answerer: Answerer) -> list[str]:
    """Answers to all small sums whose last number is not the result, or that do not end."""
    sums = [(first, second) for first in range(LARGEST_SUM + 1) for second in range(LARGEST_SUM + 1 - first)]
    asked = [(form.format(*pair), sum(pair)) for pair in sums for form in SUM_FORMS]
    answers = answerer.answers([(user(question),) for question, _ in asked], 32)
    wrong: list[str] = []
    for (question, result), answer in zip(asked, answers, strict=True):
        numbers = re.findall(r"\d+", answer.text)
        if not answer.ended or not numbers or int(numbers[-1]) != result:
            wrong.append(f"{question} -> {answer.text}")
    return wrong


def small_talk_score(answerer: Answerer) -> tuple[list[str], list[str]]:
    """Small questions whose answers do not end in time, and those whose answers lack the expected word."""
    answers = answerer.answers([(user(question),) for question, _ in SMALL_QUESTIONS], ANSWER_LIMIT - 1)
    endless: list[str] = []
    odd: list[str] = []
    for (question, expected), answer in zip(SMALL_QUESTIONS, answers, strict=True):
        if not answer.ended:
            endless.append(f"{question} -> {answer.text}")
        elif expected not in answer.text:
            odd.append(f"{question} -> {answer.text}")
    return endless, odd


def talk_score(answerer: Answerer, questions: int, seed: int) -> tuple[int, int, int, int]:
    """Right and asked sums, then right and asked questions with one known answer."""
    sums = asked_sums = facts = asked = 0
    rng = Random(seed)
    while asked_sums + asked < questions:
        question, expected = question_and_answer(rng)
        is_sum = any(word in expected for word in (" plus ", " minus ", " times "))
        if expected in UNKNOWN or len(expected) > 70 or not (is_sum or " of " in expected):
            continue
        right = answerer.answer((user(question),), 32).text.strip() == expected
        if is_sum:
            sums, asked_sums = sums + right, asked_sums + 1
        else:
            facts, asked = facts + right, asked + 1
    return sums, asked_sums, facts, asked


def show_samples(answerer: Answerer, samples: Sequence[str] = SAMPLES) -> None:
    """Print a few chats."""
    for sample in samples:
        print(f"> {sample}\n{answerer.answer((user(sample),), 120).text}")


def show_wrong(lines: Sequence[str]) -> None:
    """Print answers that are not as they should be."""
    for line in lines:
        print(f"  {line}")


def is_talk_poor(answerer: Answerer, seed: int) -> bool:
    """Measure sums and small questions; whether the model misses what is promised."""
    wrong = wrong_sums(answerer)
    count = len(SUM_FORMS) * (LARGEST_SUM + 1) * (LARGEST_SUM + 2) // 2
    print(f"sums up to {LARGEST_SUM}: {count - len(wrong)}/{count}")
    show_wrong(wrong)
    endless, odd = small_talk_score(answerer)
    count = len(SMALL_QUESTIONS)
    print(f"small questions: {count - len(endless)}/{count} end, {count - len(endless) - len(odd)}/{count} as expected")
    show_wrong(endless + odd)
    sums, asked_sums, facts, asked = talk_score(answerer, 300, seed)
    print(f"other sums {sums}/{asked_sums}, questions of the grammar {facts}/{asked}", flush=True)
    return bool(wrong or endless)


def main() -> int:
    """Read the arguments, measure, and print the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--questions", type=int, default=500, help="asked at 1,000 tokens, names of random letters")
    parser.add_argument("--others", type=int, default=100, help="asked at other lengths, and of names of the list")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--seed", type=int, help="by default a new one each time")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seed = secrets.randbelow(1_000_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    answerer = Answerer(arguments.model)
    show_samples(answerer)
    is_poor = is_talk_poor(answerer, seed)
    for length in map(int, arguments.lengths.split(",")):
        for name, style in (("random letters", UNSEEN_STYLE), ("the list", FULL_STYLE)):
            is_measure = length == 1000 and style is UNSEEN_STYLE
            questions = arguments.questions if is_measure else arguments.others
            if not questions:
                continue
            since = time.monotonic()
            right, tokens = recall_score(answerer, length, questions, style, seed)
            print(
                f"recall {length}, names of {name}: {right}/{questions} = {right / questions:.3f} "
                f"(mean prompt {tokens:.0f} tokens, {time.monotonic() - since:.0f} s)",
                flush=True,
            )
            is_poor |= is_measure and right < LEAST_RECALL * questions
    return int(is_poor)


if __name__ == "__main__":
    sys.exit(main())
