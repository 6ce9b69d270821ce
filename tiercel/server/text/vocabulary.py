"""The bytes of each token, and the tokens that may be control tokens."""

import json
import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, cast

from msgspec import Struct
from tokenizers import Tokenizer


class Vocabulary(Struct, frozen=True, kw_only=True):
    """The bytes of each token id, and the ids that are special.

    `pieces` is None if the tokenizer's decoder does not map each token to bytes by itself; then only `decode` gives the
    text.
    """

    pieces: tuple[bytes, ...] | None
    specials: frozenset[int]
    special_ids: tuple[int, ...]
    special_texts: tuple[str, ...]  # of these ids
    added_marks: dict[str, int]  # other added tokens by their text, but for words and white space: see `is_word`
    size: int  # largest id + 1; the logits may be wider or narrower
    strips_first_space: bool
    longest_bytes: int  # of one token; a text of n bytes has at least n / longest_bytes tokens
    decode: Callable[[list[int], bool], str]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token alone; empty for an id without text."""
        if self.pieces is not None:
            return self.pieces[token] if token < len(self.pieces) else b""
        return self.decode([token], False).encode()

    @property
    def special_id_by_text(self) -> dict[str, int]:
        """The ids of the special tokens."""
        return dict(zip(self.special_texts, self.special_ids, strict=True))

    def specials_of(self, texts: Collection[str]) -> frozenset[int]:
        """Return the special tokens that have one of these texts."""
        return frozenset(
            token for token, text in zip(self.special_ids, self.special_texts, strict=True) if text in texts
        )

    @staticmethod
    def of(tokenizer: Tokenizer) -> "Vocabulary":
        """Read a tokenizer's tables. Cost: about 0.3 s for 128,000 tokens."""
        added = tokenizer.get_added_tokens_decoder()
        specials = {token: entry for token, entry in added.items() if entry.special}
        names = tokenizer.get_vocab(with_added_tokens=True)
        steps = _decoder_steps(tokenizer)
        to_bytes = _piece_reader(steps)
        pieces = None if to_bytes is None else _pieces(names, to_bytes)
        longest = max((len(piece) for piece in pieces), default=1) if pieces else 64
        return Vocabulary(
            pieces=pieces,
            specials=frozenset(specials),
            special_ids=tuple(specials),
            special_texts=tuple(entry.content for entry in specials.values()),
            added_marks={
                entry.content: token
                for token, entry in added.items()
                if not entry.special and not is_word(entry.content)
            },
            size=max(names.values(), default=-1) + 1,
            strips_first_space=any(step.get("type") == "Strip" and step.get("start") for step in steps)
            or any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps),
            longest_bytes=max(longest, 1),
            decode=lambda tokens, skip: tokenizer.decode(tokens, skip_special_tokens=skip),
        )


def is_word(text: str) -> bool:
    """Return whether an added token is a word or a run of white space: ordinary vocabulary, which text may become."""
    return all(letter in "▁\n\t\r" or unicodedata.category(letter)[0] in "LMNZ" for letter in text)


def _pieces(names: Mapping[str, int], to_bytes: Callable[[str], bytes]) -> tuple[bytes, ...]:
    pieces = [b""] * (max(names.values(), default=-1) + 1)
    for name, token in names.items():
        pieces[token] = to_bytes(name)
    return tuple(pieces)


class _Pickled(Protocol):
    """A part of a tokenizer that can be written as JSON; writing the whole tokenizer takes a second."""

    def __getstate__(self) -> bytes: ...


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    decoder = cast(_Pickled | None, tokenizer.decoder)
    if decoder is None:
        return []
    step = cast(dict[str, object], json.loads(decoder.__getstate__()))
    if step.get("type") == "Sequence":
        return cast(list[dict[str, object]], step.get("decoders", []))
    return [step]


def _piece_reader(steps: list[dict[str, object]]) -> Callable[[str], bytes] | None:
    """Return the function from a token's spelling to its bytes; None if the decoder looks at neighbouring tokens."""
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"]:
        byte_of = _byte_by_letter()
        return lambda name: _byte_level(name, byte_of)
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if types and set(types) <= known and all(_is_space_replacement(s) for s in steps if s.get("type") == "Replace"):
        return _sentencepiece if "ByteFallback" in types else _without_fallback
    return None


def _is_space_replacement(step: dict[str, object]) -> bool:
    return step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def _byte_by_letter() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable Latin-1 letters are themselves, the other bytes 256 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return letters


def _byte_level(name: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[letter] for letter in name])
    except KeyError:  # an added token is written in plain text
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return name.encode()
    return name.replace("▁", " ").encode()


def _without_fallback(name: str) -> bytes:
    return name.replace("▁", " ").encode()
