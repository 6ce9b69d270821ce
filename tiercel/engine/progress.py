"""The progress of loading: stages for `/ready`, and a progress bar on a terminal."""

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tiercel.system.standard_streams import error_stream
from tiercel.wire.frames import FromEngine, Loading


class Outbox(Protocol):
    """Takes the frames that report loading stages."""

    def post(self, message: FromEngine) -> None: ...


class LoadProgress:
    """The progress callback of a model: posts a stage at every whole percent and draws a bar on a terminal."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._percent = -1
        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        stream = error_stream()
        self._bar = Progress(*columns, console=Console(file=stream), transient=True, disable=not stream.isatty())
        self._task = self._bar.add_task("weights", total=None)

    def __enter__(self) -> "LoadProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        self._bar.update(self._task, completed=loaded_bytes, total=total_bytes)
        percent = 100 * loaded_bytes // max(total_bytes, 1)
        if percent != self._percent:
            self._percent = percent
            self._outbox.post(Loading(f"loading weights {percent}%"))
