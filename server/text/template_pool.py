"""The processes that render chat templates, and their end when a rendering takes too long.

The template of a model folder is a program: it may loop for ever or write without end for certain messages. It runs
in a process of its own, so that only the request whose messages it renders is lost.
"""

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import structlog

from tiercel.config import worker_environment
from tiercel.errors import AdmissionError, ConfigError
from tiercel.server.text.template_frames import (
    Compiled,
    FromWorker,
    Rendered,
    RenderJob,
    TemplateFailure,
    TemplateSource,
    encode_frame,
    from_worker_decoder,
    read_frame,
)

LIMIT_S = 2.0
"""Maximum time of one rendering."""

_NUM_WORKERS = 2
_START_S = 60.0  # maximum time for the start of a process: its imports, on a machine that is busy
_GRACE_S = 1.0  # after which a process is killed that did not end itself at the limit
_ATTEMPTS = 2  # a process may have been killed from outside


class TemplatePool:
    """Renders one template in up to two processes. The methods are thread-safe."""

    def __init__(self, source: TemplateSource, limit_s: float, num_workers: int) -> None:
        """See `open`."""
        self._source = encode_frame(source)
        self._limit_s = limit_s
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: a process that was not needed yet
        for _ in range(num_workers):
            self._idle.put(None)
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._log = structlog.stdlib.get_logger("server.template")
        self.variables: frozenset[str] = frozenset()

    @staticmethod
    def open(
        text: str, specials: Mapping[str, str], *, limit_s: float = LIMIT_S, num_workers: int = _NUM_WORKERS
    ) -> "TemplatePool":
        """Start the first process and compile the template in it. Errors: ConfigError if it does not compile."""
        pool = TemplatePool(TemplateSource(text, dict(specials)), limit_s, num_workers)
        worker = pool._take()
        try:
            pool.variables = worker.await_start()
        except (OSError, EOFError) as exc:
            worker.end()
            message = "the chat template does not compile: its process ended, or took longer than 10 s"
            raise ConfigError("chat_template.syntax", message) from exc
        except ConfigError:
            worker.end()
            raise
        pool._idle.put(worker)
        return pool

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        with self._lock:
            return [worker.pid for worker in self._all]

    def render(self, job: RenderJob) -> str:
        """Return the rendered conversation.

        Errors: AdmissionError: 400 if the template refuses the messages or exceeds a limit, 500 if its processes die.
        """
        try:
            frame = encode_frame(job)
        except UnicodeEncodeError as exc:
            raise AdmissionError(400, "The messages are no Unicode text.", param="messages") from exc
        for _ in range(_ATTEMPTS):
            answer = self._ask(frame)
            if isinstance(answer, Rendered):
                return answer.text
            if isinstance(answer, TemplateFailure):
                raise AdmissionError(400, answer.message, code=answer.code, param="messages")
        raise AdmissionError(
            500, "The chat template could not be rendered.", code="chat_template_failed", kind="server_error"
        )

    def _ask(self, frame: bytes) -> FromWorker | None:
        """Return the answer of a process; None if it died. A process that died or took too long is replaced."""
        worker = self._take()
        try:
            worker.await_start()
            answer = worker.ask(frame, self._limit_s + _GRACE_S)
        except TimeoutError:
            is_late = True
        except (OSError, EOFError, ConfigError):
            is_late = worker.ended_at_its_limit()
        else:
            self._idle.put(worker)
            return answer
        self._replace(worker)
        self._log.warning("template_process_ended", pid=worker.pid, is_late=is_late)
        if is_late:
            return TemplateFailure(
                f"The chat template did not end within {self._limit_s:g} s.", "chat_template_timeout"
            )
        return None

    def _take(self) -> "_Worker":
        worker = self._idle.get()
        if worker is not None:
            return worker
        try:
            return self._start()
        except OSError:
            self._idle.put(None)
            raise

    def _start(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise AdmissionError(503, "The server is shutting down.", code="shutting_down", kind="server_error")
            worker = _Worker.start(self._source, self._limit_s)
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

    def close(self) -> None:
        """Kill the processes. Renderings in progress fail."""
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
    """One process with the template. `start` does not wait for it."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket, source: bytes) -> None:
        self._process = process
        self._sock = sock
        self._source: bytes | None = source  # None once it is compiled
        self._variables: frozenset[str] = frozenset()

    @staticmethod
    def start(source: bytes, limit_s: float) -> "_Worker":
        """Start a process in a group of its own, which Ctrl-C in a terminal does not reach. Errors: OSError."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            fd = theirs.fileno()
            module = "tiercel.server.text.template_worker"
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", module, "--fd", str(fd), "--limit-s", f"{limit_s}"],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
                env=worker_environment(),
            )
            on_error.pop_all()
        return _Worker(process, ours, source)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def await_start(self) -> frozenset[str]:
        """Wait until the template is compiled. Return the names that it reads.

        Errors: ConfigError if it does not compile, OSError, EOFError.
        """
        if self._source is not None:
            answer = self.ask(self._source, _START_S)
            if isinstance(answer, TemplateFailure):
                raise ConfigError(answer.code, answer.message)
            if not isinstance(answer, Compiled):
                raise EOFError
            self._variables, self._source = frozenset(answer.variables), None
        return self._variables

    def ask(self, frame: bytes, patience_s: float) -> FromWorker:
        """Send a frame and return the answer. Errors: TimeoutError, other OSError, EOFError."""
        end_s = time.monotonic() + patience_s
        self._sock.settimeout(patience_s)
        self._sock.sendall(frame)
        self._sock.settimeout(max(end_s - time.monotonic(), 0.001))
        return from_worker_decoder.decode(read_frame(self._sock))

    def ended_at_its_limit(self) -> bool:
        """Return whether the kernel ended the process because a rendering took too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GRACE_S) == -signal.SIGALRM
        return False

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the process and close its socket, which no other thread may use."""
        self.kill()
        self._sock.close()
