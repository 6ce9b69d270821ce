"""Token ids to text as they arrive; a character is given out when its last byte has come."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tiercel.server.text.vocabulary import Vocabulary

_CONTEXT_TOKENS = 6  # of the prompt, so that the first output token knows whether it starts a text
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes: more than this is no unfinished character


class Detokenizer(Protocol):
    """The text of one sequence's outputs, in pieces."""

    def feed(self, tokens: Iterable[int]) -> str:
        """Take the next tokens; return the text that is complete."""
        ...

    def flush(self) -> str:
        """The end: what was held back, with U+FFFD for what never became a character."""
        ...


def make_detokenizer(vocabulary: Vocabulary, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    """A detokenizer for outputs that follow `prompt`."""
    skipped = vocabulary.specials if skip_special_tokens else frozenset[int]()
    if vocabulary.pieces is None:
        return WindowDetokenizer(vocabulary, prompt, skip_special_tokens=skip_special_tokens)
    starts_text = vocabulary.strips_first_space and all(token in skipped for token in prompt)
    return ByteDetokenizer(vocabulary.pieces, skipped, strip_first_space=starts_text)


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings (byte-level BPE, SentencePiece with byte fallback).

    Cost: a table look-up a token and one UTF-8 decoding a call.
    """

    def __init__(self, pieces: Sequence[bytes], skipped: frozenset[int], *, strip_first_space: bool) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip_first_space = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int]) -> str:
        pieces, skipped, known = self._pieces, self._skipped, len(self._pieces)
        chunk = b"".join([pieces[token] for token in tokens if token < known and token not in skipped])
        if self._strip_first_space and chunk:
            self._strip_first_space = False
            chunk = chunk.removeprefix(b" ")
        return self._decoder.decode(chunk)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a small window twice and gives out the difference.

    Cost: two decodings of a few tokens a call.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._decode = vocabulary.decode
        self._skip = skip_special_tokens
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._given = len(self._window)  # tokens at the front of the window whose text is out

    def feed(self, tokens: Iterable[int]) -> str:
        self._window.extend(tokens)
        held = len(self._window) - self._given
        if held == 0:
            return ""
        before, whole = self._texts()
        if whole.endswith("\ufffd") and held < _MAX_HELD_TOKENS:
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return whole[len(before) :]

    def flush(self) -> str:
        before, whole = self._texts()
        self._given = len(self._window)
        return whole[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._window[: self._given], self._skip)
        return before, self._decode(self._window, self._skip)
