"""One process's share of a run: open loops send at the due times, closed loops as places become free."""

import asyncio
from collections.abc import Coroutine

from tiercel.loadtest.client.assignment import Assignment, Job, Progress, Source
from tiercel.loadtest.client.sender import RequestSender, RequestSpec
from tiercel.loadtest.client.shared_counter import SharedCounters
from tiercel.loadtest.results.record import ClientRecord
from tiercel.values.clock import Clock

_LATE_S = 0.05  # a request sent later than this after it was due counts as late


class LoadRunner:
    """Runs an assignment once. Times are counted from `start_s` on the clock."""

    def __init__(self, assignment: Assignment, sender: RequestSender, counters: SharedCounters, clock: Clock) -> None:
        self.records: list[ClientRecord] = []
        self.late_sends = 0
        self.uncounted = 0
        self._assignment = assignment
        self._sender = sender
        self._counters = counters
        self._clock = clock
        self._start_s = 0.0
        self._sent = 0
        self._failed = 0
        self._stopped = asyncio.Event()
        self._faults: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def progress(self) -> Progress:
        """The counts so far."""
        return Progress(self._sent, len(self.records), self._failed, self._sender.chunks)

    def stop(self) -> None:
        """Send nothing more and cancel the requests in flight."""
        self._stopped.set()
        for task in tuple(self._tasks):
            task.cancel()

    async def run(self, start_s: float) -> None:
        """Send everything and return when the last answer has ended."""
        self._start_s = self._sender.start_s = start_s
        for number, source in enumerate(self._assignment.sources):
            self._spawn(self._open_loop(source) if source.concurrency is None else self._places(number, source))
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        for fault in self._faults:
            raise fault

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(_until_cancelled(work))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (fault := task.exception()) is not None:
            self._faults.append(fault)
            self.stop()

    async def _open_loop(self, source: Source) -> None:
        for job in source.jobs:
            due_s = job.due_s or 0.0
            if not await self._wait_until(due_s):
                return
            self._spawn(self._converse(source, job, due_s, due_s or self._now_s()))
            await asyncio.sleep(0)  # of many requests due at once, send each and read what has arrived before the next

    async def _places(self, number: int, source: Source) -> None:
        """Open this process's part of the places of a closed loop."""
        workers, concurrency = self._assignment.workers, source.concurrency or 0
        for _ in range(concurrency // workers + (self._assignment.worker < concurrency % workers)):
            self._spawn(self._closed_loop(number, source))
            await asyncio.sleep(0)

    async def _closed_loop(self, number: int, source: Source) -> None:
        while not self._stopped.is_set():
            position = self._counters.take(number)
            if position >= len(source.jobs):
                return
            job = source.jobs[position]
            free_s = self._now_s()
            due_s = free_s if job.due_s is None else job.due_s
            if not await self._wait_until(due_s):
                return
            await self._converse(source, job, due_s, max(due_s, free_s))

    async def _wait_until(self, due_s: float) -> bool:
        """Sleep until a time. Return False if nothing more may be sent by then."""
        limit_s = self._assignment.stop_sending_s
        if limit_s is not None and max(due_s, self._now_s()) >= limit_s:
            return False
        wait_s = due_s - self._now_s()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return not self._stopped.is_set()

    async def _converse(self, source: Source, job: Job, due_s: float, sendable_s: float) -> None:
        """Hold a conversation: its turns in order, up to the first that fails."""
        turns = job.conversation.turns
        history: tuple[tuple[str, str], ...] = ()
        for number, turn in enumerate(turns):
            if number:
                due_s = sendable_s = self._now_s() + turn.think_s
                if not await self._wait_until(due_s):
                    return
            spec = RequestSpec(
                source=source, index=job.index, turn=turn, number=number, is_only=len(turns) == 1, history=history,
                due_s=due_s,
            )  # fmt: skip
            self._sent += 1
            sent = await self._sender.send(spec)
            self.records.append(sent.record)
            self.late_sends += sent.record.sent_s - sendable_s > _LATE_S
            self.uncounted += not sent.is_counted
            if sent.record.error is not None:
                self._failed += 1
                return
            history = (*history, (turn.prompt, sent.text))

    def _now_s(self) -> float:
        return self._clock.now_s() - self._start_s


async def _until_cancelled(work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except asyncio.CancelledError:
        return  # the user stopped the run; the records so far count
