"""Builds the tokenizer: byte-level BPE over the grammar's words, with single-digit tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tools.embedded.grammar import corpus
from tools.embedded.words import CAPITALS, NAMES

VOCAB_SIZE: Final[int] = 1792
MAX_LENGTH: Final[int] = 4608
PAD: Final[str] = "<|endoftext|>"
START: Final[str] = "<|im_start|>"
END: Final[str] = "<|im_end|>"
SPECIALS: Final[tuple[str, ...]] = (PAD, START, END)

CHAT_TEMPLATE: Final[str] = r"""{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] + '\n\n' -}}
{%- endif -%}
{{- 'You can call these functions.\n<tools>\n' -}}
{%- for tool in tools -%}
{{- (tool | tojson) + '\n' -}}
{%- endfor -%}
{{- '</tools>\nA call is written as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + message['content'] + '\n</tool_response><|im_end|>\n' -}}
{%- elif message['tool_calls'] -%}
{{- '<|im_start|>assistant\n' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] -%}
{%- set given = call['function']['arguments'] -%}
{{- '<tool_call>\n{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' -}}
{{- (given if given is string else given | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}"""
"""ChatML. Tools are shown in the system message; without them, prompts are those of the training."""


def _training_text() -> Iterator[str]:
    """The grammar's text, with every name often enough to become one token."""
    names = "".join(f" {name}" for name in NAMES)
    cities = "".join(f" {word}" for pair in CAPITALS.items() for word in pair)
    for _ in range(3000):
        yield names
        yield cities
    for _ in range(20000):
        yield "user\n"
        yield "assistant\n"
        yield "system\n"
    yield from corpus(seed=20261120, chats=12000)


def build_tokenizer() -> Tokenizer:
    """Train the tokenizer; the same grammar gives the same tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and the files that transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
