"""State that all client connections share: their number, the memory of unfinished requests, the log of refusals."""

import enum
from collections import Counter
from collections.abc import Callable

import structlog
from msgspec import Struct

from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.errors import AdmissionError
from tiercel.values.units import MIB

RESERVED_CONNECTIONS = 32  # beyond the maximum: they may ask for the health, and are told to come back later
_MAX_UNFINISHED_BYTES = 16 * MIB
_LOG_INTERVAL_S = 10.0
_RETRY_S = 1.0
_HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/ready", "/readiness", "/ping")


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Limits of client connections."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0  # from the first byte, or from the connection, to the end of the headers


def _ignore(_status: int) -> None:
    pass


class Place(enum.Enum):
    """The service that a new connection gets."""

    SERVED = enum.auto()
    HEALTH_ONLY = enum.auto()
    NONE = enum.auto()


class ConnectionGate:
    """Decides which connections and heads of requests are accepted. `on_refusal` gets the status of each refusal."""

    def __init__(
        self, limits: ConnectionLimits, clock: Clock | None = None, on_refusal: Callable[[int], None] = _ignore
    ) -> None:
        self.limits = limits
        self._on_refusal = on_refusal
        self._clock = clock or MonotonicClock()
        self._unfinished_bytes = 0
        self._unlogged: Counter[str] = Counter()  # by code
        self._next_line_s: dict[str, float] = {}  # by code
        self._log = structlog.stdlib.get_logger("server.http")

    def place(self, num_open: int) -> Place:
        """Return the service of a new connection if `num_open` are open, including it."""
        if num_open <= self.limits.max_connections:
            return Place.SERVED
        if num_open <= self.limits.max_connections + RESERVED_CONNECTIONS:
            return Place.HEALTH_ONLY
        return Place.NONE

    def hold(self, change_bytes: int) -> bool:
        """Note a change in the bytes of unfinished heads. Return False if all connections together have too many."""
        self._unfinished_bytes += change_bytes
        return change_bytes <= 0 or self._unfinished_bytes <= _MAX_UNFINISHED_BYTES

    def note_refusal(self, error: AdmissionError, request_id: str) -> None:
        """Count and log a refusal: one line for each code in 10 s, with the number of refusals since the last one."""
        self._on_refusal(error.status)
        self._unlogged[error.code] += 1
        now_s = self._clock.now_s()
        if now_s < self._next_line_s.get(error.code, now_s):
            return
        self._next_line_s[error.code] = now_s + _LOG_INTERVAL_S
        self._log.warning(
            "connection_refused",
            code=error.code,
            status=error.status,
            reason=error.message,
            request_id=request_id,
            count=self._unlogged.pop(error.code),
        )

    def too_many(self) -> AdmissionError:
        """Return the refusal of a connection beyond the maximum."""
        return AdmissionError(
            503,
            f"The server has its maximum of {self.limits.max_connections} open connections. Please try again later.",
            code="too_many_connections",
            kind="server_error",
            retry_after_s=_RETRY_S,
        )


def is_health_path(path: bytes) -> bool:
    """Return whether a path, which may have a prefix, is one of the health of the server."""
    return path.partition(b"?")[0].decode("latin-1").endswith(_HEALTH_PATHS)


def too_much_unfinished() -> AdmissionError:
    """Return the refusal of a head for which there is no memory."""
    return AdmissionError(
        503,
        "The server has too many unfinished requests. Please try again later.",
        code="overloaded",
        kind="server_error",
        retry_after_s=_RETRY_S,
    )
