"""Calls to the SSD tier, made by threads that the loop never waits for.

Two kinds of threads serve two queues: one kind takes loads first, the other stores first, and each takes from the
other queue when its own is empty, so that neither starves.

A read has a deadline. When it passes the result is abandoned, never the buffer: a call that is under way keeps it until
it returns, and says so then.
"""

import enum
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiercel.clock import Clock
from tiercel.errors import InvariantError

_STUCK_DEADLINES = 4  # a call is stuck after so many deadlines
_MAX_STUCK = 3
_MAX_ERRORS = 3  # EIO, within the window
_ERROR_WINDOW_S = 60.0
_SYNC_S = 5.0  # after a write, at most, what was written is made durable
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

Digest = bytes  # a record below has a field of this name

log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """Blocks by slot; every method blocks, may be called from any thread and may raise OSError."""

    def write(self, slot: int, key: bytes, payload: memoryview) -> bytes:
        """The xxh3-128 digest of what was written."""
        ...

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        """False when the slot does not hold this block."""
        ...

    def sync(self) -> None: ...


class DiskVerdict(enum.Enum):
    """How a call ended, or that it is late."""

    OK = "ok"
    MISS = "miss"  # a read that found another block, or none, or spoilt bytes
    FAILED = "failed"  # the disk's error, or the tier is off or read-only
    LATE = "late"  # a read past its deadline: there will be no bytes, and RETURNED follows
    RETURNED = "returned"  # the buffer of a late read is free again


@dataclass(frozen=True, slots=True)
class DiskResult:
    """News of one call. Every ticket gets one result, a late read two."""

    ticket: int
    verdict: DiskVerdict
    seconds: float  # since it was asked for
    bytes: int
    digest: Digest = b""  # xxh3-128, of a write that went well


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Sums since the start. Reads and writes are those that went well; seconds are in the call.

    A late read counts apart from the others, with its time in the call: when it comes back, or when the call has lasted
    for a deadline. One that no thread took in time says nothing of the disk and counts in `late` alone.
    """

    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_seconds: float = 0.0
    misses: int = 0
    late: int = 0
    failed: int = 0
    late_bytes: int = 0
    late_seconds: float = 0.0


class _Kind(enum.Enum):
    READ = enum.auto()
    WRITE = enum.auto()
    SYNC = enum.auto()


class _State(enum.Enum):
    QUEUED = enum.auto()
    CALLING = enum.auto()
    DONE = enum.auto()


class _Call:
    """One thing to do; written under the lock only."""

    __slots__ = ("asked_s", "began_s", "buffer", "is_counted", "is_late", "key", "kind", "slot", "state", "ticket")

    def __init__(
        self, kind: _Kind, ticket: int | None, slot: int, key: bytes, buffer: memoryview | None, now_s: float
    ) -> None:
        self.kind = kind
        self.ticket = ticket  # None: nobody is told of the result
        self.slot = slot
        self.key = key
        self.buffer = buffer
        self.asked_s = now_s
        self.began_s = now_s
        self.state = _State.QUEUED
        self.is_late = False
        self.is_counted = False  # a late read whose time is among the sums

    @property
    def size_bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes


class _Sum:
    """Calls that went well."""

    __slots__ = ("bytes", "calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.seconds = 0.0

    def add(self, call: _Call, now_s: float) -> None:
        """One more."""
        self.calls += 1
        self.bytes += call.size_bytes
        self.seconds += now_s - call.began_s


class DiskLanes:
    """I/O threads over one volume. One thread asks and polls; nothing here waits for the disk but `close`."""

    def __init__(
        self,
        volume: BlockStore,
        clock: Clock,
        wake: Callable[[], None],
        *,
        load_threads: int = 2,
        store_threads: int = 2,
        deadline_s: float = 0.25,
    ) -> None:
        """`wake` is called, from any thread, when a result comes and none was waiting: `poll` takes all there are."""
        self.deadline_s = deadline_s
        self._volume = volume
        self._clock = clock
        self._wake = wake
        self._load_threads = load_threads
        self._store_threads = store_threads
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)  # a call; `close` waits for it
        self._loads: deque[_Call] = deque()
        self._stores: deque[_Call] = deque()
        self._deadlines: deque[_Call] = deque()  # reads, oldest first; those that are done leave from the front
        self._calling: dict[_Call, bool] = {}  # by a load-first thread?
        self._results: list[DiskResult] = []
        self._errors_s: deque[float] = deque(maxlen=_MAX_ERRORS)
        self._done = {_Kind.READ: _Sum(), _Kind.WRITE: _Sum()}
        self._misses = self._late = self._failed = 0
        self._late_bytes, self._late_s = 0, 0.0
        self._bytes_in_flight = 0
        self._off_reason = ""
        self._is_read_only = False
        self._unsynced_s: float | None = None  # since when there have been writes that no sync covers
        self._is_refusing = False  # `close` has begun
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    # Asking: one thread, never waits

    def start(self) -> None:
        """Start the threads."""
        kinds = [("kv-load", (self._loads, self._stores))] * self._load_threads
        kinds += [("kv-store", (self._stores, self._loads))] * self._store_threads
        for name, queues in kinds:
            # A daemon: a call that never returns must not keep the process from ending.
            thread = threading.Thread(target=self._work, args=queues, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def read(self, ticket: int, slot: int, key: bytes, into: memoryview) -> None:
        """Fill `into` with a block; it belongs to this call until the last result of the ticket."""
        self._ask(_Call(_Kind.READ, ticket, slot, key, into, self._clock.now_s()), self._loads)

    def write(self, ticket: int, slot: int, key: bytes, payload: memoryview) -> None:
        """Put a block into a slot; the bytes must not change until the result."""
        self._ask(_Call(_Kind.WRITE, ticket, slot, key, payload, self._clock.now_s()), self._stores)

    def poll(self) -> list[DiskResult]:
        """What happened since the last call. Cost: a microsecond when nothing did."""
        now_s = self._clock.now_s()
        with self._lock:
            self._pass_deadlines(now_s)
            if not self._off_reason:
                self._look_for_stuck(now_s)
                if self._unsynced_s is not None and now_s - self._unsynced_s >= _SYNC_S:
                    self._sync()
            results, self._results = self._results, []
        return results

    def next_deadline_s(self) -> float | None:
        """When the oldest read will be late: a loop that sleeps for `wake` must poll by then, nobody else tells it."""
        with self._lock:
            self._forget_done()
            return self._deadlines[0].asked_s + self.deadline_s if self._deadlines else None

    def close(self, patience_s: float) -> bool:
        """Refuse what is queued to be read, let writes and calls under way end for so long, sync, stop the threads.

        False when a call is still under way: its buffer and the volume must stay open until the process ends.
        """
        ends_s = self._clock.now_s() + patience_s
        with self._lock:
            self._is_refusing = True
            self._drop(self._loads)
            is_quiet = self._ended.wait_for(self._is_quiet, timeout=patience_s) if self._threads else True
            if is_quiet and self._threads and self._unsynced_s is not None and not self._off_reason:
                self._sync()
                left_s = max(0.0, ends_s - self._clock.now_s())
                is_quiet = self._ended.wait_for(self._is_quiet, timeout=left_s)
            self._is_closing = True
            self._wanted.notify_all()
            self._drop(self._stores)
        if is_quiet:
            for thread in self._threads:
                thread.join()
        return is_quiet

    def _is_quiet(self) -> bool:
        return not (self._stores or self._calling)

    # Facts

    @property
    def is_off(self) -> bool:
        """Nothing is read or written any more."""
        return bool(self._off_reason)

    @property
    def off_reason(self) -> str:
        """Why the tier is off; empty while it is not."""
        return self._off_reason

    @property
    def is_read_only(self) -> bool:
        """The disk is full: nothing is written any more."""
        return self._is_read_only

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of buffers that belong to calls, queued or under way."""
        return self._bytes_in_flight

    @property
    def counts(self) -> DiskCounts:
        """Sums since the start."""
        with self._lock:
            reads, writes = self._done[_Kind.READ], self._done[_Kind.WRITE]
            return DiskCounts(
                *(reads.calls, reads.bytes, reads.seconds),
                *(writes.calls, writes.bytes, writes.seconds),
                *(self._misses, self._late, self._failed),
                *(self._late_bytes, self._late_s),
            )

    # Under the lock

    def _ask(self, call: _Call, queue: deque[_Call]) -> None:
        with self._lock:
            self._bytes_in_flight += call.size_bytes
            if not self._takes(call):
                self._finish(call, DiskVerdict.FAILED, call.asked_s)
            else:
                queue.append(call)
                if call.kind is _Kind.READ:
                    self._deadlines.append(call)
                self._wanted.notify()
                return
        self._wake()

    def _takes(self, call: _Call) -> bool:
        return not (self._is_refusing or self._off_reason or (call.kind is _Kind.WRITE and self._is_read_only))

    def _finish(self, call: _Call, verdict: DiskVerdict, now_s: float, digest: bytes = b"") -> None:
        """The last result of a ticket."""
        began, call.state = call.state is _State.CALLING, _State.DONE
        self._calling.pop(call, None)
        self._bytes_in_flight -= call.size_bytes
        if call.ticket is not None:
            self._results.append(DiskResult(call.ticket, verdict, now_s - call.asked_s, call.size_bytes, digest))
        if verdict is DiskVerdict.RETURNED and began:
            self._count_late(call, now_s)
        match verdict:
            case DiskVerdict.OK if call.kind in self._done:
                self._done[call.kind].add(call, now_s)
                if call.kind is _Kind.WRITE and self._unsynced_s is None:
                    self._unsynced_s = now_s
            case DiskVerdict.MISS:
                self._misses += 1
            case DiskVerdict.FAILED:
                self._failed += 1
            case _:
                pass
        call.buffer = None

    def _count_late(self, call: _Call, now_s: float) -> None:
        """A late read has taken at least so long."""
        if not call.is_counted:
            call.is_counted = True
            self._late_bytes += call.size_bytes
            self._late_s += now_s - call.began_s

    def _drop(self, queue: deque[_Call]) -> None:
        """Fail everything in a queue; reads that are late have left it before."""
        while queue:
            self._finish(queue.popleft(), DiskVerdict.FAILED, self._clock.now_s())

    def _forget_done(self) -> None:
        while self._deadlines and self._deadlines[0].state is _State.DONE:
            self._deadlines.popleft()

    def _pass_deadlines(self, now_s: float) -> None:
        self._forget_done()
        while self._deadlines and now_s - self._deadlines[0].asked_s >= self.deadline_s:
            call = self._deadlines.popleft()
            if call.state is not _State.DONE:
                call.is_late = True
                self._late += 1
                if call.ticket is not None:
                    result = DiskResult(call.ticket, DiskVerdict.LATE, now_s - call.asked_s, call.size_bytes)
                    self._results.append(result)
                if call.state is _State.QUEUED:
                    self._loads.remove(call)  # one of the first: queues and deadlines have one order
                    self._finish(call, DiskVerdict.RETURNED, now_s)

        for call in self._calling:
            if call.is_late and now_s - call.began_s >= self.deadline_s:
                self._count_late(call, now_s)

    def _look_for_stuck(self, now_s: float) -> None:
        limit_s = _STUCK_DEADLINES * self.deadline_s
        stuck = [by_load_thread for call, by_load_thread in self._calling.items() if now_s - call.began_s > limit_s]
        if len(stuck) >= _MAX_STUCK or sum(stuck) == self._load_threads > 0:
            self._switch_off(f"{len(stuck)} calls hang for more than {limit_s:g} s")

    def _sync(self) -> None:
        """Make durable what has been written. When that fails the tier is off."""
        self._unsynced_s = None
        self._stores.append(_Call(_Kind.SYNC, None, 0, b"", None, self._clock.now_s()))
        self._wanted.notify()

    def _switch_off(self, reason: str) -> None:
        if not self._off_reason:
            self._off_reason = reason
            log.error("kv disk tier off reason=%r", reason)
            self._drop(self._loads)
            self._drop(self._stores)

    def _note_error(self, call: _Call, error: OSError, now_s: float) -> None:
        code = errno.errorcode.get(error.errno or 0, "error")
        log.warning("kv disk error call=%s slot=%d error=%s", call.kind.name.lower(), call.slot, code)
        if call.kind is _Kind.SYNC:
            self._switch_off(f"fdatasync failed with {code}: what was written cannot be trusted to be there")
        elif call.kind is _Kind.WRITE and error.errno in _FULL:
            if not self._is_read_only:
                self._is_read_only = True
                log.warning("kv disk tier is read-only from now on error=%s", code)
                kept = [queued for queued in self._stores if queued.kind is not _Kind.WRITE]
                for queued in self._stores:
                    if queued.kind is _Kind.WRITE:
                        self._finish(queued, DiskVerdict.FAILED, now_s)
                self._stores.clear()
                self._stores.extend(kept)
        elif error.errno == errno.EIO:
            self._errors_s.append(now_s)
            if len(self._errors_s) == _MAX_ERRORS and now_s - self._errors_s[0] <= _ERROR_WINDOW_S:
                self._switch_off(f"{_MAX_ERRORS} I/O errors within {_ERROR_WINDOW_S:g} s")

    # The threads

    def _work(self, *queues: deque[_Call]) -> None:
        with self._lock:
            call = self._take(queues)
        while call is not None:
            verdict, digest, error = DiskVerdict.FAILED, b"", None
            try:
                verdict, digest = self._carry_out(call)
            except OSError as exc:
                error = exc
            except Exception:
                log.exception("kv disk call failed call=%s slot=%d", call.kind.name.lower(), call.slot)
            now_s = self._clock.now_s()
            with self._lock:
                is_news = not self._results
                if error is not None:
                    self._note_error(call, error, now_s)
                self._finish(call, DiskVerdict.RETURNED if call.is_late else verdict, now_s, digest)
                if self._is_refusing:
                    self._ended.notify_all()
                call = self._next(queues)
            if is_news:
                self._wake()
            if call is None:
                with self._lock:
                    call = self._take(queues)

    def _take(self, queues: tuple[deque[_Call], ...]) -> _Call | None:
        """Wait for the next call; None when there will be no more."""
        while (call := self._next(queues)) is None and not self._is_closing:
            self._wanted.wait()
        return call

    def _next(self, queues: tuple[deque[_Call], ...]) -> _Call | None:
        """The next call of the first queue that has one."""
        for queue in queues:
            if queue:
                call = queue.popleft()
                call.state = _State.CALLING
                call.began_s = self._clock.now_s()
                self._calling[call] = queues[0] is self._loads
                return call
        return None

    def _carry_out(self, call: _Call) -> tuple[DiskVerdict, bytes]:
        """Errors: OSError, and whatever a volume that is wrong raises."""
        volume, buffer = self._volume, call.buffer
        match call.kind:
            case _Kind.READ if buffer is not None:
                return (DiskVerdict.OK if volume.read(call.slot, call.key, buffer) else DiskVerdict.MISS), b""
            case _Kind.WRITE if buffer is not None:
                return DiskVerdict.OK, volume.write(call.slot, call.key, buffer)
            case _Kind.SYNC:
                volume.sync()
                return DiskVerdict.OK, b""
            case _:
                raise InvariantError("disk.no_buffer", ticket=call.ticket)
