"""Logging to stderr: one JSON object per line, or the console format for a terminal."""

import logging
from typing import TextIO

import structlog

from tiercel.system.standard_streams import GuardedStream, error_stream


class _PeopleHandler(logging.StreamHandler[TextIO]):
    """Writes the log. Once standard error takes text again, it says how many lines were lost before."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        super().emit(record)
        if isinstance(self.stream, GuardedStream):
            self.stream.tell_lost(self._tell_lost)

    def _tell_lost(self, lost: int) -> None:
        message = "log lines lost: standard error did not take them count=%d"
        super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (lost,), None))


def configure_log(level: str, *, as_json: bool) -> None:
    """Configure structlog and the standard library's loggers. The main function of each process calls it once."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    last: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = _PeopleHandler(error_stream())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                last,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def set_log_level(level: str) -> None:
    """Set the log level of this process."""
    logging.getLogger().setLevel(level.upper())
