"""Tests of the embedded model's grammar, tokenizer and folder."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from tiercel.embedded import MODEL_DIR
from tools.embedded.grammar import (
    FULL_STYLE,
    Chat,
    RecallStyle,
    chat_tokens,
    corpus,
    plain_text,
    prose_chat,
    recall_chat,
    recall_question,
    recall_text,
)
from tools.embedded.words import NAMES

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def _config(name: str = "config") -> dict[str, Any]:
    return json.loads((MODEL_DIR / f"{name}.json").read_text("utf-8"))


def _text(chat: Chat) -> str:
    return "\n".join(message.content for message in chat)


@pytest.mark.parametrize("write", [recall_chat, prose_chat, recall_text, plain_text])
def test_the_same_seed_writes_the_same_chat(write: Any) -> None:
    first = [write(Random(7), tokens) for tokens in (100, 500, 2000)]
    again = [write(Random(7), tokens) for tokens in (100, 500, 2000)]
    assert first == again
    assert write(Random(8), 500) != write(Random(7), 500)


@pytest.mark.parametrize("tokens", [128, 1000, 4000])
def test_a_recall_chat_answers_only_with_codes_stated_before(tokens: int) -> None:
    style = RecallStyle(filler=0.5, paraphrase=0.5)
    for seed in range(20):
        before = ""
        for message in recall_chat(Random(seed), tokens, style):
            if message.role == "assistant":
                for sentence in message.content.split(". "):
                    assert sentence[-5:].strip(".") in before
            else:
                before += message.content


def test_a_question_has_exactly_one_answer_in_its_context() -> None:
    for seed in range(50):
        chat, fact = recall_question(Random(seed), 1000, FULL_STYLE)
        stated = [part for part in _text(chat).split(". ") if fact.code in part and fact.name in part]
        assert len(stated) == 1
        assert chat[-1].role == "user"
        assert fact.name in chat[-1].content


def test_a_question_fills_its_context_with_facts() -> None:
    def count(text: str) -> int:
        return len(TOKENIZER.encode(text).ids)

    for seed in range(10):
        chat, _ = recall_question(Random(seed), 1000, FULL_STYLE, count)
        assert 850 < chat_tokens(chat, count) < 1100


def test_names_in_a_context_are_stated_once() -> None:
    style = RecallStyle()
    for seed in range(20):
        chat, _ = recall_question(Random(seed), 2000, style)
        stated = chat[0].content.split("What is")[0]
        names = [part.split(" is ")[0].split(" of ")[1] for part in stated.split(". ") if " of " in part]
        assert len(names) == len(set(names)) > 100


def test_every_name_and_digit_is_one_token() -> None:
    for name in NAMES:
        assert len(TOKENIZER.encode(f" {name}").ids) == 1
    digits = TOKENIZER.encode("0123456789").ids
    assert len(set(digits)) == len(digits) == 10


def test_every_text_of_the_grammar_survives_the_tokenizer() -> None:
    for text in corpus(seed=1, chats=200):
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_every_id_of_the_head_decodes() -> None:
    size = _config()["vocab_size"]
    assert TOKENIZER.get_vocab_size() == size
    for token in range(size):
        assert TOKENIZER.id_to_token(token) is not None
        assert TOKENIZER.decode([token], skip_special_tokens=False)


def test_the_model_folder_is_at_most_six_megabytes() -> None:
    files = [path for path in Path(MODEL_DIR).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000


def test_the_weights_match_the_config() -> None:
    config = _config()
    with safe_open(str(MODEL_DIR / "model.safetensors"), "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        assert shapes[f"model.layers.{layer}.self_attn.k_proj.weight"] == [kv_size, config["hidden_size"]]
    assert config["max_position_embeddings"] >= 4096


def test_the_chat_template_writes_marked_turns() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert tokenizer.eos_token == "<|im_end|>"
    assert _config("generation_config")["eos_token_id"][0] == tokenizer.eos_token_id
