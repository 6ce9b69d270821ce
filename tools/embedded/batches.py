"""Turns chats of the grammar into batches of token ids, targets and loss weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.embedded.grammar import (
    Chat,
    RecallStyle,
    plain_text,
    prose_chat,
    recall_chat,
    recall_text,
    sums_chat,
)
from tools.embedded.tokenizer import END, PAD, START

OTHER, ANSWER, DIGIT, LEAD = 1, 2, 3, 4
"""Kinds of target tokens: text of others, of the assistant, its digits, and first digits."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of ids, and which of their positions the loss looks at."""

    ids: Tensor
    places: Tensor
    """Flat indices of the positions whose next token counts."""
    targets: Tensor
    weights: Tensor
    leads: Tensor
    """Which of the targets are the first digits of numbers in answers."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(
            self.ids.to(device),
            self.places.to(device),
            self.targets.to(device),
            self.weights.to(device),
            self.leads.to(device),
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """How much the loss counts each kind of target."""

    other: float = 0.02
    answer: float = 0.2
    digit: float = 0.4
    lead: float = 1.0


class Encoder:
    """Encodes chats as the chat template renders them, with the kind of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end, self.pad = (tokenizer.encode(text).ids[0] for text in (START, END, PAD))
        self.line = tokenizer.encode("\n").ids
        self.roles = {role: tokenizer.encode(f"{role}\n").ids for role in ("system", "user", "assistant")}
        self.digits = np.array(tokenizer.encode("0123456789").ids)

    def measure(self, text: str) -> int:
        """The tokens of a text."""
        return len(self.tokenizer.encode(text).ids)

    def encode(self, chats: Sequence[Chat]) -> list[tuple[list[int], list[int]]]:
        """Ids and kinds of each chat."""
        contents = [message.content for chat in chats for message in chat]
        encoded = iter(self.tokenizer.encode_batch_fast(contents))
        rows: list[tuple[list[int], list[int]]] = []
        for chat in chats:
            ids: list[int] = []
            kinds: list[int] = []
            for message in chat:
                plain = message.role == "text"
                head = [] if plain else [self.start, *self.roles[message.role]]
                body = [*next(encoded).ids, self.pad if plain else self.end]
                tail = [] if plain else self.line
                kind = OTHER if message.role in ("system", "user") else ANSWER
                ids += [*head, *body, *tail]
                kinds += [OTHER] * len(head) + [kind] * len(body) + [OTHER] * len(tail)
            rows.append((ids, kinds))
        return rows

    def batch(self, chats: Sequence[Chat], length: int, weights: Weights, rng: Random) -> Batch:
        """One row a chat, cut or filled to `length`.

        Of the text of others, whose loss counts little, only a tenth is looked at, with ten
        times the weight: scores for the whole vocabulary are a large part of the work.
        """
        ids = np.full((len(chats), length + 1), self.pad, dtype=np.int64)
        kinds = np.zeros((len(chats), length + 1), dtype=np.int8)
        for row, (row_ids, row_kinds) in enumerate(self.encode(chats)):
            size = min(len(row_ids), length + 1)
            ids[row, :size] = row_ids[:size]
            kinds[row, :size] = row_kinds[:size]
        targets = ids[:, 1:].reshape(-1)
        kind = kinds[:, 1:].reshape(-1)
        digit = np.isin(targets, self.digits)
        lead = digit & ~np.isin(ids[:, :-1].reshape(-1), self.digits)
        kind = np.where((kind == ANSWER) & digit, np.where(lead, LEAD, DIGIT), kind)
        looked = np.random.default_rng(rng.getrandbits(32)).random(kind.shape) < 0.1
        table = np.array([0.0, 10 * weights.other, weights.answer, weights.digit, weights.lead], np.float32)
        keep = np.flatnonzero((kind >= ANSWER) | ((kind == OTHER) & looked))
        return Batch(
            torch.from_numpy(np.ascontiguousarray(ids[:, :-1])),
            torch.from_numpy(keep),
            torch.from_numpy(targets[keep]),
            torch.from_numpy(table[kind[keep]]),
            torch.from_numpy(kind[keep] == LEAD),
        )

    def recall_batch(
        self,
        rng: Random,
        budget: int,
        length: int,
        style: RecallStyle,
        weights: Weights,
    ) -> Batch:
        """About `budget` tokens of recall chats in rows of `length`, a few of them short."""
        chats: list[Chat] = []
        for _ in range(max(1, budget // length)):
            full = rng.random() < 0.7
            share = rng.uniform(0.88, 0.97) if full else rng.uniform(0.3, 0.97)
            tokens = rng.randint(40, 100) if rng.random() < 0.08 else int(length * share)
            chats.append(recall_chat(rng, tokens, style, self.measure))
        return self.batch(chats, length, weights, rng)

    def prose_batch(self, rng: Random, tokens: int, length: int, sums: float) -> Batch:
        """About `tokens` tokens of prose chats in rows of `length`, all answers in full.

        The share `sums` of the rows has nothing but sums.
        """
        rows = max(1, tokens // length)
        writers = (prose_chat, prose_chat, prose_chat, prose_chat, plain_text, recall_text)
        chats: list[Chat] = []
        for _ in range(rows):
            write = sums_chat if sums and rng.random() < sums else rng.choice(writers)
            chats.append(write(rng, int(length * 0.95)))
        return self.batch(chats, length, Weights(other=0.05, answer=1.0, digit=1.0), rng)
