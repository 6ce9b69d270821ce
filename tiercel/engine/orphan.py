"""The end of the engine when the HTTP process, its parent, has died, whatever the engine is doing.

The loop sees the end of its socket between two steps only. The kernel ends a process that computes, loads or is stopped
as well (`PR_SET_PDEATHSIG`, prctl(2)); a thread is the fallback where the kernel refuses.
"""

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EXIT_ORPHAN = 4

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_GRACE_S = 1.0  # between the end of the socket and the look at the parent; an orderly end is over by then


def ask_kernel() -> None:
    """Ask for SIGKILL at the death of the parent. A refusal is logged."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
        log.warning("no signal at the parent's death error=%s", os.strerror(ctypes.get_errno()))


def end_with_parent(fd: int, ask: Callable[[], None] = ask_kernel) -> None:
    """End this process when its parent has died, or at once if the parent is dead already.

    `fd`: the socket of which the parent has the other end, and no other process. The kernel signals when the parent's
    thread that started this process ends: that must be its main thread. A parent that closes the socket and lives is
    left to wait for this process or to kill it. Children of this process are not ended.
    """
    parent = os.getppid()
    ask()
    poll = select.poll()
    poll.register(os.dup(fd), 0)  # a hang-up is reported without being asked for
    if poll.poll(0):
        # The parent died before the kernel was asked.
        os._exit(EXIT_ORPHAN)
    threading.Thread(target=_watch, args=(poll, parent), name="parent", daemon=True).start()


def _watch(poll: "select.poll", parent: int) -> None:
    """Wait for the end of the socket, then for that of the parent."""
    poll.poll()
    while True:
        time.sleep(_GRACE_S)
        if os.getppid() != parent:
            os._exit(EXIT_ORPHAN)
