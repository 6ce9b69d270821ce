"""The stream events of the chat and completion APIs: they have no names, and `[DONE]` is the last one."""

from abc import ABC, abstractmethod

from msgspec import Struct

from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.http.failure import fault_of
from tiercel.server.http.sse import DONE, KEEP_ALIVE, event
from tiercel.values.errors import AdmissionError


class DataEvents(ABC):
    """The part of a `ReplyShape` that the chat and completion APIs share."""

    keep_alive = KEEP_ALIVE

    @abstractmethod
    def usage_chunk(self, usage: UsageBody) -> Struct:
        """Return the final chunk for `include_usage`."""

    @property
    def has_frames(self) -> bool:
        """Whether a delta with plain text is one event, and these events differ in their text only."""
        return True

    def opening(self, usage: UsageBody) -> bytes:
        """Return nothing: the first event is that of the first delta."""
        return b""

    def event(self, chunk: Struct) -> bytes:
        """Return one event."""
        return event(chunk)

    def closing(self, usage: UsageBody | None) -> bytes:
        """Return the usage, if it is wanted, and the end of the stream."""
        return (b"" if usage is None else event(self.usage_chunk(usage))) + DONE

    def failure(self, error: AdmissionError) -> bytes:
        """Return an error and the end of the stream."""
        return event(fault_of(error)) + DONE
