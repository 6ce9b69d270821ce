"""The experts that are in memory: slots, the choice of the expert that is evicted, and the threads that fetch.

The thread that computes asks for the experts of one layer at a time. An expert that it uses, that is being fetched, or
that is predicted for the next layer keeps its slot. Among the others, the one with the fewest uses is evicted, where
a use counts half as much after some hundred forwards.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from tiercel.engine.experts.slots import ExpertSlots
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceLostError
from tiercel.values.outcome import ExpertGauges

_HALF_LIFE = 512  # forwards after which a use counts half as much
_MOST_WEIGHT = 1e100  # of a use, before all scores are made smaller
_NONE = -1
_EMPTY = -1.0  # the score of a slot without an expert


class ExpertCache:
    """A fixed number of slots in memory for the records of a store. One thread takes experts, others fetch them."""

    def __init__(
        self,
        slots: ExpertSlots,
        layers: int,
        clock: Clock,
        *,
        threads: int = 2,
        fetches_ahead: bool = True,
    ) -> None:
        """`layers`: the number of layers that take experts in a forward. `fetches_ahead`: whether predictions count."""
        self._slots = slots
        self._clock = clock
        self._growth = 2.0 ** (1 / (_HALF_LIFE * max(1, layers)))
        self._fetches_ahead = fetches_ahead
        self._lock = threading.Lock()
        self._asked = threading.Condition(self._lock)  # there is something to fetch
        self._landed = threading.Condition(self._lock)  # something was fetched
        self._slot_by_key = [_NONE] * slots.num_records
        self._is_ready = bytearray(slots.num_records)
        self._key_by_slot = [_NONE] * slots.num_slots
        self._scores = np.zeros(slots.num_records)
        self._slot_scores = [_EMPTY] * slots.num_slots  # of the expert in each slot
        self._pins = [0] * slots.num_slots
        self._evictable = np.full(slots.num_slots, _EMPTY)  # the scores of slots without pins; infinite for others
        self._weight = 1.0  # of a use now
        self._now: deque[int] = deque()  # to fetch for the layer that computes
        self._ahead: deque[int] = deque()  # to fetch for the next one
        self._predicted: list[int] = []  # experts that keep their slots for the next layer
        self._failure: Exception | None = None
        self._is_closed = False
        self._hits = self._misses = self._num_ahead = self._evictions = self._stalls = self._bytes = 0
        self._stall_s = 0.0
        self._threads = [
            threading.Thread(target=self._fetch_all, name=f"experts-{index}", daemon=True) for index in range(threads)
        ]

    def start(self) -> None:
        """Start the threads that fetch."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. No thread may take experts any more."""
        with self._lock:
            self._is_closed = True
            self._asked.notify_all()
        for thread in self._threads:
            thread.join()

    def gauges(self) -> ExpertGauges:
        """Return the counters since the start; may be called from any thread."""
        with self._lock:
            return ExpertGauges(
                experts=len(self._slot_by_key),
                slots=len(self._key_by_slot),
                memory_bytes=len(self._key_by_slot) * self._slots.slot_bytes,
                hits=self._hits,
                misses=self._misses,
                fetched_ahead=self._num_ahead,
                fetched_bytes=self._bytes,
                evictions=self._evictions,
                stalls=self._stalls,
                stall_s=self._stall_s,
            )

    def take(self, wanted: Sequence[int], ahead: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Yield (record, slot) for each of the wanted records, in the order in which they are in memory.

        A record stays in its slot at least until the next one is asked for. More records than slots pass through them
        in turn.
        `ahead`: records that the next call is likely to want, the likeliest first; they are fetched meanwhile.

        Errors: DeviceLostError if a record cannot be read, now or earlier.
        """
        ready: deque[int] = deque()
        waiting: set[int] = set()  # records that have a slot and are being fetched
        absent: deque[int] = deque()
        try:
            with self._lock:
                self._start_layer(wanted, ready, waiting, absent)
                self._fetch(absent, waiting)
                if not absent:
                    self._predict(ahead)
            while ready or waiting or absent:
                if not ready:
                    self._wait(ready, waiting, absent)
                for key in ready:
                    yield key, self._slot_by_key[key]
                self._slots.release([self._slot_by_key[key] for key in ready])
                with self._lock:
                    self._unpin(ready)
                    if absent:
                        self._fetch(absent, waiting)
                        if not absent:
                            self._predict(ahead)
        finally:
            if ready:
                self._slots.release([self._slot_by_key[key] for key in ready])
            with self._lock:
                self._unpin(ready)
                self._unpin(deque(waiting))

    def _start_layer(self, wanted: Sequence[int], ready: deque[int], waiting: set[int], absent: deque[int]) -> None:
        """Pin the wanted records that have a slot, count uses, and give up predictions that were wrong."""
        self._weight *= self._growth
        if self._weight > _MOST_WEIGHT:
            self._scores /= self._weight
            self._slot_scores = [_EMPTY if key == _NONE else float(self._scores[key]) for key in self._key_by_slot]
            self._evictable = np.where(self._pins, np.inf, self._slot_scores)
            self._weight = 1.0
        for key in wanted:
            self._scores[key] += self._weight
            slot = self._slot_by_key[key]
            if slot == _NONE:
                absent.append(key)
                continue
            self._slot_scores[slot] = float(self._scores[key])
            self._pin(slot)
            if self._is_ready[key]:
                ready.append(key)
            else:
                waiting.add(key)
        self._hits += len(ready)
        self._misses += len(waiting) + len(absent)
        self._forget_predictions(waiting)

    def _forget_predictions(self, waiting: set[int]) -> None:
        self._unpin(self._predicted)
        while self._ahead:
            key = self._ahead.popleft()  # nobody fetches it yet
            if key in waiting:
                self._now.append(key)
                continue
            slot = self._slot_by_key[key]
            self._slot_by_key[key] = self._key_by_slot[slot] = _NONE
            self._slot_scores[slot] = self._evictable[slot] = _EMPTY
            self._pins[slot] = 0
        if self._now:
            self._asked.notify_all()

    def _fetch(self, absent: deque[int], waiting: set[int]) -> None:
        """Give slots to absent records, as far as there are some."""
        while absent and (slot := self._free_slot()) is not None:
            key = absent.popleft()
            self._occupy(slot, key)
            self._pin(slot)  # for the caller
            waiting.add(key)
            self._now.append(key)
            self._asked.notify()

    def _predict(self, ahead: Sequence[int]) -> None:
        """Keep the slots of the predicted records that have one, and fetch the others, as far as there are slots."""
        if self._predicted or not self._fetches_ahead:
            return
        self._predicted += [key for key in ahead if self._slot_by_key[key] != _NONE]
        for key in self._predicted:
            self._pin(self._slot_by_key[key])
        for key in ahead:
            if self._slot_by_key[key] != _NONE:
                continue
            slot = self._free_slot()
            if slot is None:
                break
            self._occupy(slot, key)
            self._pin(slot)
            self._predicted.append(key)
            self._ahead.append(key)
            self._num_ahead += 1
            self._asked.notify()

    def _free_slot(self) -> int | None:
        """Return the slot with the lowest score that is not pinned; None if all are."""
        slot = int(self._evictable.argmin())
        return None if self._pins[slot] else slot

    def _pin(self, slot: int) -> None:
        self._pins[slot] += 1
        self._evictable[slot] = np.inf

    def _unpin(self, keys: "deque[int] | list[int]") -> None:
        """Give up one pin of the slot of each record, and clear the list."""
        for key in keys:
            self._unpin_slot(self._slot_by_key[key])
        keys.clear()

    def _unpin_slot(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            self._evictable[slot] = self._slot_scores[slot]

    def _occupy(self, slot: int, key: int) -> None:
        """Give a slot to a record that will be fetched, and pin it for that time."""
        old = self._key_by_slot[slot]
        if old != _NONE:
            self._slot_by_key[old] = _NONE
            self._is_ready[old] = 0
            self._evictions += 1
        self._slot_by_key[key], self._key_by_slot[slot] = slot, key
        self._slot_scores[slot] = float(self._scores[key])
        self._pins[slot], self._evictable[slot] = 1, np.inf

    def _wait(self, ready: deque[int], waiting: set[int], absent: deque[int]) -> None:
        """Wait until one of the records is there."""
        start_s = self._clock.now_s()
        with self._landed:
            while not (landed := [key for key in waiting if self._is_ready[key]]):
                if self._failure is not None:
                    raise DeviceLostError("experts.unreadable", str(self._failure)) from self._failure
                if not waiting:  # predictions hold every slot that this layer needs
                    self._forget_predictions(waiting)
                    self._fetch(absent, waiting)
                    if waiting:
                        continue
                self._landed.wait()
                self._fetch(absent, waiting)
            self._stalls += 1
            self._stall_s += self._clock.now_s() - start_s
            ready.extend(landed)
            waiting.difference_update(landed)

    def _fetch_all(self) -> None:
        """Fetch what is asked for: the body of a thread."""
        while True:
            with self._asked:
                while not (self._now or self._ahead or self._is_closed):
                    self._asked.wait()
                if self._is_closed:
                    return
                key = self._now.popleft() if self._now else self._ahead.popleft()
                slot = self._slot_by_key[key]
            failure: Exception | None = None
            fetched = 0
            try:
                fetched = self._slots.fetch(key, slot)
            except (DeviceLostError, OSError, ValueError) as exc:
                failure = exc
            with self._landed:
                if failure is None:
                    self._is_ready[key] = 1
                    self._bytes += fetched
                    self._unpin_slot(slot)
                else:
                    self._failure = failure
                self._landed.notify_all()
