"""Work that is cancelled when its client disconnects."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection."""


class SlowReaderError(Exception):
    """The client does not read its answer."""


_LINGER_S = 1.0  # maximum time to read the rest of a refused body


async def linger(receive: Receive) -> None:
    """Read the rest of the body for up to 1 s: closing a connection with unread data resets it and loses the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            more = True
            while more:
                more = (await receive()).get("more_body", False)


async def run_watched(
    work: Coroutine[Any, Any, T],  # Any: what a coroutine yields and receives is asyncio's concern
    receive: Receive,
    overflow: asyncio.Event | None = None,
) -> T:
    """Run `work`; cancel it as soon as the client disconnects or `overflow` is set.

    The body must have been read: further messages of `receive` are dropped.
    Errors: ClientGoneError, SlowReaderError, and those of `work`.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    watchers: list[asyncio.Future[Any]] = [gone]  # Any: their results are not used
    if overflow is not None:
        watchers.append(asyncio.ensure_future(overflow.wait()))
    try:
        await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError if gone.done() else SlowReaderError
    finally:
        for future in (task, *watchers):
            future.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
