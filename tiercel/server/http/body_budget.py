"""The memory of request bodies that are not admitted yet, limited over all connections."""

import asyncio
import contextlib
from collections.abc import Callable, Generator

from tiercel.values.errors import AdmissionError

_RETRY_S = 2  # a body arrives and is read within about this time on a fast connection


class BodyHolding:
    """The bytes that one request holds in a `BodyBudget`: those that arrived, and the values made of them."""

    def __init__(self, budget: "BodyBudget", owner: str) -> None:
        self._budget = budget
        self._task: asyncio.Task[object] | None = None  # while the request may be displaced
        self._is_displaced = False
        self.owner = owner
        self.bytes = 0

    @property
    def can_be_displaced(self) -> bool:
        """Whether the request waits for its client or for the engine, and may be ended to make room."""
        return self._task is not None

    def grow(self, more_bytes: int) -> None:
        """Hold more. Errors: AdmissionError (503) if there is no room and nobody holds more than this request."""
        self.resize(self.bytes + more_bytes)

    def resize(self, new_bytes: int) -> None:
        """Hold so many bytes from now on. Errors: as of `grow`; then nothing has changed."""
        self._budget.resize(self, new_bytes)

    @contextlib.contextmanager
    def displaceable(self) -> Generator[None]:
        """Allow the end of this request while the block waits. Errors: AdmissionError (503) if that happened."""
        task = self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            # As in asyncio.timeout: a cancellation by somebody else, at the same time, stays a cancellation.
            if self._is_displaced and task is not None and task.uncancel() == 0:
                raise bodies_full() from None
            raise
        finally:
            self._task = None

    def displace(self) -> None:
        """End the request, which `can_be_displaced`."""
        assert self._task is not None
        self._is_displaced = True
        self._task.cancel()
        self._task = None


class BodyBudget:
    """The bytes of all bodies that are not admitted yet, with a limit.

    Bytes count when they arrive, not when they are declared. If the limit would be exceeded, the request gives way that
    holds most among those of the owner that holds most, the newest one if several are equal: a small request of a
    client that holds little always finds room, whatever others hold. A request whose body is being decoded or
    tokenised is not ended, because the memory would stay in use.
    """

    def __init__(self, limit_bytes: Callable[[], int], on_refused: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._on_refused = on_refused
        self._holdings: dict[BodyHolding, None] = {}  # in order of arrival
        self._bytes_by_owner: dict[str, int] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that are held now."""
        return self._held_bytes

    @contextlib.contextmanager
    def hold(self, owner: str) -> Generator[BodyHolding]:
        """Return the holding of one request, empty at first; its bytes are released at the end of the block."""
        holding = BodyHolding(self, owner)
        self._holdings[holding] = None
        try:
            yield holding
        finally:
            self._release(holding)

    def resize(self, holding: BodyHolding, new_bytes: int) -> None:
        """Change the bytes of a holding. A single request may exceed the limit if nothing else is held.

        Errors: AdmissionError (503); then nothing has changed.
        """
        more_bytes = new_bytes - holding.bytes
        if more_bytes > 0:
            self._make_room(holding, more_bytes)
        self._add(holding, more_bytes)

    def _make_room(self, asking: BodyHolding, more_bytes: int) -> None:
        while self._held_bytes + more_bytes > max(self._limit_bytes(), asking.bytes + more_bytes):
            largest = self._largest(asking, more_bytes)
            self._on_refused()
            if largest is asking:
                raise bodies_full()
            largest.displace()
            self._release(largest)

    def _largest(self, asking: BodyHolding, more_bytes: int) -> BodyHolding:
        """Return the request that gives way: `asking`, with the bytes it asks for, or one that can be displaced."""

        def order(item: tuple[int, BodyHolding]) -> tuple[int, int, int]:
            number, one = item
            owned = self._bytes_by_owner.get(one.owner, 0) + (more_bytes if one.owner == asking.owner else 0)
            return owned, one.bytes + (more_bytes if one is asking else 0), number

        candidates = [
            (number, one)
            for number, one in enumerate(self._holdings)
            if one is asking or (one.can_be_displaced and one.bytes)
        ]
        return max(candidates, key=order)[1]

    def _release(self, holding: BodyHolding) -> None:
        if holding in self._holdings:  # not displaced
            del self._holdings[holding]
            self._add(holding, -holding.bytes)

    def _add(self, holding: BodyHolding, more_bytes: int) -> None:
        holding.bytes += more_bytes
        self._held_bytes += more_bytes
        owned = self._bytes_by_owner.get(holding.owner, 0) + more_bytes
        if owned:
            self._bytes_by_owner[holding.owner] = owned
        else:
            self._bytes_by_owner.pop(holding.owner, None)


def bodies_full() -> AdmissionError:
    """Return the refusal of a body for which there is no memory."""
    return AdmissionError(
        503,
        "The server holds too many request bodies that it has not processed. Please try again later.",
        code="overloaded",
        kind="server_error",
        retry_after_s=_RETRY_S,
    )
