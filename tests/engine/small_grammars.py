"""Grammars over a vocabulary of eleven tokens, compiled at once."""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tiercel.engine.grammar_queue import CompileEnd
from tiercel.engine.sampling import Grammar, GrammarCompiler, open_compiler
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import GrammarGauges
from tiercel.values.request import Request

LETTERS = "abcdefghij"
END_TOKEN = 3  # the other ten ids are the letters, in order


def token_of(letter: str) -> int:
    """Return the id of a letter."""
    at = LETTERS.index(letter)
    return at + (at >= END_TOKEN)


def text_of(tokens: list[int]) -> str:
    """Return the letters of tokens; the end token is a dot."""
    return "".join("." if token == END_TOKEN else LETTERS[token - (token > END_TOKEN)] for token in tokens)


def write_tokenizer(folder: Path, letters: str = LETTERS) -> None:
    """Write a tokenizer.json whose tokens are letters and one end token."""
    vocab = {letter: token_of(letter) if letter in LETTERS else 1 + ord(letter) for letter in letters}
    end = {"id": END_TOKEN, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {**vocab, "<|end|>": END_TOKEN}, "merges": [], "byte_fallback": False,
             "ignore_merges": False, "fuse_unk": False, "dropout": None, "unk_token": None,
             "continuing_subword_prefix": None, "end_of_word_suffix": None}  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
             "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole))


@cache
def small_compiler() -> GrammarCompiler:
    """Return a compiler for the eleven tokens."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return open_compiler(Path(folder), len(LETTERS) + 1, (END_TOKEN,))


@cache
def compiled(text: str) -> Grammar:
    """Return a compiled grammar."""
    grammar = small_compiler().compile(text)
    assert isinstance(grammar, Grammar), grammar
    return grammar


class GrammarsAtOnce:
    """Grammars that are compiled while the request is taken in."""

    def __init__(self) -> None:
        self.in_use: set[SeqId] = set()

    def want(self, request: Request) -> bool:
        compiled(request.params.grammar)
        self.in_use.add(request.id)
        return True

    def drop(self, seq: SeqId) -> None:
        self.in_use.discard(seq)

    def poll(self) -> list[CompileEnd]:
        return []

    def get(self, request: Request) -> Grammar | None:
        return compiled(request.params.grammar)

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        pass

    def gauges(self) -> GrammarGauges:
        return GrammarGauges()
