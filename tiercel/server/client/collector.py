"""The mailbox of one client request: reports of the engine that the handler of the request has not read yet."""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Generator

from msgspec import Struct

from tiercel.server.client.logprobs import PackedLogprobs, logprobs_bytes
from tiercel.values.outcome import Finished, TokenLogprobs

MAX_UNREAD_BYTES = 176 * 1024
"""The limit of unread bytes of a stream: 256 KiB, less the unsent events in the connection (64 KiB) and one portion."""

_PORTION_BYTES = 16 * 1024
_TOKEN_BYTES = 4
_TOKEN_EVENT_BYTES = 32  # of a token in an event, in most cases less
_LOGPROB_EVENT_BYTES = 72  # of one alternative in an event


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
        self.logprobs = PackedLogprobs()
        self.finished: Finished | None = None

    @property
    def num_bytes(self) -> int:
        """The memory of the tokens and their log-probabilities."""
        return len(self.tokens) * _TOKEN_BYTES + self.logprobs.num_bytes

    def split(self, tokens: int) -> "Delivery":
        """Remove the first `tokens` tokens, which are not all, and return them as a delivery."""
        first, rest = Delivery(self.choice), PackedLogprobs()
        first.tokens, self.tokens = self.tokens[:tokens], self.tokens[tokens:]
        first.logprobs.extend(self.logprobs, 0, tokens)
        rest.extend(self.logprobs, tokens)
        self.logprobs = rest
        return first


def portion_tokens(logprobs: int | None) -> int:
    """Return the number of tokens whose events have about 16 KiB."""
    alternatives = 0 if logprobs is None else 1 + logprobs
    return max(_PORTION_BYTES // (_TOKEN_EVENT_BYTES + _LOGPROB_EVENT_BYTES * alternatives), 1)


class Mailbox:
    """The unread tokens and ends of one client request. One reader and one writer on one event loop.

    The writer puts what a report has for the request and then calls `wake` once. A slow reader gets longer deliveries,
    not more of them, of at most `portion` tokens together. `overflow` is set when more than `limit_bytes` are unread
    while a send to the client is blocked; the owner then aborts the request. Data that waits because the event loop was
    busy is not the client's fault and does not count.
    """

    __slots__ = (
        "_end",
        "_is_sending",
        "_limit_bytes",
        "_portion",
        "_reader",
        "_unread",
        "_unread_bytes",
        "_wake",
        "overflow",
        "sink",
    )

    def __init__(self, *, limit_bytes: int = MAX_UNREAD_BYTES, portion: int = 2**31) -> None:
        self._unread: dict[int, Delivery] = {}
        self._unread_bytes = 0
        self._limit_bytes = limit_bytes
        self._portion = portion
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
        self._grow(_TOKEN_BYTES)
        return True

    def put_logprobs(self, choice: int, logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the last token of one choice."""
        self._delivery(choice).logprobs.append(logprobs)
        self._grow(logprobs_bytes(len(logprobs.top_tokens)))

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

    @property
    def unread_bytes(self) -> int:
        """The memory of what is unread."""
        return self._unread_bytes

    @property
    def has_news(self) -> bool:
        """Whether there is something to read."""
        return bool(self._unread) or self._end is not None

    def read(self) -> tuple[Delivery, ...] | StreamEnd:
        """Take the next portion, if there is one. Unread tokens come before the end of the stream."""
        if not self._unread and self._end is not None:
            return self._end
        portion: list[Delivery] = []
        room = self._portion
        for choice, delivery in list(self._unread.items()):
            if len(delivery.tokens) > room:
                portion.append(delivery.split(room))
                break
            portion.append(self._unread.pop(choice))
            room -= len(delivery.tokens)
            if room <= 0:
                break
        self._unread_bytes -= sum(delivery.num_bytes for delivery in portion)
        return tuple(portion)

    async def take(self) -> tuple[Delivery, ...] | StreamEnd:
        """Wait until there is something to read, and take the next portion of it."""
        while not self.has_news:
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
