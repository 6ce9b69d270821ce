"""The main program of a worker process, which answers one job after another until its socket ends.

The kernel ends the process when a job takes too long (SIGALRM), whatever it is doing, and so also if the HTTP process
has died in the meantime. Its memory is limited.
"""

import argparse
import resource
import signal
import socket
from collections.abc import Callable
from typing import TypeVar

from tiercel.server.workers.frames import read_frame, with_length
from tiercel.system.process_limits import lower_limit
from tiercel.system.standard_streams import guard_streams

MEMORY_BYTES = 1024 * 1024 * 1024

T = TypeVar("T")

Work = Callable[[bytearray], bytes]
"""Answers a job."""


def serve(open_work: Callable[[bytearray], tuple[bytes, Work]], *, open_s: float) -> None:
    """Serve the socket that the command line names.

    `open_work` takes the first frame and returns the answer to it and the work for all others. It may take `open_s`
    seconds; a job may take the time that the command line names.
    """
    guard_streams()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the HTTP process decides about its end
    lower_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=arguments.fd) as sock:
        try:
            answer, work = _timed(open_s, open_work, read_frame(sock))
            sock.sendall(with_length(answer))
            while True:
                job = read_frame(sock)
                sock.sendall(with_length(_timed(arguments.limit_s, work, job)))
        except (EOFError, ConnectionError):
            return  # the HTTP process has ended


def _timed(limit_s: float, work: Callable[[bytearray], T], frame: bytearray) -> T:
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    done = work(frame)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return done
