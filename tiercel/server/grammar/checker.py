"""The check of grammars before any token is made: in worker processes, with the verdicts kept by tenant and content."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from tiercel.server.grammar.constraint import Constraint
from tiercel.server.grammar.frames import (
    GrammarAccepted,
    GrammarJob,
    GrammarRefused,
    GrammarSource,
    GrammarVerdict,
    encode_frame,
    verdict_decoder,
)
from tiercel.server.workers.pool import Loss, WorkerPool
from tiercel.system.shared_cache import SharedCache
from tiercel.values.errors import AdmissionError, WireError
from tiercel.values.ids import TenantId
from tiercel.values.tenant import DEFAULT_TENANT

LIMIT_S = 2.0
"""Maximum time of one check."""
CACHE_BYTES = 16 * 1024 * 1024
"""Maximum size of the verdicts that are kept, of all tenants."""

_NUM_WORKERS = 2
_ENTRY_BYTES = 512  # of a verdict besides its text: key, objects, place in the order
_MODULE = "tiercel.server.grammar.worker"


class CheckedGrammar(NamedTuple):
    """A grammar that the engine can apply, and the places in the request of what it does not enforce."""

    text: str
    ignored: tuple[str, ...]


class _Check(NamedTuple):
    """A check in progress or in a tenant's queue. `key`: SHA-256 of the scope of the request and of its grammar."""

    tenant: TenantId
    key: bytes


class GrammarChecker:
    """Checks the grammars of requests. The first check starts a process. Used on the event loop."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        limit_s: float = LIMIT_S,
        cache_bytes: int = CACHE_BYTES,
        weight_of: Callable[[TenantId], float] = lambda tenant: 1.0,
        module: str = _MODULE,
    ) -> None:
        """`tokenizer`: the tokenizer.json of the model. `weight_of`: of tenants, which share the cache by it.

        `module`: the program of the processes.

        Nothing is started.
        """
        self._tokenizer = tokenizer
        self._module = module
        self._limit_s = limit_s
        self._verdicts = SharedCache[bytes, GrammarVerdict](cache_bytes, weight_of)
        self._num_checks = 0
        self._running: dict[_Check, asyncio.Task[GrammarVerdict]] = {}
        self._waiting: Counter[_Check] = Counter()  # requests
        self._turns: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()
        self._threads: ThreadPoolExecutor | None = None
        self._pool: WorkerPool | None = None
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [] if self._pool is None else self._pool.pids

    @property
    def cached_bytes(self) -> int:
        """Size of the verdicts that are kept."""
        return self._verdicts.held_bytes

    @property
    def num_checks(self) -> int:
        """The number of checks that were given to a process."""
        return self._num_checks

    async def checked_grammar(
        self, constraint: Constraint, vocab_size: int, tenant: TenantId = DEFAULT_TENANT, scope: bytes = b""
    ) -> CheckedGrammar:
        """Return the llguidance grammar of a constraint (`SamplingParams.grammar`), once it has been checked.

        A verdict is known to requests of the same tenant and scope only: to all others a grammar is new, however often
        it was checked, so that the time of a request tells nothing about others. Equal constraints that arrive
        together are checked once. One check of each tenant is in progress at a time, so that the slow grammars of one
        do not hold up the others.
        Errors: AdmissionError: 400 if the engine could not apply it or the check takes too long, 503 at the end.
        """
        text = f"{constraint.format} {constraint.text}".encode("utf-8", "surrogatepass")
        check = _Check(tenant, hashlib.sha256(hashlib.sha256(scope).digest() + text).digest())
        verdict = self._verdicts.get(*check)
        if verdict is None:
            task = self._running.get(check)
            if task is None:
                job = GrammarJob(constraint.format, constraint.text)
                task = asyncio.create_task(self._check_in_turn(check, job, vocab_size))
                self._running[check] = task
                task.add_done_callback(lambda done: self._forget(check, done))
            self._waiting[check] += 1
            try:
                verdict = await asyncio.shield(task)  # others may wait for it when this request is cancelled
            finally:
                self._waiting[check] -= 1
                if not self._waiting[check]:
                    del self._waiting[check]
                    self._forget(check, task)
                    task.cancel()  # no effect once it is done; a check that no process has begun is left out
        if isinstance(verdict, GrammarAccepted):
            return CheckedGrammar(verdict.text, constraint.notes.names(verdict.approximated))
        raise _refusal(constraint, verdict)

    def _forget(self, check: "_Check", task: asyncio.Task[GrammarVerdict]) -> None:
        if self._running.get(check) is task:
            del self._running[check]

    async def _check_in_turn(self, check: "_Check", job: GrammarJob, vocab_size: int) -> GrammarVerdict:
        turn = self._turns.setdefault(check.tenant, asyncio.Lock())
        async with turn:
            return await self._check(check, job, vocab_size)

    async def _check(self, check: "_Check", job: GrammarJob, vocab_size: int) -> GrammarVerdict:
        try:
            frame = encode_frame(job)
        except WireError:
            return GrammarRefused("it is no Unicode text")
        self._num_checks += 1
        answer = await self._in_thread(self._opened(vocab_size), frame)
        match answer:
            case Loss.LATE:
                return GrammarRefused(f"it could not be compiled within {self._limit_s:g} s")
            case Loss.DIED:
                return GrammarRefused("it could not be compiled: the process that tried it ended")
            case _:
                verdict = verdict_decoder.decode(answer)
        self._verdicts.put(*check, verdict, _size_bytes(verdict))
        return verdict

    async def _in_thread(self, pool: WorkerPool, frame: bytes) -> bytearray | Loss:
        if self._threads is None:  # threads of its own: a slow check holds up no tokenising
            self._threads = ThreadPoolExecutor(_NUM_WORKERS, "grammar")
        ask: Callable[[], bytearray | Loss] = lambda: pool.ask(frame)  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)

    def _opened(self, vocab_size: int) -> WorkerPool:
        if self._is_closed:
            raise AdmissionError(503, "The server is shutting down.", code="shutting_down", kind="server_error")
        if self._pool is None:
            opening = encode_frame(GrammarSource(str(self._tokenizer), vocab_size))
            self._pool = WorkerPool(self._module, opening, limit_s=self._limit_s, num_workers=_NUM_WORKERS)
        return self._pool

    def close(self) -> None:
        """Kill the processes. Checks in progress fail."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _size_bytes(verdict: GrammarVerdict) -> int:
    text = verdict.text if isinstance(verdict, GrammarAccepted) else verdict.message
    return _ENTRY_BYTES + 4 * len(text)  # a letter of a Python text has up to four bytes


def _refusal(constraint: Constraint, refused: GrammarRefused) -> AdmissionError:
    places = constraint.notes.places_of(refused.keywords)
    field = constraint.field
    return AdmissionError(
        400,
        f"{', '.join(places) or field}: the grammar cannot be used: {refused.message}",
        param=field.partition(".")[0],
    )
