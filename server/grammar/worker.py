"""The process that checks grammars: `python -m tiercel.server.grammar.worker --fd N`."""

import random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from tiercel.grammar import GRAMMAR_LIMITS
from tiercel.server.grammar.constraint import GrammarFormat
from tiercel.server.grammar.frames import (
    GrammarAccepted,
    GrammarRefused,
    GrammarVerdict,
    TokenizerRead,
    encode_frame,
    job_decoder,
    source_decoder,
)
from tiercel.server.workers.serving import Work, serve

OPEN_S = 30.0
"""Maximum time to read a tokenizer."""

_SILENT = 0  # llguidance would print warnings
_WALKS = 2
_WALK_TOKENS = 48
_MESSAGE_LETTERS = 400


def _open(frame: bytearray) -> tuple[bytes, Work]:
    source = source_decoder.decode(frame)
    try:
        least = LLTokenizer(source.tokenizer).vocab_size
        tokenizer = LLTokenizer(source.tokenizer, n_vocab=max(least, source.vocab_size))
    except ValueError as exc:
        refusal = encode_frame(GrammarRefused("grammars cannot be applied to the tokens of this model"))
        return encode_frame(TokenizerRead(_plain(str(exc)) or "unreadable")), lambda frame: refusal
    checker = GrammarTrial(tokenizer)

    def work(frame: bytearray) -> bytes:
        job = job_decoder.decode(frame)
        return encode_frame(checker.verdict(job.format, job.text))

    return encode_frame(TokenizerRead("")), work


class GrammarTrial:
    """Compiles grammars within the limits that the engine applies, and follows random outputs of them."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        limits = GRAMMAR_LIMITS
        self._tokenizer = tokenizer
        self._limits = LLParserLimits(
            max_items_in_row=limits.max_items_in_row,
            initial_lexer_fuel=limits.initial_lexer_fuel,
            step_lexer_fuel=limits.step_lexer_fuel,
            step_max_items=limits.step_max_items,
            max_lexer_states=limits.max_lexer_states,
            max_grammar_size=limits.max_grammar_size,
            verbose_errors=False,
        )

    def verdict(self, kind: GrammarFormat, text: str) -> GrammarVerdict:
        """Return the llguidance grammar of a text, or why the engine could not apply it.

        Cost: one compilation and up to 96 masks.
        """
        try:
            grammar = _llguidance_text(kind, text)
        except ValueError as exc:
            return GrammarRefused(f"the grammar cannot be read: {_plain(str(exc))}")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=self._limits)
        if matcher.is_error():
            return GrammarRefused(_plain(matcher.get_error()))
        rng = random.Random(0)  # noqa: S311 - the same walks for the same grammar
        for _ in range(_WALKS):
            if (error := self._walk(matcher.deep_copy(), rng)) is not None:
                return GrammarRefused(error)
        return GrammarAccepted(grammar)

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> str | None:
        """Follow one random output. Return the error that the engine would meet."""
        for place in range(_WALK_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return _dead_end(place) if "NoExtension" in matcher.get_error() else _plain(matcher.get_error())
            if matcher.is_stopped():
                return None
            token = _random_token(mask, rng)
            if token is None:
                return _dead_end(place)
            if token in self._tokenizer.eos_tokens:
                return None
            if not matcher.consume_token(token):
                return _plain(matcher.get_error())
        return None


def _dead_end(place: int) -> str:
    if place == 0:
        return "no output matches the grammar"
    return "the grammar has a dead end: the beginning of some outputs cannot be continued"


def _random_token(mask: bytes, rng: random.Random) -> int | None:
    """Return a random set bit: one behind a random place, or the first one; None if there is none."""
    start = rng.randrange(len(mask))
    for tail in (mask[start:], mask):
        found = tail.lstrip(b"\0")
        if found:
            bits = [bit for bit in range(8) if found[0] >> bit & 1]
            return 8 * (len(mask) - len(found)) + rng.choice(bits)
    return None


def _llguidance_text(kind: GrammarFormat, text: str) -> str:
    """Return the llguidance grammar of a text. Errors: ValueError."""
    match kind:
        case "llguidance":
            return text
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "ebnf":
            try:
                return any_to_lark(text)
            except Exception as exc:  # the conversion raises bare ones
                raise ValueError(str(exc)) from exc


def _plain(message: str) -> str:
    """Return an error of llguidance for a client: one line of limited length."""
    lines = message.replace("<non-verbose/>", "").split("\n")
    return " ".join(line.strip() for line in lines if line.strip())[:_MESSAGE_LETTERS]


if __name__ == "__main__":
    serve(_open, open_s=OPEN_S)
