"""The mailbox of one client request: reports of the engine that the handler of the request has not read yet."""

import asyncio
import contextlib
from array import array
from collections.abc import Generator

from msgspec import Struct

from tiercel.outcome import Finished, TokenLogprobs

MAX_UNREAD_BYTES = 256 * 1024  # of one sequence without log-probabilities
_MAX_REQUEST_BYTES = 16 * 1024 * 1024  # of one client request with any number of sequences
_TOKEN_COST_BYTES = 16  # a token id with its share of the list and of the text
_LOGPROB_COST_BYTES = 64  # one alternative of one token


class StreamEnd(Struct, frozen=True):
    """The reason for the early end of a stream: the engine died, or the server is shutting down."""

    message: str
    code: str


class Delivery(Struct, frozen=True):
    """The tokens and the end of one sequence since the last read, in order; `finished` comes last."""

    choice: int  # index among the sequences of the client request
    tokens: "array[int]"
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished | None


class _Unread:
    """A delivery that is still growing."""

    def __init__(self) -> None:
        self.tokens = array("I")
        self.logprobs: list[TokenLogprobs] = []
        self.finished: Finished | None = None


def unread_limit_bytes(sequences: int, logprobs: int) -> int:
    """Return the limit of unread bytes: every request may fall behind by the same number of steps."""
    return min(MAX_UNREAD_BYTES * sequences * (1 + logprobs), _MAX_REQUEST_BYTES)


class Mailbox:
    """The unread tokens and ends of one client request. One reader and one writer on one event loop.

    A slow reader gets longer deliveries, not more of them. `overflow` is set when more than `limit_bytes` are unread
    while a send to the client is blocked; the owner then aborts the request. Data that waits because the event loop
    was busy is not the client's fault and does not count.
    """

    def __init__(self, *, limit_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._unread: dict[int, _Unread] = {}
        self._unread_bytes = 0
        self._limit_bytes = limit_bytes
        self._is_sending = False
        self._end: StreamEnd | None = None
        self._wake = asyncio.Event()
        self.overflow = asyncio.Event()

    @contextlib.contextmanager
    def sending(self) -> Generator[None]:
        """Mark the time in which the reader sends to the client and cannot read."""
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False

    def put_token(self, choice: int, token: int) -> None:
        """Add a token of one choice."""
        self._entry(choice).tokens.append(token)
        self._grow(_TOKEN_COST_BYTES)

    def put_logprobs(self, choice: int, logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the last token of one choice."""
        self._entry(choice).logprobs.append(logprobs)
        self._grow(_LOGPROB_COST_BYTES * (1 + len(logprobs.top_tokens)))

    def put_finished(self, choice: int, finished: Finished) -> None:
        """Add the end of one choice."""
        self._entry(choice).finished = finished
        self._wake.set()

    def put_end(self, end: StreamEnd) -> None:
        """End the stream: nothing is delivered after it."""
        self._end = end
        self._wake.set()

    async def take(self) -> tuple[Delivery, ...] | StreamEnd:
        """Wait for deliveries and take all of them. Unread tokens come before the end of the stream."""
        await self._wake.wait()
        self._wake.clear()
        if not self._unread and self._end is not None:
            self._wake.set()
            return self._end
        unread, self._unread, self._unread_bytes = self._unread, {}, 0
        if self._end is not None:
            self._wake.set()
        return tuple(
            Delivery(choice, entry.tokens, tuple(entry.logprobs), entry.finished) for choice, entry in unread.items()
        )

    def _entry(self, choice: int) -> _Unread:
        entry = self._unread.get(choice)
        if entry is None:
            entry = self._unread[choice] = _Unread()
        return entry

    def _grow(self, size_bytes: int) -> None:
        self._unread_bytes += size_bytes
        self._wake.set()
        if self._is_sending and self._unread_bytes > self._limit_bytes:
            self.overflow.set()
