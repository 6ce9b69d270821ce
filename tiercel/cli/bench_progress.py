"""The progress bar of a load test, on standard error."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tiercel.loadtest.client.assignment import Progress as Counts


class BenchProgress:
    """A progress bar of the ended requests of a stage. Use with `with`; silent if standard error is not a terminal."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]} running, {task.fields[failed]} failed"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not (is_shown and sys.stderr.isatty()),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, text: str, requests: int) -> None:
        """Start a stage of `requests` requests; 0: the number is not known."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=requests or None, running=0, failed=0)

    def progress(self, progress: Counts) -> None:
        """Show the progress of the stage."""
        if self._task is not None:
            self._bar.update(
                self._task,
                completed=progress.ended,
                running=progress.sent - progress.ended,
                failed=progress.failed,
            )
