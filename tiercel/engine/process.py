"""The engine process, started by the HTTP process, with which it communicates over the inherited socket N.

Usage: `python -m tiercel.engine --fd N`.
"""

import argparse
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable

from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.heap import keep_heap
from tiercel.engine.mailbox import EngineMailbox, receive_start
from tiercel.engine.models.precision import dtype_name
from tiercel.engine.wake import Wake
from tiercel.settings.settings import EngineSettings
from tiercel.system.log import configure_log
from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.errors import ConfigError
from tiercel.values.facts import identity_of_facts
from tiercel.wire.frames import Failed, Ready, Start
from tiercel.wire.step_record import StepRecord

log = logging.getLogger("tiercel.engine.process")

OpenEngine = Callable[[EngineSettings, EngineMailbox, Wake, Clock, int | None, StepRecord | None], Engine]

EXIT_CONFIG = 2
EXIT_CRASH = 3

_ADOPT_S = 0.5  # maximum time before the engine reports that it is ready


def run(engine: Engine, mailbox: EngineMailbox, clock: Clock) -> None:
    """Serve until the HTTP process sends `Quit` or closes the socket.

    Then persist blocks for up to the time in `Quit`.
    """
    loop = engine.loop
    while not (loop.has_quit or mailbox.is_closed):
        _turn(engine, mailbox, 1.0)
    end_s = clock.now_s() + loop.quit_patience_s
    while loop.has_unsaved and not mailbox.is_closed and (left_s := end_s - clock.now_s()) > 0:
        _turn(engine, mailbox, left_s)
    if loop.quit_patience_s:
        log.info(
            "quit is_saved=%s limit_s=%.1f left_s=%.1f",
            not loop.has_unsaved,
            loop.quit_patience_s,
            end_s - clock.now_s(),
        )


def _adopt(engine: Engine, mailbox: EngineMailbox, clock: Clock) -> None:
    """Read the entries of the volume before the first request. The scan of a large volume continues while serving."""
    scan, end_s = engine.tiers.scan, clock.now_s() + _ADOPT_S
    while scan is not None and not scan.is_done and (left_s := end_s - clock.now_s()) > 0:
        if not engine.loop.step():
            mailbox.wait(min(left_s, 0.01))


def _turn(engine: Engine, mailbox: EngineMailbox, max_sleep_s: float) -> None:
    """Handle the received frames and run one step. Sleep if the step had no work."""
    loop = engine.loop
    loop.take(mailbox.take())
    engine.tend()
    if loop.step():
        mailbox.flush()
    else:
        mailbox.wait(min(max_sleep_s, engine.patience_s()))


def serve(
    mailbox: EngineMailbox,
    wake: Wake,
    clock: Clock,
    arena_fd: int | None = None,
    record_fd: int | None = None,
    opens: OpenEngine = open_engine,
) -> int:
    """Open the engine with the settings in the first frame, and serve. Return the exit code of the process.

    `opens` opens the engine; a test may open one with faults.
    """
    first, *rest = receive_start(mailbox)
    if not isinstance(first, Start):
        log.error("first frame is not start frame=%s", type(first).__name__)
        return EXIT_CRASH
    configure_log(first.settings.log_level, as_json=first.settings.log_format == "json")
    started_s = clock.now_s()
    try:
        record = StepRecord.open(first.settings.record_rows, record_fd)
        engine = opens(first.settings, mailbox, wake, clock, arena_fd, record)
    except ConfigError as error:
        return _fail(mailbox, clock, error.code, str(error))
    except OSError as error:  # one of a file; others have no name, and are faults of the program
        if error.filename is None:
            raise
        return _fail(mailbox, clock, "file.unreadable", f"{error.filename}: {error.strerror}")
    # Objects loaded until now are never freed: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    keep_heap()
    _adopt(engine, mailbox, clock)
    mailbox.post(
        Ready(
            max_model_len=engine.capacity.max_model_len,
            vocab_size=engine.model.vocab_size,
            block_size=engine.capacity.block_size,
            blocks_total=engine.capacity.blocks,
            dtype=str(engine.model.precision),
            kv_dtype=dtype_name(engine.model.precision.kv),
            device=engine.device.name,
            model_impl=engine.model.impl,
            weights_bytes=engine.capacity.weights_bytes,
            kv_bytes=engine.capacity.kv_bytes,
            load_s=clock.now_s() - started_s,
            has_grammars=engine.grammars.wait(),
            fingerprint=_fingerprint(engine),
            key_space=engine.cache.key_space,
            speed=engine.speed,
        )
    )
    if first.tells_news:
        engine.tell_news(mailbox)
    engine.loop.take(rest)
    run(engine, mailbox, clock)
    engine.close()
    return 0


def _fail(mailbox: EngineMailbox, clock: Clock, code: str, message: str) -> int:
    """Tell the HTTP process why the engine cannot be opened. Return the exit code."""
    mailbox.post(Failed(code, message))
    _drain(mailbox, clock)
    return EXIT_CONFIG


def _fingerprint(engine: Engine) -> str:
    """Return what clients read as `system_fingerprint`: equal seeds give equal texts while it is the same."""
    model = engine.model
    facts = {
        "model": model.fingerprint.hex(),
        "types": model.precision.facts,
        "implementation": model.impl,
        "products": model.products,
        "device": engine.device.name,
    }
    return "fp_" + identity_of_facts(facts).hex()[:16]


def _drain(mailbox: EngineMailbox, clock: Clock, patience_s: float = 2.0) -> None:
    end_s = clock.now_s() + patience_s
    while mailbox.has_unsent and clock.now_s() < end_s:
        mailbox.wait(0.1)


def main(opens: OpenEngine = open_engine) -> int:
    """Set up signals and the mailbox, run the engine, and return the exit code. See `serve`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket")
    parser.add_argument("--arena-fd", type=int, help="inherited memory file of the host tier")
    parser.add_argument("--record-fd", type=int, help="inherited memory file of the step record")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole process group; the HTTP process drains and then sends `Quit`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        wake = Wake.open()
        mailbox = EngineMailbox(socket.socket(fileno=arguments.fd), wake)
        return serve(mailbox, wake, MonotonicClock(), arguments.arena_fd, arguments.record_fd, opens)
    except Exception:
        log.exception("engine died pid=%d", os.getpid())
        return EXIT_CRASH
