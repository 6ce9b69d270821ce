"""Worker processes, and their end when a job takes too long."""

import contextlib
import enum
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import structlog

from tiercel.server.workers.frames import read_frame, with_length
from tiercel.settings.config import worker_environment
from tiercel.system.process_limits import blame, show_memory_limits
from tiercel.values.errors import AdmissionError, TiercelError

_START_S = 60.0  # maximum time for the start of a process: its imports, on a machine that is busy
_GRACE_S = 1.0  # after which a process is killed that did not end itself at the limit
_ATTEMPTS = 2  # a process may have been killed from outside
_RETRY_S = 5


class Loss(enum.Enum):
    """The reason why a job has no answer."""

    LATE = "late"  # it took longer than the limit
    DIED = "died"  # its process ended, at the second attempt too


class WorkerStartError(TiercelError):
    """A process could not be started, took too long, or ended before it was ready. `reason` says which."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__("worker.start", reason)
        self.is_late = is_late


def _unstartable(error: WorkerStartError) -> AdmissionError:
    return AdmissionError(
        503,
        f"The server cannot run a process that this request needs: {error.message}.",
        code="worker_unavailable",
        kind="server_error",
        retry_after_s=_RETRY_S,
    )


class WorkerPool:
    """Up to `num_workers` processes, each of which answers one job at a time. The methods are thread-safe."""

    def __init__(self, module: str, opening: bytes, *, limit_s: float, num_workers: int) -> None:
        """Start nothing yet. `module` calls `serving.serve` as a program; `opening` is the first frame it gets."""
        self._module = module
        self._opening = opening
        self._limit_s = limit_s
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: a process that was not needed yet
        for _ in range(num_workers):
            self._idle.put(None)
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._log = structlog.stdlib.get_logger("server.workers")

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        with self._lock:
            return [worker.pid for worker in self._all]

    def start_one(self) -> bytearray:
        """Start a process if none is idle, and return its answer to the opening.

        Errors: WorkerStartError with the reason if it cannot be started, ends, or takes too long.
        """
        worker = self._started()
        self._idle.put(worker)
        return worker.await_start()

    def ask(self, job: bytes) -> bytearray | Loss:
        """Return the answer of a process to a job. A process that dies or takes too long is replaced.

        Errors: AdmissionError (503) when the pool is closed, or no process can be started.
        """
        for attempt in range(_ATTEMPTS):
            try:
                answer = self._attempt(with_length(job))
            except WorkerStartError as exc:
                self._log.warning("worker_process_not_started", module=self._module, reason=exc.message)
                if attempt + 1 < _ATTEMPTS:
                    continue
                raise _unstartable(exc) from exc
            if answer is not Loss.DIED:
                return answer
        return Loss.DIED

    def _attempt(self, frame: bytes) -> bytearray | Loss:
        """Return the answer of one process. Errors: WorkerStartError: the job was not begun."""
        worker = self._started()
        try:
            answer = worker.ask(frame, self._limit_s + _GRACE_S)
        except TimeoutError:
            loss = Loss.LATE
        except (OSError, EOFError):
            loss = Loss.LATE if worker.ended_at_its_limit() else Loss.DIED
        else:
            self._idle.put(worker)
            return answer
        self._replace(worker)
        self._log.warning("worker_process_ended", module=self._module, pid=worker.pid, reason=loss.value)
        return loss

    def _started(self) -> "_Worker":
        """Return a process that is ready. Errors: WorkerStartError; AdmissionError (503)."""
        try:
            worker = self._take()
        except OSError as exc:
            raise WorkerStartError(f"no process could be started: {blame(exc)}") from exc
        try:
            worker.await_start()
        except (OSError, EOFError) as exc:
            is_late, cause = isinstance(exc, TimeoutError) or worker.ended_at_its_limit(), worker.cause
            self._discard(worker)
            reason = "the process took too long" if is_late else f"the process ended: {cause}"
            raise WorkerStartError(reason, is_late=is_late) from exc
        return worker

    def _take(self) -> "_Worker":
        worker = self._idle.get()
        if worker is not None:
            return worker
        try:
            return self._start()
        except (OSError, AdmissionError):
            self._idle.put(None)
            raise

    def _start(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise AdmissionError(503, "The server is shutting down.", code="shutting_down", kind="server_error")
            worker = _Worker.start(self._module, self._opening, self._limit_s)
            self._all.add(worker)
        return worker

    def _replace(self, worker: "_Worker") -> None:
        """Kill a process and start another one at once, so that the next request finds it started."""
        worker.end()
        with self._lock:
            self._all.discard(worker)
        try:
            self._idle.put(self._start())
        except (OSError, AdmissionError):
            self._idle.put(None)

    def _discard(self, worker: "_Worker") -> None:
        """Kill a process; another one is started when it is needed."""
        worker.end()
        with self._lock:
            self._all.discard(worker)
        self._idle.put(None)

    def close(self) -> None:
        """Kill the processes. Jobs in progress are lost."""
        with self._lock:
            self._is_closed = True
            workers, self._all = self._all, set()
        with contextlib.suppress(queue.Empty):
            while True:
                idle = self._idle.get_nowait()
                if idle is not None:
                    workers.discard(idle)
                    idle.end()
        for worker in workers:  # its thread notices and closes the socket
            worker.kill()


class _Worker:
    """One process. `start` does not wait for it."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket, opening: bytes) -> None:
        self._process = process
        self._sock = sock
        self._opening = with_length(opening)
        self._opened: bytearray | None = None  # the answer to the opening

    @staticmethod
    def start(module: str, opening: bytes, limit_s: float) -> "_Worker":
        """Start a process in a group of its own, which Ctrl-C in a terminal does not reach. Errors: OSError."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            fd = theirs.fileno()
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", module, "--fd", str(fd), "--limit-s", f"{limit_s}"],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
                env=worker_environment(),
            )
            on_error.pop_all()
        return _Worker(process, ours, opening)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def await_start(self) -> bytearray:
        """Wait until the process is ready. Return its answer to the opening. Errors: OSError, EOFError."""
        if self._opened is None:
            self._opened = self.ask(self._opening, _START_S)
        return self._opened

    def ask(self, frame: bytes, patience_s: float) -> bytearray:
        """Send a frame and return the answer. Errors: TimeoutError, other OSError, EOFError."""
        end_s = time.monotonic() + patience_s
        self._sock.settimeout(patience_s)
        self._sock.sendall(frame)
        self._sock.settimeout(max(end_s - time.monotonic(), 0.001))
        return read_frame(self._sock)

    def ended_at_its_limit(self) -> bool:
        """Return whether the kernel ended the process because a job took too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GRACE_S) == -signal.SIGALRM
        return False

    @property
    def cause(self) -> str:
        """The reason for which the process ended, with the limits that may have ended it."""
        code = self._process.poll()
        text = "no answer" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        limits = show_memory_limits()
        return f"{text}; raise {limits}" if limits else text

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the process and close its socket, which no other thread may use."""
        self.kill()
        self._sock.close()
