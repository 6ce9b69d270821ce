"""Relief when the device is out of memory: smaller forwards, and larger ones again later. Imports no torch."""

import logging
from collections.abc import Callable, Sequence

from tiercel.errors import OutOfDeviceMemoryError
from tiercel.plan import NanoBatch
from tiercel.scheduler.planner import Planner

log = logging.getLogger(__name__)

NO_MEMORY = "the device has no memory for this request, even alone and one token at a time"

# A try that fails voids its step and the one behind it: 2 in 64 are 3 % of the steps, while a spike of a moment is over
# within seconds.
_PATIENCE_STEPS = 64
_MOST_PATIENCE_STEPS = 4096  # where memory stays short, such tries cost nothing that could be measured
_TRIES = 2  # at one token: memory was given back in between


class MemoryRelief:
    """How many tokens a forward may compute while memory is short.

    What a step takes beside weights and KV grows with the tokens of its largest nano-batch. After a step that ran out
    of memory that number is halved. Nobody is preempted: the KV pool was taken as a whole at the start, so it would
    free nothing, and those that decode go on in several nano-batches. After `_PATIENCE_STEPS` good steps it doubles,
    up to what the operator said; a try that fails doubles the patience.
    """

    def __init__(self, planner: Planner, give_back: Callable[[], None] = lambda: None) -> None:
        self.num_shortages = 0  # since start
        self._planner = planner
        self._give_back = give_back  # memory that is cached and not in use
        self._most_tokens: int | None = None
        self._patience = _PATIENCE_STEPS
        self._good_steps = 0  # since the last change
        self._failures = 0  # in a row
        self._is_on_trial = False  # the last change was for more

    @property
    def most_tokens(self) -> int | None:
        """Of a nano-batch; None: as many as the operator allows."""
        return self._most_tokens

    def shrink(self, step: int, batches: Sequence[NanoBatch], error: OutOfDeviceMemoryError) -> bool:
        """This step ran out of memory. False: what was in it may be to blame, as no forward can be smaller."""
        self.num_shortages += 1
        self._give_back()
        most = self._planner.limits.max_num_batched_tokens
        before = most if self._most_tokens is None else self._most_tokens
        tokens = max(sum(piece.length for piece in batch.slices) for batch in batches)
        # A larger one was launched before the last halving, and says nothing new.
        after = before if tokens > before else max(1, tokens // 2)
        if self._is_on_trial:
            self._patience = min(2 * self._patience, _MOST_PATIENCE_STEPS)
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
        return self._failures < _TRIES

    def step_ended(self) -> None:
        """A step had the memory it needed."""
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
        """The shortage was one request's, which is gone."""
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
