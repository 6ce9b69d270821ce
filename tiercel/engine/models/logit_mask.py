"""Ids of the logits that no token has, as embeddings that were padded to a round size have them: never drawn."""

import logging
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

log = logging.getLogger(__name__)


class _Model(Struct):
    vocab: dict[str, int] | list[object]


class _Added(Struct):
    id: int


class _TokenizerFile(Struct):
    """The part of a tokenizer.json that says which ids have a token."""

    model: _Model
    added_tokens: list[_Added] = []


class LogitMask:
    """Sets the logits of ids without a token to -inf, in the one place that every draw and every list of
    log-probabilities has its numbers from."""

    def __init__(self, tokenless: Collection[int], vocab_size: int, device: torch.device) -> None:
        """`tokenless`: ids below `vocab_size`, not all of them."""
        missing = np.zeros(vocab_size, np.bool_)
        missing[list(tokenless)] = True
        self._end = int(np.flatnonzero(~missing)[-1]) + 1  # of the ids with a token
        holes = np.flatnonzero(missing[: self._end])
        self._holes = torch.from_numpy(holes).to(device) if len(holes) else None

    def apply_no_sync(self, logits: Tensor) -> Tensor:
        """Change the logits in place, and return them. Shapes: [N, vocab_size]. Cost: one kernel or two."""
        logits[:, self._end :] = -torch.inf
        if self._holes is not None:
            logits.index_fill_(1, self._holes, -torch.inf)
        return logits


def read_logit_mask(
    folder: Path, vocab_size: int, end_tokens: Collection[int], device: torch.device
) -> LogitMask | None:
    """Return the mask of a tokenizer folder; None if every id has a token, or the tokens are not known.

    `end_tokens` may be drawn in any case: without them no answer would end. Cost: 0.1 s for 150,000 tokens.
    """
    try:
        found = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # who needs the tokenizer says what is wrong with it
    vocab = found.model.vocab
    ids = {*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))}
    ids |= {entry.id for entry in found.added_tokens}
    ids |= set(end_tokens)
    tokenless = [token for token in range(vocab_size) if token not in ids]
    if not tokenless or len(tokenless) == vocab_size:
        return None
    log.info(
        "ids without a token are never drawn count=%d first=%d logits=%d", len(tokenless), tokenless[0], vocab_size
    )
    return LogitMask(tokenless, vocab_size, device)
