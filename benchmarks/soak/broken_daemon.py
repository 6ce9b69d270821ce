"""A daemon with a defect, to show that the soak notices it: `python -m benchmarks.soak.broken_daemon DEFECT FLAG ...`

A thread of the HTTP process spoils something once a second until the daemon ends.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable

from tiercel.cli.main import main
from tiercel.server.client.supervisor import Supervisor

_EVERY_S = 1.0
_LEAK_BYTES = 1 << 20
_kept: list[object] = []


def _leak_memory() -> None:
    _kept.append(os.urandom(_LEAK_BYTES))


def _leak_descriptors() -> None:
    _kept.append(os.open(os.devnull, os.O_RDONLY))


def _leak_threads() -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    _kept.append(thread)


def _stop_supervision() -> None:
    gc.unfreeze()  # the daemon has excluded what it holds since its start
    for supervisor in [one for one in gc.get_objects() if isinstance(one, Supervisor)]:
        supervisor.stop()


DEFECTS: dict[str, Callable[[], None]] = {
    "memory": _leak_memory,
    "descriptors": _leak_descriptors,
    "threads": _leak_threads,
    "supervision": _stop_supervision,
}


def _spoil(defect: Callable[[], None]) -> None:
    while True:
        defect()
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    name = sys.argv.pop(1)
    threading.Thread(target=_spoil, args=(DEFECTS[name],), daemon=True).start()
    sys.argv.insert(1, "serve")
    sys.exit(main())
