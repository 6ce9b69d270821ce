"""The process that checks grammars: `python -m tiercel.server.grammar.worker --fd N`."""

import os
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

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
from tiercel.server.grammar.lark import composed_terminals
from tiercel.server.grammar.proof import DeadEnd, dead_end, read_rules
from tiercel.server.workers.serving import Work, serve
from tiercel.values.grammar import GRAMMAR_LIMITS
from tiercel.values.grammar_words import NO_END, NO_OUTPUT, NOTHING_ALLOWED, UNKNOWN_ERROR, in_own_words

STDERR = 2
OPEN_S = 30.0
"""Maximum time to read a tokenizer."""

_PRINTS_RULES = 3  # the log level
_WALKS = 2
_WALK_TOKENS = 48
_MAX_PROBES = 64  # terminals made with & or ~
# Words in warnings and errors of the compiler -> the keywords that do not act.
_PARTLY = {"oneOf": ("oneOf",), "min/maxProperties": ("minProperties", "maxProperties")}


def _open(frame: bytearray) -> tuple[bytes, Work]:
    source = source_decoder.decode(frame)
    try:
        least = LLTokenizer(source.tokenizer).vocab_size
        tokenizer = LLTokenizer(source.tokenizer, n_vocab=max(least, source.vocab_size))
    except ValueError:
        refusal = encode_frame(GrammarRefused("grammars cannot be applied to the tokens of this model"))
        return encode_frame(TokenizerRead("its tokens cannot be read")), lambda frame: refusal
    checker = GrammarTrial(tokenizer)

    def work(frame: bytearray) -> bytes:
        job = job_decoder.decode(frame)
        return encode_frame(checker.verdict(job.format, job.text))

    return encode_frame(TokenizerRead("")), work


class GrammarTrial:
    """Compiles grammars within the limits that the engine applies, proves their rules, and follows random outputs."""

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

        Cost: one compilation, the reading of its rules, and up to 96 masks.
        """
        try:
            grammar = _llguidance_text(kind, text)
        except _UnreadableError as exc:
            return GrammarRefused(exc.message)
        with printed_to_memory() as printed:
            matcher = self._compiled(grammar)
            if matcher.is_error():
                words = in_own_words(matcher.get_error(), with_place=grammar == text and kind == "ebnf")
                return GrammarRefused(words, _partly_in(matcher.get_error()))
            rules = read_rules(printed())
            if rules is None:
                return GrammarRefused(UNKNOWN_ERROR)
            if (end := dead_end(rules)) is not None:
                return GrammarRefused(_said(end))
            if kind == "ebnf" and rules.is_composed and (empty := self._empty_terminal(grammar)) is not None:
                return GrammarRefused(f"the terminal '{empty}' matches no text")
            rng = random.Random(0)  # noqa: S311 - the same walks for the same grammar
            for _ in range(_WALKS):
                if (error := self._walk(matcher.deep_copy(), rng)) is not None:
                    return GrammarRefused(error)
            warnings = "\n".join(matcher.get_grammar_warnings())
        return GrammarAccepted(grammar, _partly_in(warnings))

    def _compiled(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=_PRINTS_RULES, limits=self._limits)

    def _empty_terminal(self, grammar: str) -> str | None:
        """Return a terminal made with & or ~ that matches no text; the printed rules do not tell."""
        names, rest = composed_terminals(grammar)
        for name in names[:_MAX_PROBES]:
            matcher = self._compiled(f"{rest}\nstart: {name}\n")
            if not matcher.is_error():
                mask = matcher.compute_bitmask()
                if matcher.is_error() or not any(mask):
                    return name
        return None

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> str | None:
        """Follow one random output. Return the error that the engine would meet."""
        for place in range(_WALK_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                words = in_own_words(matcher.get_error())
                return _dead_end(place) if words == NOTHING_ALLOWED else words
            if matcher.is_stopped():
                return None
            token = _random_token(mask, rng)
            if token is None:
                return _dead_end(place)
            if token in self._tokenizer.eos_tokens:
                return None
            if not matcher.consume_token(token):
                return in_own_words(matcher.get_error())
        return None


@contextmanager
def printed_to_memory() -> Generator[Callable[[], str]]:
    """Give the process a standard error of memory, and a function that returns what was printed there so far.

    The compiler prints its rules there and returns them in no other way. Everything that it prints later is dropped.
    """
    kept = os.dup(STDERR)
    with os.fdopen(os.memfd_create("rules"), "rb") as memory:
        os.dup2(memory.fileno(), STDERR)

        def printed() -> str:
            memory.seek(0)
            text = memory.read().decode(errors="replace")
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), STDERR)
            return text

        try:
            yield printed
        finally:
            os.dup2(kept, STDERR)
            os.close(kept)


def _partly_in(words: str) -> tuple[str, ...]:
    return tuple(name for mark, names in _PARTLY.items() if mark in words for name in names)


def _said(end: DeadEnd) -> str:
    words = NO_END if end.can_begin else NO_OUTPUT
    if end.rule in ("", "start"):
        return words
    kind = "$ref to" if end.rule.startswith("#") else "rule"
    return f"{words}: the {kind} '{end.rule[:64]}' leads back to itself in every case or matches no text"


def _dead_end(place: int) -> str:
    if place == 0:
        return NO_OUTPUT
    return "it has a dead end: the beginning of some outputs cannot be continued"


def _random_token(mask: bytes, rng: random.Random) -> int | None:
    """Return a random set bit: one behind a random place, or the first one; None if there is none."""
    start = rng.randrange(len(mask))
    for tail in (mask[start:], mask):
        found = tail.lstrip(b"\0")
        if found:
            bits = [bit for bit in range(8) if found[0] >> bit & 1]
            return 8 * (len(mask) - len(found)) + rng.choice(bits)
    return None


class _UnreadableError(Exception):
    """A text that is no grammar; `message` is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def _llguidance_text(kind: GrammarFormat, text: str) -> str:
    """Return the llguidance grammar of a text. Errors: _UnreadableError."""
    match kind:
        case "llguidance":
            return text
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "ebnf":
            try:
                return any_to_lark(text)
            except Exception as exc:  # the conversion raises bare ones
                raise _UnreadableError(in_own_words(str(exc), with_place=True)) from exc


if __name__ == "__main__":
    serve(_open, open_s=OPEN_S)
