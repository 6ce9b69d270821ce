"""Token ids to text as they arrive. A character is returned with its last byte."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tiercel.server.text.vocabulary import Vocabulary

_CONTEXT_TOKENS = 6  # of the prompt: they decide whether the first output token starts a text
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes; more tokens than this are not an unfinished character


class Detokenizer(Protocol):
    """The text of one sequence's outputs, in pieces."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that is complete."""
        ...

    def flush(self) -> str:
        """Return the text held back at the end, with U+FFFD for an unfinished character."""
        ...


def make_detokenizer(
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    *,
    skip_special_tokens: bool,
    visible_texts: frozenset[str] = frozenset(),
) -> Detokenizer:
    """Return a detokenizer for outputs that follow `prompt`. See docs/decisions/0024-our-own-detokenizer.md.

    Special tokens with one of `visible_texts` are not skipped; a decoder that looks at neighbouring tokens then skips
    none.
    """
    skipped = vocabulary.specials if skip_special_tokens else frozenset[int]()
    visible = vocabulary.specials_of(visible_texts) if skip_special_tokens and visible_texts else frozenset[int]()
    if vocabulary.pieces is None:
        return WindowDetokenizer(vocabulary, prompt, skip_special_tokens=skip_special_tokens and not visible)
    skipped -= visible
    starts_text = vocabulary.strips_first_space and all(token in skipped for token in prompt)
    return ByteDetokenizer(vocabulary.pieces, skipped, strip_first_space=starts_text)


class ByteDetokenizer:
    """A detokenizer for tokens that are byte strings (byte-level BPE, SentencePiece with byte fallback).

    Cost: one table look-up per token and one UTF-8 decoding per call.
    """

    __slots__ = ("_pieces", "_rest", "_skipped", "_strip_first_space")

    def __init__(self, pieces: Sequence[bytes], skipped: frozenset[int], *, strip_first_space: bool) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip_first_space = strip_first_space
        self._rest = b""  # the first bytes of an unfinished character

    def feed(self, tokens: Sequence[int]) -> str:
        pieces, skipped, known = self._pieces, self._skipped, len(self._pieces)
        if len(tokens) == 1:  # without a list
            (token,) = tokens
            chunk = pieces[token] if token < known and token not in skipped else b""
        else:
            chunk = b"".join([pieces[token] for token in tokens if token < known and token not in skipped])
        if self._strip_first_space and chunk:
            self._strip_first_space = False
            chunk = chunk.removeprefix(b" ")
        if self._rest:
            chunk = self._rest + chunk
        text, used = codecs.utf_8_decode(chunk, "replace", False)
        self._rest = chunk[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class WindowDetokenizer:
    """A detokenizer for any other tokenizer: it decodes a small window twice and returns the difference.

    Cost: two decodings of a few tokens per call.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._decode = vocabulary.decode
        self._skip = skip_special_tokens
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._returned = len(self._window)  # tokens at the front of the window whose text has been returned

    def feed(self, tokens: Sequence[int]) -> str:
        self._window.extend(tokens)
        held = len(self._window) - self._returned
        if held == 0:
            return ""
        before, whole = self._texts()
        if whole.endswith("\ufffd") and held < _MAX_HELD_TOKENS:
            return ""
        self._window = self._window[self._returned :]
        self._returned = len(self._window)
        return whole[len(before) :]

    def flush(self) -> str:
        before, whole = self._texts()
        self._returned = len(self._window)
        return whole[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._window[: self._returned], self._skip)
        return before, self._decode(self._window, self._skip)
