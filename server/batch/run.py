"""One batch while the worker works on it."""

import asyncio
import contextlib
import enum

from tiercel.clock import Clock
from tiercel.server.batch.book import BatchBook
from tiercel.server.batch.journal import AnswerJournal
from tiercel.server.batch.line import LineAnswer
from tiercel.server.batch.records import BatchRecord
from tiercel.server.batch.spool import OnDisk


class RunEnd(enum.Enum):
    """The reason why the worker leaves a batch before its last line."""

    CANCELLED = enum.auto()
    EXPIRED = enum.auto()
    STOPPED = enum.auto()  # the server ends; the batch goes on after the next start


class BatchRun:
    """The answers of one batch, and the reason to leave it early. `gone` is set once there is a reason."""

    def __init__(self, record: BatchRecord, book: BatchBook, on_disk: OnDisk, clock: Clock) -> None:
        self.record = record
        self.end: RunEnd | None = None
        self.gone = asyncio.Event()
        self.writing = asyncio.Lock()
        output, errors = book.journal_paths(record.id)
        self.output = AnswerJournal(output, clock)
        self.errors = AnswerJournal(errors, clock)
        self._book = book
        self._on_disk = on_disk
        self._completed = 0
        self._failed = 0

    @property
    def journals(self) -> tuple[AnswerJournal, AnswerJournal]:
        """The answers with status 200, and all others."""
        return self.output, self.errors

    @property
    def answered(self) -> set[str]:
        """The custom ids of the lines that were answered before the journals were opened."""
        return {*self.output.answered, *self.errors.answered}

    @property
    def size_bytes(self) -> int:
        """The bytes of all answers."""
        return self.output.size_bytes + self.errors.size_bytes

    async def open(self) -> None:
        """Open the journals and count the answers in them. Errors: OSError."""

        def open_journals() -> None:
            for journal in self.journals:
                journal.open()

        await self._on_disk(open_journals)
        self._completed, self._failed = len(self.output.answered), len(self.errors.answered)
        self._count()

    async def close(self) -> None:
        """Make the answers durable. Errors: OSError."""

        def close_journals() -> None:
            try:
                self.output.close()
            finally:
                self.errors.close()

        async with self.writing:
            await self._on_disk(close_journals)

    async def append(self, answer: LineAnswer) -> None:
        """Write an answer. Errors: OSError; then nothing has changed."""
        journal = self.output if answer.is_success else self.errors
        async with self.writing:
            await self._on_disk(lambda: journal.append(answer.encode()))
        if answer.is_success:
            self._completed += 1
        else:
            self._failed += 1
        self._count()

    def leave(self, end: RunEnd) -> None:
        """Give up the lines that are not answered yet. The first reason holds."""
        if self.end is None:
            self.end = end
            self.gone.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until there is a reason to leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.gone.wait()

    def _count(self) -> None:
        self._book.count(self.record.id, completed=self._completed, failed=self._failed)
