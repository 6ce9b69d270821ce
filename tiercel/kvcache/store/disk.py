"""Calls to the SSD tier, made by threads that the engine's loop never waits for.

Two kinds of threads serve two queues: one kind takes loads first, the other stores first, and each takes from the other
queue if its own is empty, so that neither queue starves.

A read has a deadline. When it passes, the result is abandoned but not the buffer: a call that is under way keeps its
buffer until it returns, which is a result of its own.
"""

import enum
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiercel.device.processors import lower_priority
from tiercel.kvcache.store.disk_call import DiskCall, DiskCallKind, DiskCallState, DiskCallTotals
from tiercel.values.clock import Clock
from tiercel.values.errors import InvariantError

_STUCK_DEADLINES = 4  # after this many deadlines a call is stuck
_MAX_STUCK = 3
_MAX_ERRORS = 3  # EIO, within the window
_ERROR_WINDOW_S = 60.0
_SYNC_S = 5.0  # after a write, at most, the write is made durable
_LOOK_S = 2.0  # between two looks whether the files are still there
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

Digest = bytes  # a record below has a field of this name

log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """Blocks by slot; every method blocks, may be called from any thread and may raise OSError."""

    def write(self, slot: int, key: bytes, payload: memoryview) -> bytes:
        """Write a block. Return the xxh3-128 digest of its bytes."""
        ...

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        """Read a block. Return False if the slot does not hold it."""
        ...

    def sync(self) -> None: ...

    def check_files(self) -> None:
        """Check that the blocks will be found again. Cheap: it is called every few seconds, also without work."""
        ...


class DiskVerdict(enum.Enum):
    """The end of a call, or the news that it is late."""

    OK = "ok"
    MISS = "miss"  # a read found another block, no block, or damaged bytes
    FAILED = "failed"  # an error of the disk, or the tier is off or read-only
    LATE = "late"  # a read has passed its deadline: its result is abandoned, and RETURNED follows
    RETURNED = "returned"  # the buffer of a late read is free again


@dataclass(frozen=True, slots=True)
class DiskResult:
    """News of one call. Every ticket gets one result; a late read gets two."""

    ticket: int
    verdict: DiskVerdict
    seconds: float  # since the call was asked for
    bytes: int
    digest: Digest = b""  # xxh3-128, of a successful write


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Sums since the start. Reads and writes are the successful ones; seconds are spent in the call.

    A late read counts apart, with its time in the call, when it returns or when the call has lasted for a deadline. A
    late read that no thread had begun says nothing about the disk, and counts in `late` alone.
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


class DiskLanes:
    """I/O threads over one volume. One thread asks and polls; `close` alone waits for the disk."""

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
        """`wake` is called, from any thread, when the first result since the last `poll` comes."""
        self.deadline_s = deadline_s
        self._volume = volume
        self._clock = clock
        self._wake = wake
        self._load_threads = load_threads
        self._store_threads = store_threads
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)  # notified at the end of a call; `close` waits for it
        self._loads: deque[DiskCall] = deque()
        self._stores: deque[DiskCall] = deque()
        self._deadlines: deque[DiskCall] = deque()  # reads, oldest first; completed ones are removed from the front
        self._calling: dict[DiskCall, bool] = {}  # whether a load-first thread makes the call
        self._results: list[DiskResult] = []
        self._errors_s: deque[float] = deque(maxlen=_MAX_ERRORS)
        self._done = {DiskCallKind.READ: DiskCallTotals(), DiskCallKind.WRITE: DiskCallTotals()}
        self._misses = self._late = self._failed = 0
        self._late_bytes, self._late_s = 0, 0.0
        self._bytes_in_flight = 0
        self._is_off = False
        self._is_read_only = False
        self._unsynced_s: float | None = None  # since then there are writes that no sync covers
        self._looked_s = clock.now_s()
        self._is_looking = False  # a look is queued or under way
        self._is_refusing = False  # `close` has begun
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    # ---- asking: from one thread, without waiting

    def start(self) -> None:
        """Start the threads."""
        kinds = [("kv-load", (self._loads, self._stores))] * self._load_threads
        kinds += [("kv-store", (self._stores, self._loads))] * self._store_threads
        for name, queues in kinds:
            # A daemon: a call that never returns must not keep the process alive.
            thread = threading.Thread(target=self._work, args=queues, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def read(self, ticket: int, slot: int, key: bytes, into: memoryview) -> None:
        """Fill `into` with a block. The buffer belongs to this call until the last result of the ticket."""
        self._ask(DiskCall(DiskCallKind.READ, ticket, slot, key, into, self._clock.now_s()), self._loads)

    def write(self, ticket: int, slot: int, key: bytes, payload: memoryview) -> None:
        """Write a block into a slot. The bytes must not change until the result."""
        self._ask(DiskCall(DiskCallKind.WRITE, ticket, slot, key, payload, self._clock.now_s()), self._stores)

    def poll(self) -> list[DiskResult]:
        """Return the results since the last call. Cost: a microsecond if there are none."""
        now_s = self._clock.now_s()
        with self._lock:
            self._pass_deadlines(now_s)
            if not self._is_off:
                self._look_for_stuck(now_s)
                if self._unsynced_s is not None and now_s - self._unsynced_s >= _SYNC_S:
                    self._sync()
                if now_s - self._looked_s >= _LOOK_S and not (self._is_looking or self._is_refusing):
                    self._look(now_s)
            results, self._results = self._results, []
        return results

    def next_deadline_s(self) -> float | None:
        """Return when the oldest read will be late. A loop that sleeps until `wake` must poll by then."""
        with self._lock:
            self._forget_done()
            return self._deadlines[0].asked_s + self.deadline_s if self._deadlines else None

    def close(self, patience_s: float) -> bool:
        """Fail queued reads, wait up to `patience_s` for writes and calls under way, sync, and stop the threads.

        Return False if a call is still under way: its buffer and the volume must stay open until the process ends.
        """
        ends_s = self._clock.now_s() + patience_s
        with self._lock:
            self._is_refusing = True
            self._drop(self._loads)
            is_quiet = self._ended.wait_for(self._is_quiet, timeout=patience_s) if self._threads else True
            if is_quiet and self._threads and self._unsynced_s is not None and not self._is_off:
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

    # ---- facts

    @property
    def is_off(self) -> bool:
        """Whether the tier is off: nothing is read or written any more. The log says why."""
        return self._is_off

    @property
    def is_read_only(self) -> bool:
        """Whether the disk is full: nothing is written any more."""
        return self._is_read_only

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of buffers that belong to calls, queued or under way."""
        return self._bytes_in_flight

    @property
    def counts(self) -> DiskCounts:
        """Sums since the start."""
        with self._lock:
            reads, writes = self._done[DiskCallKind.READ], self._done[DiskCallKind.WRITE]
            return DiskCounts(
                *(reads.calls, reads.bytes, reads.seconds),
                *(writes.calls, writes.bytes, writes.seconds),
                *(self._misses, self._late, self._failed),
                *(self._late_bytes, self._late_s),
            )

    # ---- under the lock

    def _ask(self, call: DiskCall, queue: deque[DiskCall]) -> None:
        with self._lock:
            self._bytes_in_flight += call.size_bytes
            if not self._takes(call):
                self._finish(call, DiskVerdict.FAILED, call.asked_s)
            else:
                queue.append(call)
                if call.kind is DiskCallKind.READ:
                    self._deadlines.append(call)
                self._wanted.notify()
                return
        self._wake()

    def _takes(self, call: DiskCall) -> bool:
        return not (self._is_refusing or self._is_off or (call.kind is DiskCallKind.WRITE and self._is_read_only))

    def _finish(self, call: DiskCall, verdict: DiskVerdict, now_s: float, digest: bytes = b"") -> None:
        """End a call and report the last result of its ticket."""
        began, call.state = call.state is DiskCallState.CALLING, DiskCallState.DONE
        self._calling.pop(call, None)
        self._bytes_in_flight -= call.size_bytes
        if call.ticket is not None:
            self._results.append(DiskResult(call.ticket, verdict, now_s - call.asked_s, call.size_bytes, digest))
        if verdict is DiskVerdict.RETURNED and began:
            self._count_late(call, now_s)
        match verdict:
            case DiskVerdict.OK if call.kind in self._done:
                self._done[call.kind].add(call, now_s)
                if call.kind is DiskCallKind.WRITE and self._unsynced_s is None:
                    self._unsynced_s = now_s
            case DiskVerdict.MISS:
                self._misses += 1
            case DiskVerdict.FAILED:
                self._failed += 1
            case _:
                pass
        if call.kind is DiskCallKind.LOOK:
            self._is_looking = False
        call.buffer = None

    def _count_late(self, call: DiskCall, now_s: float) -> None:
        """Add the time of a late read to the sums, once."""
        if not call.is_counted:
            call.is_counted = True
            self._late_bytes += call.size_bytes
            self._late_s += now_s - call.began_s

    def _drop(self, queue: deque[DiskCall]) -> None:
        """Fail all calls of a queue; late reads have left it before."""
        while queue:
            self._finish(queue.popleft(), DiskVerdict.FAILED, self._clock.now_s())

    def _forget_done(self) -> None:
        while self._deadlines and self._deadlines[0].state is DiskCallState.DONE:
            self._deadlines.popleft()

    def _pass_deadlines(self, now_s: float) -> None:
        self._forget_done()
        while self._deadlines and now_s - self._deadlines[0].asked_s >= self.deadline_s:
            call = self._deadlines.popleft()
            if call.state is not DiskCallState.DONE:
                call.is_late = True
                self._late += 1
                if call.ticket is not None:
                    result = DiskResult(call.ticket, DiskVerdict.LATE, now_s - call.asked_s, call.size_bytes)
                    self._results.append(result)
                if call.state is DiskCallState.QUEUED:
                    self._loads.remove(call)  # one of the first: queue and deadlines have the same order
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
        """Queue a sync of what has been written. If it fails, the tier is off."""
        self._unsynced_s = None
        self._stores.append(DiskCall(DiskCallKind.SYNC, None, 0, b"", None, self._clock.now_s()))
        self._wanted.notify()

    def _look(self, now_s: float) -> None:
        """Queue a look at the files: a folder that was deleted is noticed without a write, too."""
        self._is_looking, self._looked_s = True, now_s
        self._stores.append(DiskCall(DiskCallKind.LOOK, None, 0, b"", None, now_s))
        self._wanted.notify()

    def _switch_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            log.error("kv disk tier off reason=%r", reason)
            self._drop(self._loads)
            self._drop(self._stores)

    def _note_error(self, call: DiskCall, error: OSError, now_s: float) -> None:
        code = errno.errorcode.get(error.errno or 0, "error")
        log.warning("kv disk error call=%s slot=%d error=%s", call.kind.name.lower(), call.slot, code)
        if call.kind is DiskCallKind.SYNC:
            self._switch_off(f"sync failed with {code} ({error.strerror}): earlier writes may be lost")
        elif call.kind is DiskCallKind.LOOK:
            self._switch_off(f"its files are lost: {code} ({error.strerror})")
        elif call.kind is DiskCallKind.WRITE and error.errno in _FULL:
            if not self._is_read_only:
                self._is_read_only = True
                log.warning("kv disk tier is read-only from now on error=%s", code)
                kept = [queued for queued in self._stores if queued.kind is not DiskCallKind.WRITE]
                for queued in self._stores:
                    if queued.kind is DiskCallKind.WRITE:
                        self._finish(queued, DiskVerdict.FAILED, now_s)
                self._stores.clear()
                self._stores.extend(kept)
        elif error.errno == errno.EIO:
            self._errors_s.append(now_s)
            if len(self._errors_s) == _MAX_ERRORS and now_s - self._errors_s[0] <= _ERROR_WINDOW_S:
                self._switch_off(f"{_MAX_ERRORS} I/O errors within {_ERROR_WINDOW_S:g} s")

    # ---- the threads

    def _work(self, *queues: deque[DiskCall]) -> None:
        if queues[0] is self._stores:
            lower_priority()  # no request waits for a write: it must not take a core from threads that compute
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

    def _take(self, queues: tuple[deque[DiskCall], ...]) -> DiskCall | None:
        """Wait for the next call and return it; None when the threads are to stop."""
        while (call := self._next(queues)) is None and not self._is_closing:
            self._wanted.wait()
        return call

    def _next(self, queues: tuple[deque[DiskCall], ...]) -> DiskCall | None:
        """Return the next call of the first queue that has one, and begin it."""
        for queue in queues:
            if queue:
                call = queue.popleft()
                call.state = DiskCallState.CALLING
                call.began_s = self._clock.now_s()
                self._calling[call] = queues[0] is self._loads
                return call
        return None

    def _carry_out(self, call: DiskCall) -> tuple[DiskVerdict, bytes]:
        """Make a call to the volume. Errors: OSError, and anything that a faulty volume raises."""
        volume, buffer = self._volume, call.buffer
        match call.kind:
            case DiskCallKind.READ if buffer is not None:
                return (DiskVerdict.OK if volume.read(call.slot, call.key, buffer) else DiskVerdict.MISS), b""
            case DiskCallKind.WRITE if buffer is not None:
                return DiskVerdict.OK, volume.write(call.slot, call.key, buffer)
            case DiskCallKind.SYNC:
                volume.sync()
                return DiskVerdict.OK, b""
            case DiskCallKind.LOOK:
                volume.check_files()
                return DiskVerdict.OK, b""
            case _:
                raise InvariantError("disk.no_buffer", ticket=call.ticket)
