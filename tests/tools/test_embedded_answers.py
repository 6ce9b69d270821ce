"""What the embedded model answers: sums, small questions, and codes of names that it never saw."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiercel.embedded import MODEL_DIR
from tools.embedded.evaluate import (
    LEAST_RECALL,
    UNSEEN_STYLE,
    Answerer,
    is_recalled,
    recall_score,
    small_talk_score,
    wrong_sums,
)
from tools.embedded.recall import Fact
from tools.embedded.small_questions import SMALL_QUESTIONS


@pytest.fixture(scope="module")
def answerer() -> Iterator[Answerer]:
    """The embedded model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Answerer(MODEL_DIR)
    torch.set_num_threads(threads)


def test_every_small_sum_is_right_in_three_phrasings(answerer: Answerer) -> None:
    assert not wrong_sums(answerer)


def test_every_small_question_gets_an_answer_that_ends(answerer: Answerer) -> None:
    assert len({question for question, _ in SMALL_QUESTIONS}) == 50
    endless, odd = small_talk_score(answerer)
    assert not endless
    assert len(odd) <= 5


def test_codes_of_unseen_names_are_recalled_under_their_names(answerer: Answerer) -> None:
    right, _ = recall_score(answerer, 300, 10, UNSEEN_STYLE, seed=1)
    assert right >= 9


@pytest.mark.slow
def test_codes_of_unseen_names_are_recalled_in_a_thousand_tokens(answerer: Answerer) -> None:
    right, tokens = recall_score(answerer, 1000, 200, UNSEEN_STYLE, seed=2)
    assert right >= LEAST_RECALL * 200
    assert 950 < tokens < 1050


def test_an_answer_counts_only_with_the_code_and_the_name() -> None:
    fact = Fact("Xqzvb", "4821")
    assert is_recalled("The code of Xqzvb is 4821.", fact)
    assert not is_recalled("The code of Xqzvb is 4812.", fact)
    assert not is_recalled("The code of Xqzb is 4821.", fact)
    assert not is_recalled("The code of Xqzvbb is 4821.", fact)
    assert not is_recalled("The code of Xqzvb is", fact)
