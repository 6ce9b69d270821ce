"""The worker: validates batches, has their lines answered by the server's own routes, and makes files of the answers.

The batches of a tenant run one after the other, those of different tenants side by side. Each line takes one of a
bounded number of slots, which tenants get in turn.
"""

import asyncio
import contextlib
import functools
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import structlog

from tiercel.server.batch.book import BatchBook
from tiercel.server.batch.byte_gate import ByteGate
from tiercel.server.batch.durable import NO_ROOM
from tiercel.server.batch.form import OutputLine
from tiercel.server.batch.input import InputReader, check_input
from tiercel.server.batch.line import BatchLine, LineError, read_line, wants_stream
from tiercel.server.batch.records import BatchFault, BatchRecord, BatchStatus
from tiercel.server.batch.route_call import RouteCaller
from tiercel.server.batch.run import BatchRun, RunEnd
from tiercel.server.batch.spool import FileSpool, OnDisk, new_file_id
from tiercel.server.tenancy.tenants import Tenant
from tiercel.values.clock import Clock
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId
from tiercel.values.units import MIB

T = TypeVar("T")

_LINE_BYTES = 4096  # of a line besides its body
_LINES_BYTES = 16 * MIB  # of a tenant's lines that are being answered; a longer line is answered alone
_RETRY_STATUSES = (429, 503, 529)  # a limit or an overload: the line is asked again
_MIN_RETRY_S = 0.5
_UNKNOWN_RETRY_S = 2.0
_GATE_S = 0.25  # between two looks at the load
_ROOM_S = 5.0  # between two attempts to write while there is no space
_STOP_S = 5.0  # for lines to end when the worker stops
_SUFFIXES = ("output", "errors")
_CHANGED = BatchFault(code="input_changed", message="The input file was damaged after it had been validated.")
_DISK = BatchFault(code="storage_error", message="The disk of the server failed.")


class Conditions(Protocol):
    """The conditions under which a line may be asked."""

    @property
    def is_calm(self) -> bool:
        """Whether the engine is ready, and the server neither overloaded nor draining."""
        ...

    @property
    def max_body_bytes(self) -> int: ...

    def tenant(self, name: TenantId) -> Tenant | None:
        """Return the tenant with this name; None if there is none any more."""
        ...


class BatchWorker:
    """Works on all unfinished batches, from `start` to `stop`."""

    def __init__(
        self,
        book: BatchBook,
        spool: FileSpool,
        caller: RouteCaller,
        conditions: Conditions,
        on_disk: OnDisk,
        clock: Clock,
        wall_s: Callable[[], float],
        *,
        concurrency: int,
    ) -> None:
        self.num_completed = 0  # lines since the start
        self.num_failed = 0
        self._book = book
        self._spool = spool
        self._caller = caller
        self._conditions = conditions
        self._on_disk = on_disk
        self._clock = clock
        self._wall_s = wall_s
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._run_by_id: dict[str, BatchRun] = {}
        self._task_by_tenant: dict[TenantId, asyncio.Task[None]] = {}
        self._is_stopping = False
        self._log = structlog.stdlib.get_logger("server.batches")

    def start(self) -> None:
        """Go on with the batches that an earlier process has left."""
        for tenant in self._book.tenants():
            self.wake(tenant)

    def wake(self, tenant: TenantId) -> None:
        """Work on the batches of a tenant, if this is not done yet."""
        if not self._is_stopping and tenant not in self._task_by_tenant:
            self._task_by_tenant[tenant] = asyncio.create_task(self._serve_tenant(tenant))

    async def stop(self) -> None:
        """Leave all batches as they are: their answers stay, and their other lines are asked after the next start."""
        self._is_stopping = True
        for run in self._run_by_id.values():
            run.leave(RunEnd.STOPPED)
        tasks = list(self._task_by_tenant.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch; one that is over or being finalised stays as it is. Errors: OSError."""
        record = await self._book.change(batch_id, "cancelling", only_from=("validating", "in_progress"))
        if record.status == "cancelling":
            if batch_id in self._run_by_id:
                self._run_by_id[batch_id].leave(RunEnd.CANCELLED)
            else:  # behind another batch of its tenant
                await self._serve(record)
        return self._book.get(batch_id)

    async def _serve_tenant(self, tenant: TenantId) -> None:
        try:
            while not self._is_stopping:
                record = self._book.next_unfinished(tenant, self._run_by_id)
                if record is None:
                    return
                await self._serve(record)
        finally:
            del self._task_by_tenant[tenant]

    async def _serve(self, record: BatchRecord) -> None:
        """Work on a batch until it is over or the worker stops. An unexpected error fails this batch alone."""
        run = self._run_by_id[record.id] = BatchRun(record, self._book, self._on_disk, self._clock)
        left_s = max(record.expires_s - self._wall_s(), 0.0)
        expiry = asyncio.get_running_loop().call_later(left_s, run.leave, RunEnd.EXPIRED)
        try:
            await self._run(run)
        except Exception as exc:
            if self._is_stopping:
                return  # the batch goes on after the next start
            error_id = secrets.token_hex(8)
            self._log.error(
                "batch_failed", batch_id=record.id, error_id=error_id, kind=type(exc).__name__, exc_info=exc
            )
            fault = BatchFault(code="internal_error", message=f"Internal server error (error id {error_id}).")
            await self._settle(lambda: self._book.change(record.id, "failed", faults=(fault,)))
        finally:
            expiry.cancel()
            del self._run_by_id[record.id]

    async def _run(self, run: BatchRun) -> None:
        record = self._book.get(run.record.id)
        if record.status == "validating":
            record = await self._validate(run)
        goal, faults = record.goal or "completed", record.faults
        if record.status in ("in_progress", "finalizing", "cancelling"):
            await run.open()
            space, counted = self._spool.space, run.size_bytes
            space.add(record.tenant, counted)
            try:
                if record.status == "in_progress":
                    goal, faults = await self._answer_all(run)
                if run.end is RunEnd.STOPPED:
                    return
                if run.end is RunEnd.CANCELLED or record.status == "cancelling":
                    goal = "cancelled"
                await self._finish(run, goal, faults)
            finally:
                with contextlib.suppress(OSError):
                    await run.close()
                if not self._book.get(record.id).is_over:
                    space.add(record.tenant, -run.size_bytes)

    @property
    def _max_line_bytes(self) -> int:
        """The longest line of a file that was uploaded."""
        return max(self._spool.space.limits.file_bytes, self._conditions.max_body_bytes)

    async def _validate(self, run: BatchRun) -> BatchRecord:
        record = run.record
        path, limit = self._spool.path_of(record.input_file_id), self._conditions.max_body_bytes + _LINE_BYTES
        try:
            total, faults = await self._on_disk(lambda: check_input(path, record.endpoint, limit))
        except FileNotFoundError:
            total, faults = 0, [BatchFault(code="input_missing", message="The input file does not exist any more.")]
        if faults:
            return await self._settle(
                lambda: self._book.change(record.id, "failed", only_from=("validating",), faults=tuple(faults)),
            )
        return await self._settle(
            lambda: self._book.change(record.id, "in_progress", only_from=("validating",), total=total)
        )

    async def _answer_all(self, run: BatchRun) -> tuple[BatchStatus, tuple[BatchFault, ...]]:
        """Ask all lines that have no answer yet. Return the status that the batch then gets, and its faults."""
        record, path = run.record, self._spool.path_of(run.record.input_file_id)
        reader = InputReader(path, record.endpoint, run.answered, self._max_line_bytes)
        own_slots, line_bytes, fault = asyncio.Semaphore(self._concurrency), ByteGate(_LINES_BYTES), None
        try:
            async with asyncio.TaskGroup() as tasks:
                while lines := await self._on_disk(lambda: reader.read(self._concurrency)):
                    for number, text in lines:
                        await own_slots.acquire()
                        if run.end in (RunEnd.STOPPED, RunEnd.CANCELLED):
                            break
                        await line_bytes.enter(len(text))
                        task = tasks.create_task(self._answer_line(run, number, read_line(text, (record.endpoint,))))
                        task.add_done_callback(lambda _: own_slots.release())
                        task.add_done_callback(functools.partial(_leave, line_bytes, len(text)))
                    if run.end in (RunEnd.STOPPED, RunEnd.CANCELLED):
                        break
        except* (OSError, LineError) as group:
            self._log.error("batch_storage_error", batch_id=record.id, errors=[str(one) for one in group.exceptions])
            fault = _CHANGED if group.subgroup(LineError) else _DISK
        if fault is not None:
            return "failed", (fault,)
        return "expired" if run.end is RunEnd.EXPIRED else "completed", ()

    async def _answer_line(self, run: BatchRun, number: int, line: BatchLine) -> None:
        """Write the answer to one line, unless the batch is left. Errors: OSError other than a full disk."""
        answer = await self._ask(run, line, f"{run.record.id}-{number}")
        if answer is None and run.end is RunEnd.EXPIRED:
            answer = run.form.expired(line)
        if answer is not None and await self._keep(run, answer):
            if answer.is_success:
                self.num_completed += 1
            else:
                self.num_failed += 1

    async def _ask(self, run: BatchRun, line: BatchLine, request_id: str) -> OutputLine | None:
        """Return the answer to a line; None if the batch was left before there was one."""
        if wants_stream(line):
            return run.form.streamed(line, request_id)
        while run.end is None:
            tenant = self._conditions.tenant(run.record.tenant)
            if tenant is None or not self._conditions.is_calm:
                await run.pause(_GATE_S)
                continue
            async with self._slots:
                answer = await self._caller.post(tenant, line.url, bytes(line.body), request_id, run.gone)
            if answer is None:
                return None
            if answer.status not in _RETRY_STATUSES:
                return run.form.answer(line, answer, request_id)
            await run.pause(_retry_s(answer.retry_after_s))
        return None

    async def _keep(self, run: BatchRun, answer: OutputLine) -> bool:
        """Write an answer; wait while there is no space for it. Return False if the batch was left meanwhile.

        Errors: OSError other than a full disk.
        """
        size_bytes, tenant, space = len(answer.encode()), run.record.tenant, self._spool.space
        has_waited = False
        while True:
            try:
                space.check(tenant, size_bytes, 0)
                await run.append(answer)
            except AdmissionError as exc:
                reason = exc.message
            except OSError as exc:
                if exc.errno not in NO_ROOM:
                    raise
                reason = "the disk is full"
            else:
                space.add(tenant, size_bytes)
                return True
            if run.end is not None and has_waited:
                return False
            if not has_waited:
                self._log.warning("batch_waits_for_space", batch_id=run.record.id, reason=reason)
            has_waited = True
            await run.pause(_ROOM_S)

    async def _finish(self, run: BatchRun, goal: BatchStatus, faults: tuple[BatchFault, ...]) -> None:
        """Make files of the answers, and give the batch its final status. Each step can be repeated after a crash."""
        batch_id, tenant, lifetime_s = run.record.id, run.record.tenant, run.record.output_lifetime_s
        status: BatchStatus = "cancelling" if goal == "cancelled" else "finalizing"
        if run.form.answers_all:
            await self._answer_left(run, status, goal, faults)
        await run.close()
        record = self._book.get(batch_id)
        ids = [
            (file_id or new_file_id()) if journal.size_bytes else None
            for file_id, journal in zip((record.output_file_id, record.error_file_id), run.journals, strict=True)
        ]
        await self._settle(
            lambda: self._book.change(
                batch_id, status, goal=goal, faults=faults, output_file_id=ids[0], error_file_id=ids[1]
            )
        )
        for file_id, journal, suffix in zip(ids, run.journals, _SUFFIXES, strict=True):
            if file_id is None:
                continue
            if self._spool.find(tenant, file_id) is not None:  # made before a crash
                self._spool.space.add(tenant, -journal.size_bytes)
                continue
            filename = f"{batch_id}_{suffix}.jsonl"
            await self._settle(
                lambda path=journal.path, file_id=file_id, filename=filename: self._spool.adopt(
                    path, tenant, file_id, filename, "batch_output", lifetime_s
                ),
            )
        counts = self._book.get(batch_id)
        record = await self._settle(
            lambda: self._book.change(batch_id, goal, completed=counts.completed, failed=counts.failed)
        )
        self._log.info(
            "batch_over",
            batch_id=batch_id,
            tenant=tenant,
            status=goal,
            completed=record.completed,
            failed=record.failed,
        )

        def remove() -> None:
            for journal in run.journals:
                journal.remove()

        await self._on_disk(remove)
        source = self._spool.find(tenant, record.input_file_id)
        if run.form.answers_all and source is not None:  # it was made for this batch
            await self._spool.remove(source)

    async def _answer_left(
        self, run: BatchRun, status: BatchStatus, goal: BatchStatus, faults: tuple[BatchFault, ...]
    ) -> None:
        """Write the results of the requests that have none. They do not count as answers.

        Errors: OSError or LineError if the input cannot be read, unless the batch fails for that.
        """
        record, before_bytes = run.record, run.size_bytes
        await self._settle(lambda: self._book.change(record.id, status, goal=goal, faults=faults))
        path, limit = self._spool.path_of(record.input_file_id), self._max_line_bytes
        try:
            await self._settle(lambda: run.append_left(path, limit, goal))
        except (OSError, LineError):
            if goal != "failed":
                raise
        finally:
            self._spool.space.add(record.tenant, run.size_bytes - before_bytes)

    async def _settle(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work on the disk, again and again while the disk is full. Errors: OSError."""
        while True:
            try:
                return await work()
            except OSError as exc:
                if exc.errno not in NO_ROOM or self._is_stopping:
                    raise
            await asyncio.sleep(_ROOM_S)


def _leave(gate: ByteGate, size: int, _task: object) -> None:
    gate.leave(size)


def _retry_s(retry_after_s: float | None) -> float:
    """Return the time until a refused line is asked again, with a random part so that lines do not come together."""
    seconds = max(_UNKNOWN_RETRY_S if retry_after_s is None else retry_after_s, _MIN_RETRY_S)
    return seconds * random.uniform(1.0, 1.25)  # noqa: S311 - no secret
