"""An engine whose mail and steps are controlled by the section."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.offline import Inbox
from tiercel.engine.wake import Wake
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock, MonotonicClock


@dataclass(frozen=True)
class Bare:
    """An engine, its inbox of reports, and its wake event."""

    engine: Engine
    inbox: Inbox
    wake: Wake
    clock: Clock


@contextmanager
def open_bare(settings: EngineSettings) -> Iterator[Bare]:
    """Open an engine whose host tier is locked, and close it at the end of the block. Errors: ConfigError."""
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
    """Wait until the host tier is locked, which happens in the background."""
    for thread in threading.enumerate():
        if thread.name == "kv-pin":
            thread.join()
