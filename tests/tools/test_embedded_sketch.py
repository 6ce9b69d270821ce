"""Tests of where training starts, of its optimiser, and of names that no list holds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from tiercel.embedded import MODEL_DIR
from tools.embedded.batches import Encoder, Weights
from tools.embedded.muon import Muon
from tools.embedded.network import Network, Shape
from tools.embedded.recall import (
    FULL_STYLE,
    LONGEST_NAME,
    SHORTEST_NAME,
    RecallStyle,
    draw_names,
    letter_name,
    made_up_name,
    recall_question,
)
from tools.embedded.sketch import sketch_lookup
from tools.embedded.words import NAMES

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
LETTERS = RecallStyle(made_up=1.0, known=0.0, letters=1.0, alike=0.0)


@pytest.mark.parametrize("letters", [0.0, 1.0])
def test_made_up_names_have_three_to_nine_letters_and_are_in_no_list(letters: float) -> None:
    rng, style = Random(1), RecallStyle(letters=letters)
    names = [made_up_name(rng, style) for _ in range(3000)]
    assert {len(name) for name in names} >= set(range(SHORTEST_NAME, LONGEST_NAME + 1))
    assert min(map(len, names)) == SHORTEST_NAME
    assert all(name.isascii() and name.isalpha() and name.istitle() for name in names)
    assert not set(names) & set(NAMES)


def test_names_of_letters_use_each_letter_at_each_place() -> None:
    rng = Random(1)
    names = [letter_name(rng).lower() for _ in range(8000)]
    for place in range(LONGEST_NAME):
        assert len({name[place] for name in names if len(name) > place}) == 26


def test_a_chat_of_made_up_names_has_distinct_ones_and_none_of_the_list() -> None:
    for seed in range(20):
        names = draw_names(Random(seed), 100, replace(LETTERS, alike=0.5))
        assert len(set(names)) == len(names) > 90
        assert not set(names) & set(NAMES)
        chat, fact = recall_question(Random(seed), 300, LETTERS)
        assert fact.name not in NAMES
        assert fact.name in chat[-1].content


def _share_of_codes(network: Network) -> float:
    """The share of codes whose first digit is right, under names that the network never saw."""
    encoder = Encoder(TOKENIZER)
    batch = encoder.recall_batch(Random(5), 2048, 256, LETTERS, Weights())
    with torch.inference_mode():
        hidden = network(batch.ids).view(-1, network.shape.hidden)[batch.places[batch.leads]]
        found = network.logits(hidden).argmax(-1)
    assert len(found) > 15
    return (found == batch.targets[batch.leads]).float().mean().item()


def test_the_sketch_finds_codes_by_unseen_names_before_any_training() -> None:
    torch.manual_seed(0)
    network = Network(Shape())
    assert _share_of_codes(network) < 0.2
    sketch_lookup(network, TOKENIZER)
    assert _share_of_codes(network) > 0.4


def test_a_step_of_muon_is_that_of_torch() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((16, 32), (32, 16), (16, 16), (16, 32))]
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    ours = Muon(weights, lr=0.01)
    theirs = torch.optim.Muon(copies, lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = torch.randn_like(weight)
            copy.grad = weight.grad.clone()
        before = [weight.detach().clone() for weight in weights]
        ours.step()
        theirs.step()
        for weight, copy, old in zip(weights, copies, before, strict=True):
            assert (weight - copy).norm() < 0.03 * (weight - old).norm()  # torch rounds to bfloat16


def test_the_style_of_evaluation_mixes_known_and_made_up_names() -> None:
    chats = [draw_names(Random(seed), 40, FULL_STYLE) for seed in range(200)]
    invented = [sum(name not in NAMES for name in names) for names in chats]
    assert 10 < sum(count > 0 for count in invented) < 60
