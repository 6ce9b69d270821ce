"""A client process: `python -m tiercel.loadtest.client.worker` reads its assignment, runs it and writes its records.

The messages of `assignment` go over standard input and output. The process ends when its parent closes the pipe.
"""

import asyncio
import gc
import os
import signal
import sys

import msgspec

from tiercel.loadtest.client.assignment import (
    Assignment,
    FromWorker,
    Go,
    Load,
    Prepared,
    Records,
    Stop,
    ToWorker,
    encode_frame,
    read_frame,
)
from tiercel.loadtest.client.load_meter import LoadMeter
from tiercel.loadtest.client.runner import LoadRunner
from tiercel.loadtest.client.sender import RequestSender
from tiercel.loadtest.client.shared_counter import SharedCounters
from tiercel.values.clock import Clock, MonotonicClock

_PROGRESS_S = 0.25
_RECORDS_PER_FRAME = 500
_MAX_LAGS = 20_000


async def work(clock: Clock) -> int:
    """Run one assignment and return the exit code."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    decoder = msgspec.msgpack.Decoder(ToWorker)
    assignment = await read_frame(reader, decoder)
    if not isinstance(assignment, Assignment):
        return 1
    with SharedCounters(assignment.counters) as counters:
        async with RequestSender(assignment, clock) as sender:
            runner = LoadRunner(assignment, sender, counters, clock)
            gc.collect()
            gc.freeze()  # the plan lives to the end, so that garbage collections need not visit it
            _post(Prepared())
            go = await read_frame(reader, decoder)
            if not isinstance(go, Go):
                return 1
            await _run(runner, sender, clock, go, asyncio.ensure_future(read_frame(reader, decoder)))
    return 0


async def _run(
    runner: LoadRunner, sender: RequestSender, clock: Clock, go: Go, order: "asyncio.Future[ToWorker | None]"
) -> None:
    await asyncio.sleep(max(0.0, go.start_s - clock.now_s()))
    meter = LoadMeter(clock, lambda: sender.chunks)
    meter.start()
    running = asyncio.ensure_future(runner.run(go.start_s))
    while not running.done():
        await asyncio.wait({running, order}, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        if order.done() and not running.done():
            if not isinstance(order.result(), Stop):
                os._exit(1)  # the parent has ended
            runner.stop()
            await running
        _post(runner.progress)
    await running
    meter.stop()
    order.cancel()
    for first in range(0, len(runner.records), _RECORDS_PER_FRAME):
        _post(Records(runner.records[first : first + _RECORDS_PER_FRAME]))
    _post(_load(runner, meter))


def _load(runner: LoadRunner, meter: LoadMeter) -> Load:
    ordered = sorted(meter.lags_ms, reverse=True)
    thinned = ordered[:: max(1, len(ordered) // _MAX_LAGS)]  # the largest values are kept
    return Load(
        cpu_s=meter.cpu_s,
        cpu_shares=meter.cpu_shares,
        lags_ms=thinned,
        chunks=runner.progress.chunks,
        chunks_by_second=meter.chunks_by_second,
        late_sends=runner.late_sends,
        uncounted=runner.uncounted,
    )


def _post(message: FromWorker) -> None:
    sys.stdout.buffer.write(encode_frame(message))
    sys.stdout.buffer.flush()


def main() -> int:
    """Run one assignment. SIGINT is ignored: the parent decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(work(MonotonicClock()))


if __name__ == "__main__":
    sys.exit(main())
