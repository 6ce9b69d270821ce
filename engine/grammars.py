"""Compiles the grammars of requests on a thread, and caches them by content."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tiercel.clock import Clock
from tiercel.engine.grammar_queue import CompileEnd
from tiercel.engine.sampling import Grammar, GrammarCompiler, open_compiler
from tiercel.errors import ConfigError
from tiercel.grammar_words import COMPILER_FAILED
from tiercel.ids import SeqId
from tiercel.outcome import GrammarGauges
from tiercel.step_record import StepRecord
from tiercel.units import MIB

log = logging.getLogger(__name__)

CACHE_BYTES = 64 * MIB  # of grammars that no unfinished sequence uses
_GRAMMAR_BYTES = 100_000  # of a small compiled grammar, measured
_BYTES_PER_CHARACTER = 16  # of its text, measured with an enum of 20,000 strings


class GrammarCache:
    """The grammars of one model.

    One thread compiles, because a compilation has to delay neither the loop nor a step. A grammar stays while an
    unfinished sequence uses it; others are kept up to `cache_bytes`, and the least recently used is dropped first.
    Their size is estimated from their text, because llguidance does not tell.
    """

    def __init__(
        self,
        opens: Callable[[], GrammarCompiler],
        clock: Clock,
        wake: Callable[[], None] = lambda: None,
        record: StepRecord | None = None,
        cache_bytes: int = CACHE_BYTES,
        masks: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
    ) -> None:
        """`opens`: opens the compiler, on the thread (ConfigError: there are no grammars). `wake`: called on the thread
        when a compilation has ended. `record`: for whoever asks what a dead engine was working on. `masks`: how many
        masks were computed, and the time spent on them."""
        self._clock = clock
        self._wake = wake
        self._record = record or StepRecord.open(1)
        self._cache_bytes = cache_bytes
        self._masks = masks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiler = self._thread.submit(opens)
        self._compiling: dict[str, Future[Grammar | str]] = {}
        self._grammars: dict[str, Grammar] = {}  # least recently used first
        self._text_by_seq: dict[SeqId, str] = {}
        self._users: Counter[str] = Counter()
        self._unused_bytes = 0
        self._hits = 0
        self._compiled = 0
        self._failed = 0
        self._compile_s = 0.0

    @staticmethod
    def start(
        folder: Path,
        vocab_size: int,
        end_tokens: tuple[int, ...],
        clock: Clock,
        wake: Callable[[], None],
        record: StepRecord | None,
        masks: Callable[[], tuple[int, float]],
    ) -> "GrammarCache":
        """Start to read the tokenizer of a model folder. See `open_compiler`."""
        return GrammarCache(lambda: open_compiler(folder, vocab_size, end_tokens), clock, wake, record, masks=masks)

    def wait(self) -> bool:
        """Wait until the tokenizer is read. Return whether requests may have grammars."""
        error = self._compiler.exception()
        if error is None:
            return True
        log.warning("requests cannot have grammars: %s", error)
        return False

    def want(self, seq: SeqId, text: str) -> bool:
        """Keep a grammar for a sequence. Return False if it is being compiled; `poll` tells when that has ended."""
        self._text_by_seq[seq] = text
        self._users[text] += 1
        if text in self._grammars:
            if self._users[text] == 1:
                self._unused_bytes -= _size_of(text)
            self._hits += 1
            return True
        if text not in self._compiling:
            self._compiling[text] = self._thread.submit(self._compile, seq, text)
        return False

    def drop(self, seq: SeqId) -> None:
        """Note that a sequence has ended. Sequences without a grammar are ignored."""
        text = self._text_by_seq.pop(seq, None)
        if text is None:
            return
        self._users[text] -= 1
        if not self._users[text]:
            del self._users[text]
            if text in self._compiling and self._compiling[text].cancel():  # it had not begun
                del self._compiling[text]
            if text in self._grammars:
                self._grammars[text] = self._grammars.pop(text)
                self._unused_bytes += _size_of(text)
                self._shrink()

    def poll(self) -> list[CompileEnd]:
        """Return the compilations that have ended since the last call."""
        if not self._compiling:
            return []
        ended: list[CompileEnd] = []
        for text, future in [pair for pair in self._compiling.items() if pair[1].done()]:
            del self._compiling[text]
            failure = future.exception()  # a fault of llguidance
            if failure is not None:
                log.warning("the grammar compiler failed: %s", failure)
            result = COMPILER_FAILED if failure is not None else future.result()
            if isinstance(result, Grammar):
                self._compiled += 1
                self._keep(text, result)
            else:
                self._failed += 1
            ended.append(CompileEnd(text, result if isinstance(result, str) else ""))
        return ended

    def get(self, text: str) -> Grammar | None:
        """Return a compiled grammar. That of an unfinished sequence that was taken in is always there."""
        return self._grammars.get(text)

    def gauges(self) -> GrammarGauges:
        """Return what has happened since the start."""
        masks, mask_s = self._masks()
        return GrammarGauges(
            compiled=self._compiled,
            failed=self._failed,
            compile_s=self._compile_s,
            hits=self._hits,
            masks=masks,
            mask_s=mask_s,
        )

    def close(self) -> None:
        """Stop the thread when the compilation in progress has ended."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _compile(self, seq: SeqId, text: str) -> Grammar | str:
        """Compile, on the thread."""
        try:
            compiler = self._compiler.result()
            self._record.compile(seq)
            start_s = self._clock.now_s()
            grammar = compiler.compile(text)
            self._compile_s += self._clock.now_s() - start_s
            return grammar
        except ConfigError as error:
            return str(error)
        finally:
            self._record.compile(SeqId(0))
            self._wake()

    def _keep(self, text: str, grammar: Grammar) -> None:
        self._grammars[text] = grammar
        if text not in self._users:  # every sequence that wanted it has ended
            self._unused_bytes += _size_of(text)
            self._shrink()

    def _shrink(self) -> None:
        """Drop unused grammars until the others fit. Cost: looks at the grammars in use that are older."""
        while self._unused_bytes > self._cache_bytes:
            text = next(text for text in self._grammars if text not in self._users)
            del self._grammars[text]
            self._unused_bytes -= _size_of(text)


def _size_of(text: str) -> int:
    """Return the estimated bytes of a compiled grammar and its text."""
    return _GRAMMAR_BYTES + _BYTES_PER_CHARACTER * len(text)
