"""One call to the SSD tier on its way from the loop to a thread and back."""

import enum


class DiskCallKind(enum.Enum):
    READ = enum.auto()
    WRITE = enum.auto()
    SYNC = enum.auto()
    LOOK = enum.auto()


class DiskCallState(enum.Enum):
    QUEUED = enum.auto()
    CALLING = enum.auto()
    DONE = enum.auto()


class DiskCall:
    """A call to the volume; written under the lock only."""

    __slots__ = ("asked_s", "began_s", "buffer", "is_counted", "is_late", "key", "kind", "slot", "state", "ticket")

    def __init__(
        self, kind: DiskCallKind, ticket: int | None, slot: int, key: bytes, buffer: memoryview | None, now_s: float
    ) -> None:
        self.kind = kind
        self.ticket = ticket  # None: the result is not reported
        self.slot = slot
        self.key = key
        self.buffer = buffer
        self.asked_s = now_s
        self.began_s = now_s
        self.state = DiskCallState.QUEUED
        self.is_late = False
        self.is_counted = False  # a late read whose time is in the sums

    @property
    def size_bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes


class DiskCallTotals:
    """Sums of the successful calls of one kind."""

    __slots__ = ("bytes", "calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.seconds = 0.0

    def add(self, call: DiskCall, now_s: float) -> None:
        """Add a call that ends now."""
        self.calls += 1
        self.bytes += call.size_bytes
        self.seconds += now_s - call.began_s
