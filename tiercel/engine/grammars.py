"""Compiles the grammars of requests on a thread, and caches them by tenant and content."""

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tiercel.engine.grammar_queue import CompileEnd, GrammarKey
from tiercel.engine.sampling import Grammar, GrammarCompiler, open_compiler
from tiercel.system.shared_cache import SharedCache
from tiercel.values.clock import Clock
from tiercel.values.errors import ConfigError
from tiercel.values.grammar_words import COMPILER_FAILED
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import GrammarGauges
from tiercel.values.request import Request
from tiercel.values.units import MIB
from tiercel.wire.step_record import StepRecord

log = logging.getLogger(__name__)

CACHE_BYTES = 64 * MIB  # of grammars that no unfinished sequence uses, of all tenants
_GRAMMAR_BYTES = 100_000  # of a small compiled grammar, measured
_LEAST_S = 0.0005  # of a small compilation; the clock may show less
_BYTES_PER_CHARACTER = 16  # of its text, measured with an enum of 20,000 strings


class _Compiled(NamedTuple):
    """The result of a compilation: a grammar or an error."""

    key: GrammarKey
    result: Grammar | str


class CompileOrder:
    """The order in which grammars of several tenants are compiled.

    The tenant goes first whose compilations have taken least time for its weight; a tenant that had none waiting starts
    level with those that have. So a tenant with many slow grammars delays its own, and another's by one at most. Any
    thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[TenantId, OrderedDict[GrammarKey, SeqId]] = {}
        self._spent_s: dict[TenantId, float] = {}  # for a weight of 1; of tenants with grammars that wait or ran last
        self._floor_s = 0.0  # the time of the tenant that was served last, before it was served
        self._weights: Mapping[TenantId, float] = {}

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Replace the weights of all tenants; those that are not named have the weight 1."""
        self._weights = dict(weights)

    def weight_of(self, tenant: TenantId) -> float:
        """Return the weight of a tenant."""
        return self._weights.get(tenant, 1.0)

    def add(self, key: GrammarKey, seq: SeqId) -> None:
        """Add a grammar, and the sequence that asked for it first."""
        with self._lock:
            if key.tenant not in self._waiting:
                self._waiting[key.tenant] = OrderedDict()
                self._spent_s[key.tenant] = max(self._spent_s.get(key.tenant, 0.0), self._floor_s)
            self._waiting[key.tenant][key] = seq

    def remove(self, key: GrammarKey) -> bool:
        """Leave out a grammar. Return False if its compilation has begun."""
        with self._lock:
            waiting = self._waiting.get(key.tenant, OrderedDict())
            is_there = waiting.pop(key, None) is not None
            if is_there and not waiting:
                del self._waiting[key.tenant]
            return is_there

    def take(self) -> tuple[GrammarKey, SeqId] | None:
        """Return the grammar to compile next; None if none waits."""
        with self._lock:
            if not self._waiting:
                return None
            tenant = min(self._waiting, key=lambda one: self._spent_s[one])
            self._floor_s = self._spent_s[tenant]
            for gone in self._spent_s.keys() - self._waiting.keys():
                if self._spent_s[gone] <= self._floor_s:
                    del self._spent_s[gone]  # it would start at the floor
            waiting = self._waiting[tenant]
            key, seq = waiting.popitem(last=False)
            if not waiting:
                del self._waiting[tenant]
            return key, seq

    def charge(self, tenant: TenantId, took_s: float) -> None:
        """Count the time of a compilation for the tenant that asked for it."""
        with self._lock:
            spent_s = max(took_s, _LEAST_S) / self.weight_of(tenant)
            self._spent_s[tenant] = self._spent_s.get(tenant, self._floor_s) + spent_s


class GrammarCache:
    """The grammars of one model.

    One thread compiles, because a compilation has to delay neither the loop nor a step. A grammar stays while an
    unfinished sequence uses it; others are kept up to `cache_bytes`, which tenants share by weight. Each tenant has its
    own grammars: one that only another tenant has used is compiled again, so that the time of a request tells nothing
    about others. Their size is estimated from their text, because llguidance does not tell.
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
        self._masks = masks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiler = self._thread.submit(opens)
        self._order = CompileOrder()
        self._compiling: set[GrammarKey] = set()
        self._ended: deque[_Compiled] = deque()  # filled by the thread
        self._jobs: deque[Future[None]] = deque()
        self._in_use: dict[GrammarKey, Grammar] = {}
        self._unused = SharedCache[GrammarKey, Grammar](cache_bytes, self._order.weight_of)
        self._key_by_seq: dict[SeqId, GrammarKey] = {}
        self._users: Counter[GrammarKey] = Counter()
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

    def want(self, request: Request) -> bool:
        """Keep the grammar of a request. Return False if it is being compiled; `poll` tells when that has ended."""
        key = GrammarKey.of(request)
        self._key_by_seq[request.id] = key
        self._users[key] += 1
        unused = self._unused.pop(key.tenant, key)
        if unused is not None:
            self._in_use[key] = unused
        if key in self._in_use:
            self._hits += 1
            return True
        if key not in self._compiling:
            self._compiling.add(key)
            self._order.add(key, request.id)
            self._jobs.append(self._thread.submit(self._compile_next))
        return False

    def drop(self, seq: SeqId) -> None:
        """Note that a sequence has ended. Sequences without a grammar are ignored."""
        key = self._key_by_seq.pop(seq, None)
        if key is None:
            return
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            if key in self._compiling and self._order.remove(key):  # it had not begun
                self._compiling.remove(key)
            grammar = self._in_use.pop(key, None)
            if grammar is not None:
                self._unused.put(key.tenant, key, grammar, _size_of(key.text))

    def poll(self) -> list[CompileEnd]:
        """Return the compilations that have ended since the last call."""
        if not self._compiling:
            return []
        while self._jobs and self._jobs[0].done():
            failure = self._jobs.popleft().exception()
            if failure is not None:  # a fault of llguidance
                log.warning("the grammar compiler failed: %s", failure)
        ended: list[CompileEnd] = []
        while self._ended:
            key, result = self._ended.popleft()
            self._compiling.discard(key)
            if isinstance(result, str):
                self._failed += 1
            else:
                self._compiled += 1
                self._keep(key, result)
            ended.append(CompileEnd(key, result if isinstance(result, str) else ""))
        return ended

    def get(self, request: Request) -> Grammar | None:
        """Return the compiled grammar of a request. That of an unfinished one that was taken in is always there."""
        return self._in_use.get(GrammarKey.of(request))

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Share compilations and memory by these weights of tenants; others have the weight 1."""
        self._order.set_weights(weights)

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

    def _compile_next(self) -> None:
        """Compile the next grammar, on the thread. There are as many calls as grammars that have waited."""
        taken = self._order.take()
        if taken is None:
            return
        key, seq = taken
        result: Grammar | str = COMPILER_FAILED
        start_s = self._clock.now_s()
        try:
            compiler = self._compiler.result()
            self._record.compile(seq)
            start_s = self._clock.now_s()
            result = compiler.compile(key.text)
        except ConfigError as error:
            result = error.message
        finally:
            took_s = self._clock.now_s() - start_s
            self._compile_s += took_s
            self._order.charge(key.tenant, took_s)
            self._record.compile(SeqId(0))
            self._ended.append(_Compiled(key, result))
            self._wake()

    def _keep(self, key: GrammarKey, grammar: Grammar) -> None:
        if key in self._users:
            self._in_use[key] = grammar
        else:  # every sequence that wanted it has ended
            self._unused.put(key.tenant, key, grammar, _size_of(key.text))


def _size_of(text: str) -> int:
    """Return the estimated bytes of a compiled grammar and its text."""
    return _GRAMMAR_BYTES + _BYTES_PER_CHARACTER * len(text)
