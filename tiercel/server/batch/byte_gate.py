"""The memory of what several tasks work on at a time, limited over all of them."""

import asyncio
from collections import deque


class ByteGate:
    """Lets tasks pass in the order of their arrival, as long as the bytes of all that have passed keep a limit.

    One that is larger than the limit passes alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.held_bytes = 0

    async def enter(self, size: int) -> None:
        """Wait until so many bytes have room, and take them; `leave` gives them back."""
        if not self._waiting and self._has_room(size):
            self.held_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            else:
                self._waiting.remove((size, turn))
                self._admit()
            raise

    def leave(self, size: int) -> None:
        """Give the bytes of a task back."""
        self.held_bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self.held_bytes += size
            turn.set_result(None)

    def _has_room(self, size: int) -> bool:
        return not self.held_bytes or self.held_bytes + size <= self._limit_bytes
