"""One batch while the worker works on it."""

import asyncio
import contextlib
import enum
from pathlib import Path

from tiercel.server.batch.book import BatchBook
from tiercel.server.batch.form import OutputLine, form_of
from tiercel.server.batch.input import input_lines
from tiercel.server.batch.journal import AnswerJournal
from tiercel.server.batch.line import read_line
from tiercel.server.batch.records import BatchRecord, BatchStatus
from tiercel.server.batch.spool import OnDisk
from tiercel.values.clock import Clock

_PIECE_BYTES = 1024 * 1024  # of lines that are written at once


class RunEnd(enum.Enum):
    """The reason why the worker leaves a batch before its last line."""

    CANCELLED = enum.auto()
    EXPIRED = enum.auto()
    STOPPED = enum.auto()  # the server ends; the batch goes on after the next start


class BatchRun:
    """The answers of one batch, and the reason to leave it early. `gone` is set once there is a reason."""

    def __init__(self, record: BatchRecord, book: BatchBook, on_disk: OnDisk, clock: Clock) -> None:
        self.record = record
        self.form = form_of(record.endpoint)
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
        """Open the journals and count the answers in them, unless they were counted at the end of the batch.

        Errors: OSError.
        """

        def open_journals() -> None:
            for journal in self.journals:
                journal.open()

        await self._on_disk(open_journals)
        self._completed, self._failed = len(self.output.answered), len(self.errors.answered)
        if self.record.goal is None:
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

    async def append(self, answer: OutputLine) -> None:
        """Write an answer. Errors: OSError; then nothing has changed."""
        journal = self.output if answer.is_success else self.errors
        async with self.writing:
            await self._on_disk(lambda: journal.append(answer.encode()))
        if answer.is_success:
            self._completed += 1
        else:
            self._failed += 1
        self._count()

    async def append_left(self, source: Path, max_bytes: int, status: BatchStatus) -> None:
        """Write a line for every request of the input that has none. It can be repeated. Errors: OSError; LineError."""

        def append() -> None:
            for journal in self.journals:
                journal.reopen()
            answered, piece = self.answered, bytearray()
            for _, text in input_lines(source, max_bytes):
                custom_id = read_line(text, (self.record.endpoint,)).custom_id
                if custom_id not in answered:
                    piece += self.form.left(custom_id, status).encode()
                if len(piece) >= _PIECE_BYTES:
                    self.errors.append(bytes(piece))
                    piece.clear()
            if piece:
                self.errors.append(bytes(piece))

        async with self.writing:
            await self._on_disk(append)

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
