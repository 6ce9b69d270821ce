"""Texts with a wanted number of tokens, counted by the server, by a tokenizer folder, or estimated."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import httpx
from tokenizers import Tokenizer

from tiercel.loadtest.load.word_list import WORDS
from tiercel.system.file_fault import check_file, is_there
from tiercel.values.errors import ConfigError

_MIN_WORDS = 40  # minimum number of one-token words; with fewer, texts would repeat themselves


class TokenCounter(Protocol):
    """Counts the tokens of a text, without the tokens that a server adds, such as those of a chat template."""

    is_exact: bool
    source: str  # description for the report

    def count(self, text: str) -> int:
        """Return the number of tokens."""
        ...


class FolderCounter:
    """The tokenizer of a model folder."""

    is_exact = True

    def __init__(self, folder: Path) -> None:
        self.source = f"tokenizer of {folder.name}"
        file = folder if folder.is_file() else folder / "tokenizer.json"
        if is_there(file):
            check_file(file)
        else:
            raise ConfigError(
                "bench.tokenizer",
                f"--tokenizer {folder}: no tokenizer.json there (leave the flag out to let the server count)",
            )
        self._tokenizer = Tokenizer.from_file(str(file))

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class ServerCounter:
    """The server's /tokenize, called once for each text."""

    is_exact = True
    source = "the server's /tokenize"

    def __init__(self, client: httpx.Client, url: str, model: str) -> None:
        self._client = client
        self._url = url
        self._model = model

    def count(self, text: str) -> int:
        """Return the number of tokens. Errors: ConfigError when the server has no /tokenize."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            response = self._client.post(self._url, json=body)
            response.raise_for_status()
            answer = response.json()
            return int(answer["count"]) if "count" in answer else len(answer["tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
            raise ConfigError("bench.tokenize", f"the server does not count tokens: {exc}") from exc


class EstimatedCounter:
    """A fixed number of tokens per word, derived from the server's usage if it reports any."""

    is_exact = False

    def __init__(self, tokens_per_word: float, source: str) -> None:
        self.source = source
        self._tokens_per_word = tokens_per_word

    def count(self, text: str) -> int:
        return round(len(text.split()) * self._tokens_per_word)


def estimate(prompt_tokens: Callable[[str], int | None]) -> EstimatedCounter:
    """Return a counter estimated from two requests. `prompt_tokens` sends a prompt and returns its usage, if any."""
    short, long = " ".join(WORDS[:40]), " ".join(WORDS[:240])
    few, many = prompt_tokens(short), prompt_tokens(long)
    if few is None or many is None or many <= few:
        return EstimatedCounter(1.3, "an estimate of 1.3 tokens per word: the server does not count them")
    per_word = (many - few) / 200
    return EstimatedCounter(per_word, f"an estimate of {per_word:.2f} tokens per word, from the server's usage")


class TextMaker:
    """Makes random texts of a wanted length. The counter is first called for the first text."""

    def __init__(self, counter: TokenCounter) -> None:
        self.counter = counter
        self._words: tuple[str, ...] | None = None

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return self.counter.count(text)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Return a text of `tokens` tokens, approximately if the counter is not exact."""
        if self._words is None:
            self._words = self._single_words()
        if not self.counter.is_exact:
            one = self.counter.count(" ".join(WORDS[:100])) / 100
            return _join([rng.choice(WORDS) for _ in range(max(1, round(tokens / one)))])
        if len(self._words) >= _MIN_WORDS:
            return _join([rng.choice(self._words) for _ in range(tokens)])
        return self._fitted(tokens, rng)

    def _single_words(self) -> tuple[str, ...]:
        """Return the words of exactly one token. They are found by halving: most are, so that few calls are needed."""
        if not self.counter.is_exact:
            return WORDS
        found = tuple(self._split(tuple(dict.fromkeys(WORDS))))
        together = self.counter.count(_join(found)) if found else 0
        return found if together == len(found) else ()

    def _split(self, words: Sequence[str]) -> list[str]:
        tokens = self.counter.count(_join(words))
        if tokens == len(words):
            return list(words)
        if len(words) == 1 or tokens > 1.8 * len(words):
            return []
        half = len(words) // 2
        return self._split(words[:half]) + self._split(words[half:])

    def _fitted(self, tokens: int, rng: random.Random) -> str:
        """Return a text for a vocabulary without common words, cut at the character that comes closest to `tokens`."""
        text = ""
        while self.counter.count(text) < tokens:
            text += _join([rng.choice(WORDS) for _ in range(max(1, tokens // 8))])
        low, high = 0, len(text)
        while low < high:
            middle = (low + high) // 2
            if self.counter.count(text[:middle]) < tokens:
                low = middle + 1
            else:
                high = middle
        return text[:low]


def _join(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)
