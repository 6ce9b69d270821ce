"""Grammars: which tokens may continue the output of a row. llguidance computes it, on the host."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tiercel.system.file_fault import file_fault
from tiercel.values.errors import ConfigError
from tiercel.values.grammar import GRAMMAR_LIMITS, GrammarLimits
from tiercel.values.grammar_words import in_own_words

_SILENT = 0  # llguidance would print warnings
_FREE_S = 0.1  # that every row may take
_TOKEN_S = 0.001  # for each token; a usual mask takes 30 us
TOO_SLOW = "it takes too much time per token; a grammar that reads a text in many ways is slow"


class GrammarRow:
    """The progress of one row in its grammar.

    A grammar that exceeds a limit, or a token that it excludes, sets `error`; every method does nothing from then on.

    The limits of llguidance do not cover the work on ambiguous grammars, which grows with the cube of the output
    (`e: e e | "a"`). All rows wait for it, so a row fails when it has taken more time than a usual grammar needs. The
    time is first that of the wall clock, because reading the CPU time of a thread takes microseconds. A row that has
    used it up may only have been unlucky on a busy machine: it is given the same time once more, of the processor.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        num_words: int = 0,
        error: str = "",
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`matcher`: used by this row only; None if there is none, which is an error. `num_words`: of a mask.

        `wall_s`, `cpu_s`: seconds so far, of the world and of the processor.
        """
        self._matcher = matcher
        self.num_words = num_words
        self._now_s = wall_s
        self._cpu_s = cpu_s
        self._left_s = _FREE_S
        self.error = error or ("" if matcher is not None else "it is not compiled")

    @property
    def is_quick(self) -> bool:
        """Whether its mask may be computed together with others: its processor time is not measured."""
        return not self.error and self._now_s is not self._cpu_s

    @property
    def matcher(self) -> LLMatcher:
        """The state of the grammar, of a row without an error."""
        assert self._matcher is not None
        return self._matcher

    def advance(self, token: int) -> None:
        """Take in the token that was drawn. A complete output takes any token, since only end tokens can be drawn."""
        if self._matcher is None or self.error or self._matcher.is_stopped():
            return
        start_s = self._now_s()
        if not self._matcher.consume_token(token):
            self.error = _error_of(self._matcher)
        self._charge(self._now_s() - start_s - _TOKEN_S)

    def replay(self, outputs: Iterable[int]) -> None:
        """Take in the tokens of an output that is resumed. Cost: about 2 us per token."""
        for token in outputs:
            self.advance(token)

    def fill(self, words: NDArray[np.int32]) -> None:
        """Compute which tokens may be drawn next: one bit per token id. In case of an error all may.

        Shapes: words [num_words], contiguous; token t is bit t % 32 of word t // 32.
        """
        if self._matcher is None or self.error:
            words[:] = -1
            return
        start_s = self._now_s()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.note_mask(self._now_s() - start_s, words)

    def note_mask(self, took_s: float, words: NDArray[np.int32]) -> None:
        """Take note of a mask that was computed, and of its time. In case of an error all tokens may be drawn."""
        if self.matcher.is_error():
            self.error = _error_of(self.matcher)
        self._charge(took_s)
        if self.error:
            words[:] = -1

    def _charge(self, took_s: float) -> None:
        self._left_s -= took_s
        if self._left_s >= 0 or self.error:
            return
        if self._now_s is self._cpu_s:
            self.error = TOO_SLOW
        else:
            self._now_s, self._left_s = self._cpu_s, _FREE_S


class Grammar:
    """A compiled grammar. Rows start as copies of it."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def open_row(self, outputs: Iterable[int] = ()) -> GrammarRow:
        """Start a row whose output begins with these tokens. Cost: about 10 us, and 2 us per token."""
        row = GrammarRow(self._matcher.deep_copy(), self._num_words)
        row.replay(outputs)
        return row


class GrammarCompiler:
    """Compiles grammars for the tokens of one model. Any thread may call it."""

    def __init__(self, tokenizer: LLTokenizer, limits: GrammarLimits = GRAMMAR_LIMITS) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def compile(self, text: str) -> Grammar | str:
        """Compile the text of a grammar (`SamplingParams.grammar`). Return an error message if that is impossible.

        Cost: 0.5 ms for a small JSON schema, 100 ms at the limits, with the GIL released.
        """
        limits = self._limits
        matcher = LLMatcher(
            self._tokenizer,
            text,
            log_level=_SILENT,
            limits=LLParserLimits(
                max_items_in_row=limits.max_items_in_row,
                initial_lexer_fuel=limits.initial_lexer_fuel,
                step_lexer_fuel=limits.step_lexer_fuel,
                step_max_items=limits.step_max_items,
                max_lexer_states=limits.max_lexer_states,
                max_grammar_size=limits.max_grammar_size,
                verbose_errors=False,  # the parser's state would show the output
            ),
        )
        if matcher.is_error():
            return _error_of(matcher)
        return Grammar(matcher, -(-self._tokenizer.vocab_size // 32))


def open_compiler(folder: Path, vocab_size: int, end_tokens: tuple[int, ...]) -> GrammarCompiler:
    """Open a compiler on the tokenizer.json of a model folder. Cost: 0.2 to 1 s.

    `vocab_size`: width of the logits. `end_tokens`: allowed where the grammar may end.
    Errors: ConfigError if grammars cannot be applied to this model.
    """
    path = folder / "tokenizer.json"
    if (fault := file_fault(path)) is not None:
        raise ConfigError("grammar.no_tokenizer", f"{path}: {fault}")
    if not end_tokens:
        raise ConfigError("grammar.no_end_token", f"{folder}: the model names no eos_token_id, so no output could end")
    try:
        least = LLTokenizer(str(path)).vocab_size
        tokenizer = LLTokenizer(str(path), n_vocab=max(vocab_size, least), eos_token=list(end_tokens))
    except ValueError as error:
        raise ConfigError("grammar.bad_tokenizer", f"{path}: its tokens cannot be used for grammars") from error
    return GrammarCompiler(tokenizer)


def _error_of(matcher: LLMatcher) -> str:
    return in_own_words(matcher.get_error())
