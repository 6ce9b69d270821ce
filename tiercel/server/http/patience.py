"""Sending to clients that read slowly."""

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send

from tiercel.server.http.watch import SlowReaderError

PATIENCE_S = 60.0
"""Time after which a client that takes no byte of its answer is a slow reader."""

_CHECKS_PER_LIMIT = 8


class PatientSender:
    """ASGI's `send`, which waits for a client as long as it takes some bytes every `patience_s`.

    `unsent_bytes` returns the bytes that the kernel has not taken over yet; None if they are not known: then each
    message has `patience_s`.
    """

    def __init__(self, send: Send, unsent_bytes: Callable[[], int] | None, patience_s: float) -> None:
        self._send = send
        self._unsent_bytes = unsent_bytes
        self._patience_s = patience_s

    async def __call__(self, message: Message) -> None:
        """Send a message. Errors: SlowReaderError."""
        loop = asyncio.get_running_loop()
        interval_s, unsent_bytes = self._patience_s / _CHECKS_PER_LIMIT, self._unsent_bytes
        try:
            async with asyncio.timeout(self._patience_s) as limit:
                if unsent_bytes is None:
                    await self._send(message)
                    return
                least = unsent_bytes()

                def check() -> None:
                    nonlocal least, timer
                    now = unsent_bytes()
                    if now < least:
                        least = now
                        limit.reschedule(loop.time() + self._patience_s)
                    timer = loop.call_later(interval_s, check)

                timer = loop.call_later(interval_s, check)
                try:
                    await self._send(message)
                finally:
                    timer.cancel()
        except TimeoutError as exc:
            raise SlowReaderError from exc
