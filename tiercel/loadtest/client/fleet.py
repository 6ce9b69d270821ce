"""The client processes of a run: started, given their share of the load, watched, and their records gathered."""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tiercel.loadtest.client.assignment import (
    Assignment,
    FromWorker,
    Go,
    Load,
    Prepared,
    Progress,
    Records,
    Source,
    Stop,
    encode_frame,
    read_frame,
)
from tiercel.loadtest.client.shared_counter import counter_file
from tiercel.loadtest.results.record import ClientRecord
from tiercel.values.clock import Clock
from tiercel.values.errors import TiercelError

_HEAD_START_S = 0.1  # between the start message and the start of the run; every process has read the message by then

Watch = Callable[[Progress], None]


class Gathered(Struct, frozen=True):
    """The results of all client processes."""

    records: list[ClientRecord]  # in the order of their plan
    loads: list[Load]


class Fleet:
    """Runs one assignment on several processes."""

    def __init__(self, assignment: Assignment, workers: int, clock: Clock, watch: Watch) -> None:
        self._assignment = assignment
        self._workers = workers
        self._clock = clock
        self._watch = watch
        self._progress: dict[int, Progress] = {}
        self._processes: list[asyncio.subprocess.Process] = []

    async def run(self, began: Callable[[float], None]) -> Gathered:
        """Run to the end. `began` is called with the start of the run. Errors: TiercelError when a process dies."""
        with counter_file() as counters:
            async with _started(self._workers) as processes:
                self._processes = processes
                shares = [replace(share, counters=counters) for share in shared_out(self._assignment, self._workers)]
                for process, share in zip(processes, shares, strict=True):
                    await _send(process, encode_frame(share))
                for process in processes:
                    await self._expect_prepared(process)
                start_s = self._clock.now_s() + _HEAD_START_S
                for process in processes:
                    await _send(process, encode_frame(Go(start_s)))
                began(start_s)
                gathered = await asyncio.gather(*itertools.starmap(self._gather, enumerate(processes)))
        records = [record for part in gathered for record in part.records]
        records.sort(key=lambda record: (record.index, record.turn))
        return Gathered(records, [load for part in gathered for load in part.loads])

    async def stop(self) -> None:
        """End the run early; `run` then returns the records so far."""
        for process in self._processes:
            await _send(process, encode_frame(Stop()))

    async def _expect_prepared(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        if not isinstance(await read_frame(process.stdout, _decoder()), Prepared):
            raise _died(process)

    async def _gather(self, number: int, process: asyncio.subprocess.Process) -> Gathered:
        assert process.stdout is not None
        decoder = _decoder()
        records: list[ClientRecord] = []
        while True:
            match await read_frame(process.stdout, decoder):
                case Progress() as progress:
                    self._progress[number] = progress
                    self._watch(_sum(tuple(self._progress.values())))
                case Records() as some:
                    records += some.records
                case Load() as load:
                    return Gathered(records, [load])
                case Prepared() | None:
                    raise _died(process)


def shared_out(assignment: Assignment, workers: int) -> list[Assignment]:
    """Return the assignment of each process.

    The jobs of an open loop are dealt in turn; all processes get the whole list of a closed loop and share a counter.
    """

    def part(source: Source, worker: int) -> Source:
        return source if source.concurrency is not None else replace(source, jobs=source.jobs[worker::workers])

    return [
        replace(
            assignment,
            worker=worker,
            workers=workers,
            sources=[part(source, worker) for source in assignment.sources],
        )
        for worker in range(workers)
    ]


@asynccontextmanager
async def _started(count: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    processes: list[asyncio.subprocess.Process] = []
    try:
        for _ in range(count):
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tiercel.loadtest.client.worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=2**20,
                )
            )
        yield processes
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()  # a process ends when its pipe is closed
        for process in processes:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _send(process: asyncio.subprocess.Process, frame: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(frame)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise _died(process) from exc


def _died(process: asyncio.subprocess.Process) -> TiercelError:
    return TiercelError("bench.worker", "a client process ended before its work did", pid=process.pid)


def _decoder() -> msgspec.msgpack.Decoder[FromWorker]:
    return msgspec.msgpack.Decoder(FromWorker)


def _sum(all_progress: Sequence[Progress]) -> Progress:
    return Progress(
        sent=sum(progress.sent for progress in all_progress),
        ended=sum(progress.ended for progress in all_progress),
        failed=sum(progress.failed for progress in all_progress),
        chunks=sum(progress.chunks for progress in all_progress),
    )
