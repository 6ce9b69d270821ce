"""An engine whose mail and steps a section drives itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiercel.clock import Clock, MonotonicClock
from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.offline import Inbox
from tiercel.engine.wake import Wake
from tiercel.settings import EngineSettings


@dataclass(frozen=True)
class Bare:
    """The engine, and what it reports to and is woken by."""

    engine: Engine
    inbox: Inbox
    wake: Wake
    clock: Clock


@contextmanager
def open_bare(settings: EngineSettings) -> Iterator[Bare]:
    """Loaded, with its host tier locked, until the block ends. Errors: ConfigError."""
    clock, wake = MonotonicClock(), Wake.open()
    inbox = Inbox(clock)
    try:
        engine = open_engine(settings, inbox, wake, clock)
        try:
            _wait_pinned()
            yield Bare(engine, inbox, wake, clock)
        finally:
            engine.close()
    finally:
        wake.close()


def _wait_pinned() -> None:
    """Until the host tier, which is locked beside the start, is locked."""
    for thread in threading.enumerate():
        if thread.name == "kv-pin":
            thread.join()
