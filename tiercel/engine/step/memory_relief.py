"""Smaller forwards while the device is short of memory, and larger ones again later. Imports no torch."""

import logging
from collections.abc import Callable, Sequence

from tiercel.scheduler.planner import Planner
from tiercel.values.errors import OutOfDeviceMemoryError
from tiercel.values.plan import NanoBatch

log = logging.getLogger(__name__)

NO_MEMORY = "the device has no memory for this request, even alone and one token at a time"

# A failed attempt voids its step and the step launched after it: 2 of 64 are 3 % of the steps, and a short spike of
# memory use is over within seconds.
_PATIENCE_STEPS = 64
_MAX_PATIENCE_STEPS = 4096  # if memory stays short, so few attempts have no measurable cost
_ATTEMPTS = 2  # with one token; cached memory is given back between the two


class MemoryRelief:
    """Limits the tokens of a forward while device memory is short.

    The memory of a step, beside weights and KV, grows with the tokens of its largest nano-batch. After a step that ran
    out of memory this limit is halved. No sequence is preempted: the KV pool was allocated as a whole at the start, so
    a preemption would free no memory, and decoding goes on in several nano-batches. After 64 good steps the limit is
    doubled, up to the configured token budget; an attempt that fails doubles the number of steps.
    """

    def __init__(self, planner: Planner, give_back: Callable[[], None] = lambda: None) -> None:
        self.num_shortages = 0  # since start
        self._planner = planner
        self._give_back = give_back  # frees memory that is cached and not in use
        self._most_tokens: int | None = None
        self._patience = _PATIENCE_STEPS
        self._good_steps = 0  # since the last change of the limit
        self._failures = 0  # in a row, with one token
        self._is_on_trial = False  # the last change raised the limit

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of a nano-batch; None if only the configured budget applies."""
        return self._most_tokens

    def shrink(self, step: int, batches: Sequence[NanoBatch], error: OutOfDeviceMemoryError) -> bool:
        """Lower the limit after a step that ran out of memory.

        Return False if no forward can be smaller; the sequences of the step may then be the cause.
        """
        self.num_shortages += 1
        self._give_back()
        most = self._planner.limits.max_num_batched_tokens
        before = most if self._most_tokens is None else self._most_tokens
        tokens = max(sum(piece.length for piece in batch.slices) for batch in batches)
        # A larger nano-batch was launched before the last halving: its failure is no new information.
        after = before if tokens > before else max(1, tokens // 2)
        if self._is_on_trial:
            self._patience = min(2 * self._patience, _MAX_PATIENCE_STEPS)
        self._is_on_trial = False
        self._good_steps = 0
        self._failures = self._failures + 1 if tokens == 1 else 0
        self._cap(after)
        log.warning(
            "out of device memory step=%d nano_batch_tokens=%d most_tokens_before=%d most_tokens_after=%d error=%s",
            step,
            tokens,
            before,
            after,
            error,
        )
        return self._failures < _ATTEMPTS

    def step_ended(self) -> None:
        """Count a step that had enough memory, and raise the limit after enough of them."""
        self._failures = 0
        if self._most_tokens is None and not self._is_on_trial:
            return
        self._good_steps += 1
        if self._good_steps < self._patience:
            return
        self._good_steps = 0
        if self._most_tokens is None:
            self._is_on_trial = False
            self._patience = _PATIENCE_STEPS
        else:
            self._is_on_trial = True
            self._cap(2 * self._most_tokens)

    def clear(self) -> None:
        """Remove the limit: the shortage was caused by one request, which has ended."""
        self._good_steps = self._failures = 0
        self._is_on_trial = False
        self._cap(None)

    def _cap(self, tokens: int | None) -> None:
        most = self._planner.limits.max_num_batched_tokens
        is_whole = tokens is None or tokens >= most
        if is_whole and self._most_tokens is not None:
            log.info("device memory suffices again most_tokens=%d", most)
        self._most_tokens = None if is_whole else tokens
        self._planner.cap_forwards(self._most_tokens)
