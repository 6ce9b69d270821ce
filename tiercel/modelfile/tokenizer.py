"""The tokenizer of a model, from the metadata of its GGUF file, as tokenizer.json of a Hugging Face folder has it.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The names of pre-tokenizers, and what each stands for,
are those of llama.cpp: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from tiercel.modelfile.fields import MetadataFields
from tiercel.modelfile.merges import listed_merges, merges_by_score

_PLACE = "tokenizer.ggml"
_SPACE = "▁"
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end an answer, whether or not the file says so."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}


class TokenType(IntEnum):
    """The kinds of tokens in a file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """The division of a text into words before merges. `expression`: of one word; None: that of GPT-2."""

    expression: str | None = None
    splits_digits: bool = False
    ignores_merges: bool = False  # a word that is a token is taken as it is
    adds_start: bool = False  # unless the file says something else
    normalizes: bool = False  # to Unicode's form NFC

    @property
    def steps(self) -> dict[str, object]:
        """The steps of tokenizer.json."""
        steps: list[dict[str, object]] = []
        if self.splits_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.expression is not None:
            pattern = {"Regex": self.expression}
            steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        steps.append({**_BYTES, "use_regex": self.expression is None})
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA_BPE = _PreTokenizer(_LLAMA3, ignores_merges=True, adds_start=True)
_DIGITS = _PreTokenizer(splits_digits=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": _PreTokenizer(_LLAMA3),
    "smaug-bpe": _PreTokenizer(_LLAMA3),
    "qwen2": _PreTokenizer(_QWEN2, normalizes=True),
    "deepseek-r1-qwen": _PreTokenizer(_QWEN2, normalizes=True),
    "tekken": _PreTokenizer(_TEKKEN, ignores_merges=True, adds_start=True),
    "gpt-2": _PreTokenizer(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
}


@dataclass(frozen=True, slots=True)
class FileTokenizer:
    """The tokenizer of a file, as the objects of two files of a folder; and the tokens that end an answer."""

    tokenizer: Mapping[str, object]  # tokenizer.json
    config: Mapping[str, object]  # tokenizer_config.json
    start: int | None
    ends: tuple[int, ...]


def read_tokenizer(fields: MetadataFields) -> FileTokenizer:
    """Return the tokenizer of a file. Errors: ModelFileError naming the key."""
    kind = fields.choice(f"{_PLACE}.model", ("gpt2", "llama"))
    vocabulary = _Vocabulary.of(fields)
    default = (1, 2, 0) if kind == "llama" else (None, None, None)
    start, end, unknown = (
        vocabulary.special(fields, name, number)
        for name, number in zip(("bos_token_id", "eos_token_id", "unknown_token_id"), default, strict=True)
    )
    if kind == "gpt2":
        pre = _PRE_TOKENIZERS[fields.choice(f"{_PLACE}.pre", tuple(_PRE_TOKENIZERS))]
        parts, adds_start = _byte_level(fields, vocabulary, pre), pre.adds_start
    else:
        parts, adds_start = _by_score(fields, vocabulary, unknown), True
    named_ends = (end, *(vocabulary.special(fields, f"{name}_token_id") for name in ("eot", "eom")))
    known_ends = (vocabulary.ids[text] for text in _END_TEXTS if text in vocabulary.ids)
    ends = tuple(dict.fromkeys(token for token in (*named_ends, *known_ends) if token is not None))
    padding = vocabulary.special(fields, "padding_token_id")
    specials = {token for token in (start, unknown, padding, *ends) if token is not None}
    first = start if fields.flag(f"{_PLACE}.add_bos_token", adds_start) else None
    last = end if fields.flag(f"{_PLACE}.add_eos_token", False) else None
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(specials),
        "post_processor": _post_processor(vocabulary.texts, first, last),
        **parts,
    }
    named = {"bos_token": start, "eos_token": end, "unk_token": unknown, "pad_token": padding}
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": first is not None,
        "add_eos_token": last is not None,
        **{name: vocabulary.texts[token] for name, token in named.items() if token is not None},
    }
    if fields.has("tokenizer.chat_template"):
        config["chat_template"] = fields.text("tokenizer.chat_template")
    return FileTokenizer(tokenizer, config, start, ends)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file: their texts, the ids of these, and their types."""

    texts: tuple[str, ...]
    ids: Mapping[str, int]
    types: tuple[int, ...]

    @staticmethod
    def of(fields: MetadataFields) -> "_Vocabulary":
        """Read the tokens. Errors: ModelFileError, also if two have the same text."""
        key = f"{_PLACE}.tokens"
        # An empty text is a place that is not used. It gets a text of its own, because each needs one.
        texts = tuple(text or f"[EMPTY_{token}]" for token, text in enumerate(fields.texts(key)))
        ids: dict[str, int] = {}
        for token, text in enumerate(texts):
            if text in ids:
                raise fields.wrong(key, f"tokens {ids[text]:,} and {token:,} are both {text!r:.80}")
            ids[text] = token
        types = fields.numbers(f"{_PLACE}.token_type", len(texts))
        return _Vocabulary(texts, ids, (TokenType.NORMAL,) * len(texts) if types is None else tuple(map(int, types)))

    def special(self, fields: MetadataFields, name: str, default: int | None = None) -> int | None:
        """Return the id of a token that has a function; None if the file names none. Errors: ModelFileError."""
        key = f"{_PLACE}.{name}"
        if default is None and not fields.has(key):
            return None
        return fields.count(key, default, least=0, most=len(self.texts) - 1)

    def added(self, specials: set[int]) -> list[dict[str, object]]:
        """Return the tokens that are found in texts before anything else; `specials` are control tokens, too."""
        controls = {TokenType.CONTROL, TokenType.UNKNOWN}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token, "content": text, **flags, "special": token in specials or kind in controls}
            for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if token in specials or kind in controls or kind == TokenType.USER_DEFINED
        ]


def _byte_level(fields: MetadataFields, vocabulary: _Vocabulary, pre: _PreTokenizer) -> dict[str, object]:
    """Return the parts of a tokenizer whose letters are bytes, as GPT-2 began it."""
    return {
        "normalizer": {"type": "NFC"} if pre.normalizes else None,
        "pre_tokenizer": pre.steps,
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignores_merges,
            "vocab": vocabulary.ids,
            "merges": listed_merges(fields, f"{_PLACE}.merges", vocabulary.ids),
        },
    }


def _by_score(fields: MetadataFields, vocabulary: _Vocabulary, unknown: int | None) -> dict[str, object]:
    """Return the parts of a tokenizer of SentencePiece: its letters are characters, or bytes for unknown ones."""
    if fields.flag(f"{_PLACE}.remove_extra_whitespaces", False):
        raise fields.wrong(f"{_PLACE}.remove_extra_whitespaces", "is not supported")
    is_prefixed = fields.flag(f"{_PLACE}.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend: list[dict[str, object]] = [{"type": "Prepend", "prepend": _SPACE}] if is_prefixed else []
    strip: list[dict[str, object]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if is_prefixed else []
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    mergeable = {TokenType.NORMAL, TokenType.USER_DEFINED}
    usable = frozenset(text for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind in mergeable)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.texts[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": merges_by_score(fields, f"{_PLACE}.scores", vocabulary.ids, usable),
        },
    }


def _post_processor(texts: tuple[str, ...], first: int | None, last: int | None) -> dict[str, object] | None:
    """Return the step that adds tokens before and after a text."""
    if first is None and last is None:
        return None

    def special(token: int | None, kind: int) -> list[dict[str, object]]:
        return [] if token is None else [{"SpecialToken": {"id": texts[token], "type_id": kind}}]

    def around(name: str, kind: int) -> list[dict[str, object]]:
        return [*special(first, kind), {"Sequence": {"id": name, "type_id": kind}}, *special(last, kind)]

    tokens = [token for token in (first, last) if token is not None]
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            texts[token]: {"id": texts[token], "ids": [token], "tokens": [texts[token]]} for token in tokens
        },
    }
