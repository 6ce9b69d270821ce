"""Texts of a wanted number of tokens: counted by the server, by a tokenizer folder, or estimated and said so."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import httpx
from tokenizers import Tokenizer

from tiercel.errors import ConfigError
from tiercel.loadtest.load.word_list import WORDS

_FEW_WORDS = 40  # fewer words of one token than this would make texts that repeat themselves


class TokenCounter(Protocol):
    """Counts tokens of a text, without those that a server adds around it."""

    is_exact: bool
    source: str  # in words, for the report

    def count(self, text: str) -> int: ...


class FolderCounter:
    """The tokenizer of a model folder."""

    is_exact = True

    def __init__(self, folder: Path) -> None:
        self.source = f"tokenizer of {folder.name}"
        file = folder if folder.is_file() else folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                "bench.tokenizer",
                f"--tokenizer {folder}: no tokenizer.json there (leave the flag out to let the server count)",
            )
        self._tokenizer = Tokenizer.from_file(str(file))

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Its token ids."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class ServerCounter:
    """The server's /tokenize. One call a text."""

    is_exact = True
    source = "the server's /tokenize"

    def __init__(self, client: httpx.Client, url: str, model: str) -> None:
        self._client = client
        self._url = url
        self._model = model

    def count(self, text: str) -> int:
        """Errors: ConfigError when the server has no /tokenize."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            response = self._client.post(self._url, json=body)
            response.raise_for_status()
            answer = response.json()
            return int(answer["count"]) if "count" in answer else len(answer["tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
            raise ConfigError("bench.tokenize", f"the server does not count tokens: {exc}") from exc


class EstimatedCounter:
    """A fixed number of tokens a word, measured on the server's own usage figures if it gives any."""

    is_exact = False

    def __init__(self, tokens_per_word: float, source: str) -> None:
        self.source = source
        self._tokens_per_word = tokens_per_word

    def count(self, text: str) -> int:
        return round(len(text.split()) * self._tokens_per_word)


def estimate(prompt_tokens: Callable[[str], int | None]) -> EstimatedCounter:
    """Calibrate an estimate with two requests: `prompt_tokens` sends a prompt and returns the usage, if any."""
    short, long = " ".join(WORDS[:40]), " ".join(WORDS[:240])
    few, many = prompt_tokens(short), prompt_tokens(long)
    if few is None or many is None or many <= few:
        return EstimatedCounter(1.3, "an estimate of 1.3 tokens a word: nobody counts")
    per_word = (many - few) / 200
    return EstimatedCounter(per_word, f"an estimate of {per_word:.2f} tokens a word, calibrated on the server's usage")


class TextMaker:
    """Random texts of a wanted length. Nothing is counted before the first one."""

    def __init__(self, counter: TokenCounter) -> None:
        self.counter = counter
        self._words: tuple[str, ...] | None = None

    def count(self, text: str) -> int:
        return self.counter.count(text)

    def text(self, tokens: int, rng: random.Random) -> str:
        """A text of `tokens` tokens; of about as many where the counter only estimates."""
        if self._words is None:
            self._words = self._single_words()
        if not self.counter.is_exact:
            one = self.counter.count(" ".join(WORDS[:100])) / 100
            return _join([rng.choice(WORDS) for _ in range(max(1, round(tokens / one)))])
        if len(self._words) >= _FEW_WORDS:
            return _join([rng.choice(self._words) for _ in range(tokens)])
        return self._fitted(tokens, rng)

    def _single_words(self) -> tuple[str, ...]:
        """The words of exactly one token, found by halving: few calls, because most words are."""
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
        """For vocabularies without common words: lengthen and cut by letters until the count is right, or closest."""
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
