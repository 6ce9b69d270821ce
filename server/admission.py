"""Who may come in: a finite queue, refused before any work is done for a request."""

import contextlib
import math
from collections.abc import Generator
from typing import Protocol

from tiercel.clock import Clock
from tiercel.errors import AdmissionError

SHUTTING_DOWN = "shutting_down"
_SAMPLE_S = 1.0
_SMOOTHING = 0.3
_MAX_RETRY_S = 60
_UNKNOWN_RETRY_S = 2


class Queue(Protocol):
    """What admission must know of the engine's queue."""

    @property
    def num_tokenless(self) -> int: ...

    @property
    def num_started(self) -> int: ...


class RejectionCounter(Protocol):
    """Who counts refusals."""

    def on_rejected(self, reason: str) -> None: ...


class Admission:
    """Counts sequences without a first token: those at the engine and those still being tokenised."""

    def __init__(self, queue: Queue, counter: RejectionCounter, clock: Clock, *, max_queued: int) -> None:
        self._queue = queue
        self._counter = counter
        self._clock = clock
        self._max_queued = max_queued
        self._reserved = 0
        self._is_closed = False
        self._sampled_s = clock.now_s()
        self._sampled_started = 0
        self._started_per_s = 0.0

    @property
    def is_closed(self) -> bool:
        """True from the first signal on: the server drains."""
        return self._is_closed

    @property
    def num_reserved(self) -> int:
        """Sequences that are admitted and not yet submitted."""
        return self._reserved

    def close(self) -> None:
        """Refuse everything from now on."""
        self._is_closed = True

    @contextlib.contextmanager
    def reserve(self, choices: int = 1, *, prompts: int = 1) -> Generator[None]:
        """Hold places for `choices` of each prompt until they are submitted, or the request has failed.

        Errors: AdmissionError: 503 with Retry-After, or 400 for more sequences than the whole queue holds.
        """
        sequences = choices * prompts
        self._sample_rate()
        if self._is_closed:
            self._counter.on_rejected(SHUTTING_DOWN)
            raise shutting_down()
        if sequences > self._max_queued:
            raise _never_fits(choices, prompts, self._max_queued)
        queued = self._queue.num_tokenless + self._reserved
        if queued + sequences > self._max_queued:
            self._counter.on_rejected("queue_full")
            raise AdmissionError(
                503,
                "The engine is currently busy and cannot accept new requests. Please try again later.",
                code="overloaded",
                kind="server_error",
                retry_after_s=self._retry_after_s(queued + sequences - self._max_queued),
            )
        self._reserved += sequences
        try:
            yield
        finally:
            self._reserved -= sequences

    def _sample_rate(self) -> None:
        """Follow how many sequences a second leave the queue."""
        now_s, started = self._clock.now_s(), self._queue.num_started
        elapsed_s = now_s - self._sampled_s
        if elapsed_s < _SAMPLE_S:
            return
        rate = (started - self._sampled_started) / elapsed_s
        self._started_per_s += _SMOOTHING * (rate - self._started_per_s) if self._started_per_s else rate
        self._sampled_s, self._sampled_started = now_s, started

    def _retry_after_s(self, excess: int) -> float:
        if self._started_per_s <= 0:
            return _UNKNOWN_RETRY_S
        return min(max(math.ceil(excess / self._started_per_s), 1), _MAX_RETRY_S)


def _never_fits(choices: int, prompts: int, max_queued: int) -> AdmissionError:
    """The refusal of a request that no waiting would help."""
    return AdmissionError(
        400,
        f"This request asks for {choices * prompts} sequences (n={choices} for each of {prompts} prompts), but the"
        f" queue of this server holds {max_queued}. Please reduce n or the number of prompts.",
        param="n" if choices > 1 else "prompt",
    )


def shutting_down() -> AdmissionError:
    """The refusal of a server that drains."""
    return AdmissionError(
        503,
        "The server is shutting down and takes no new requests.",
        code=SHUTTING_DOWN,
        kind="server_error",
        retry_after_s=5,
    )
