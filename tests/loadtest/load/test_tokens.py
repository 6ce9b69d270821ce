"""Texts of a wanted length with every kind of counter."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.loadtest.builders import texts
from tiercel.loadtest.load.tokens import EstimatedCounter, FolderCounter, TextMaker, estimate
from tiercel.loadtest.load.word_list import WORDS
from tiercel.values.errors import ConfigError


class LetterCounter:
    """A vocabulary of letters: no word is one token."""

    is_exact = True
    source = "letters"

    def count(self, text: str) -> int:
        return len(text)


class LongWordCounter:
    """Words of up to four letters are one token, longer ones two."""

    is_exact = True
    source = "short words"

    def count(self, text: str) -> int:
        return sum(1 if len(word) <= 4 else 2 for word in text.split())


@pytest.mark.parametrize("counter", [LetterCounter(), LongWordCounter()])
@pytest.mark.parametrize("tokens", [1, 7, 500])
def test_a_text_has_exactly_the_requested_number_of_tokens(
    counter: LetterCounter | LongWordCounter, tokens: int
) -> None:
    text = TextMaker(counter).text(tokens, random.Random(1))
    assert counter.count(text) == tokens


def test_texts_differ_and_repeat_with_their_generator() -> None:
    maker = texts()
    assert maker.text(20, random.Random(1)) == maker.text(20, random.Random(1))
    assert maker.text(20, random.Random(1)) != maker.text(20, random.Random(2))


def test_a_folder_counts_with_its_tokenizer(tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*WORDS, "<unk>"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter = FolderCounter(tmp_path)
    assert counter.count(TextMaker(counter).text(123, random.Random(3))) == 123
    with pytest.raises(ConfigError, match="no tokenizer"):
        FolderCounter(tmp_path / "none")


def test_an_estimate_is_made_from_the_usage_and_marked_as_such() -> None:
    counter = estimate(lambda text: 11 + 2 * len(text.split()))
    assert "2.00 tokens per word" in counter.source
    text = TextMaker(counter).text(100, random.Random(1))
    assert len(text.split()) == 50


def test_an_estimate_without_usage_reports_that_the_server_counts_no_tokens() -> None:
    assert "does not count" in estimate(lambda text: None).source
    assert EstimatedCounter(1.5, "").count("a b c d") == 6
