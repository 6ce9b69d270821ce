"""Prompts of an exact number of tokens."""

import random
import re
from pathlib import Path

from tokenizers import Tokenizer

_WORD = re.compile("Ġ[a-z]{2,8}")  # a byte-level token for a space and a short word


class Prompts:
    """Makes texts whose words are single tokens. A text depends on its key only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        candidates = sorted(" " + token[1:] for token in tokenizer.get_vocab() if _WORD.fullmatch(token))
        self._words = [word for word in candidates if self.count(word) == 1]

    @classmethod
    def of_model(cls, folder: Path) -> "Prompts":
        """Return the prompts for the tokenizer of a model folder."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: int, key: str) -> str:
        """Return a text of this many tokens. Words start with a space, so that joined texts keep their lengths."""
        return "".join(random.Random(key).choices(self._words, k=tokens))
