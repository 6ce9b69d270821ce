"""The mailbox of one client request: reports of the engine that the handler of the request has not read yet."""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Generator

from msgspec import Struct

from tiercel.outcome import Finished, TokenLogprobs

MAX_UNREAD_BYTES = 256 * 1024  # of one sequence without log-probabilities
_MAX_REQUEST_BYTES = 16 * 1024 * 1024  # of one client request with any number of sequences
_TOKEN_COST_BYTES = 16  # a token id with its share of the list and of the text
_LOGPROB_COST_BYTES = 64  # one alternative of one token


class StreamEnd(Struct, frozen=True):
    """The reason for the early end of a stream: the engine died, the server is shutting down, or the time is up."""

    message: str
    code: str
    status: int = 503  # if nothing has been sent yet
    retry_after_s: float | None = 5


class Delivery:
    """The tokens and the end of one sequence since the last read, in order; `finished` comes last.

    It grows until it is read.
    """

    __slots__ = ("choice", "finished", "logprobs", "tokens")

    def __init__(self, choice: int) -> None:
        self.choice = choice  # index among the sequences of the client request
        self.tokens = array("I")
        self.logprobs: list[TokenLogprobs] = []
        self.finished: Finished | None = None


def unread_limit_bytes(sequences: int, logprobs: int) -> int:
    """Return the limit of unread bytes: every request may fall behind by the same number of steps."""
    return min(MAX_UNREAD_BYTES * sequences * (1 + logprobs), _MAX_REQUEST_BYTES)


class Mailbox:
    """The unread tokens and ends of one client request. One reader and one writer on one event loop.

    The writer puts what a report has for the request and then calls `wake` once. A slow reader gets longer deliveries,
    not more of them. `overflow` is set when more than `limit_bytes` are unread while a send to the client is blocked;
    the owner then aborts the request. Data that waits because the event loop was busy is not the client's fault and
    does not count.
    """

    __slots__ = (
        "_end",
        "_is_sending",
        "_limit_bytes",
        "_reader",
        "_unread",
        "_unread_bytes",
        "_wake",
        "overflow",
        "sink",
    )

    def __init__(self, *, limit_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._unread: dict[int, Delivery] = {}
        self._unread_bytes = 0
        self._limit_bytes = limit_bytes
        self._is_sending = False
        self._end: StreamEnd | None = None
        self._wake = asyncio.Event()
        self._reader: Callable[[], None] | None = None
        self.sink: Callable[[int], bool] | None = None  # see `put_token`
        self.overflow = asyncio.Event()

    @contextlib.contextmanager
    def sending(self) -> Generator[None]:
        """Mark the time in which the reader sends to the client and cannot read."""
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False

    @contextlib.contextmanager
    def read_by(self, reader: Callable[[], None]) -> Generator[None]:
        """Have `wake` call `reader`, which must not raise, until the block ends; then there is no `sink` either."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None
            self.sink = None

    def put_token(self, choice: int, token: int, *, is_last: bool = False) -> bool:
        """Add a token of one choice. Return whether the reader is to be woken for it.

        The `sink` of a request with one choice is offered each token but the last and may take it at once.
        """
        if self.sink is not None and not is_last and not self._unread and self.sink(token):
            return False
        self._delivery(choice).tokens.append(token)
        self._grow(_TOKEN_COST_BYTES)
        return True

    def put_logprobs(self, choice: int, logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the last token of one choice."""
        self._delivery(choice).logprobs.append(logprobs)
        self._grow(_LOGPROB_COST_BYTES * (1 + len(logprobs.top_tokens)))

    def put_finished(self, choice: int, finished: Finished) -> None:
        """Add the end of one choice."""
        self._delivery(choice).finished = finished

    def put_end(self, end: StreamEnd) -> None:
        """End the stream: nothing is delivered after it."""
        self._end = end

    def wake(self) -> None:
        """Tell the reader that there is something to read."""
        if self._reader is None:
            self._wake.set()
        else:
            self._reader()

    def read(self) -> tuple[Delivery, ...] | StreamEnd:
        """Take all deliveries, if there are any. Unread tokens come before the end of the stream."""
        if not self._unread and self._end is not None:
            return self._end
        unread, self._unread, self._unread_bytes = self._unread, {}, 0
        return tuple(unread.values())

    async def take(self) -> tuple[Delivery, ...] | StreamEnd:
        """Wait until there is something to read, and take all of it."""
        while not self._unread and self._end is None:
            self._wake.clear()
            await self._wake.wait()
        return self.read()

    def _delivery(self, choice: int) -> Delivery:
        delivery = self._unread.get(choice)
        if delivery is None:
            delivery = self._unread[choice] = Delivery(choice)
        return delivery

    def _grow(self, size_bytes: int) -> None:
        self._unread_bytes += size_bytes
        if self._is_sending and self._unread_bytes > self._limit_bytes:
            self.overflow.set()
