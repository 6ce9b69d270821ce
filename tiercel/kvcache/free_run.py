"""Runs of consecutive free slots: a table or a transfer in few runs is moved by few large copies."""

import numpy as np

from tiercel.kvcache.slot_index import SlotIndex, Slots, view
from tiercel.values.errors import InvariantError

_SEARCH_SLOTS = 1 << 17  # that one search for a run looks at: well under 1 ms

SlotRun = tuple[int, int]
"""First slot and length."""


class FreeRunSearch:
    """Finds runs of free slots for a pool and sets their states in its array to taken. A free slot's state is 0.

    A search goes on where the last one ended, so that fresh tables do not fill the headroom of the tables before.
    """

    def __init__(self, states: bytearray, taken_state: int) -> None:
        self.cursor = 1
        self._states = states
        self._all_states = view(states)
        self._taken = bytes([taken_state])

    def take(self, count: int, near: int | None, headroom: int) -> list[SlotRun]:
        """Take `count` free slots: first the slots that continue `near`, then the largest runs.

        Errors: InvariantError if there are too few free slots.
        """
        found: list[SlotRun] = []
        if near is not None and (length := self._length(near + 1, count)):
            found.append(self._mark(near + 1, length))
            count -= length
        size = count + headroom
        if count and headroom and (first := self._find(size)) >= 0:
            found.append(self._mark(first, count))
            self._move(first + size)
            return found
        size = count
        while count:
            size = min(size, count)
            first = self._find(size)
            if first >= 0:
                length = self._length(first, count)
                found.append(self._mark(first, length))
                self._move(first + length)
                count -= length
            elif size > 1:
                size = 1 << ((size - 1).bit_length() - 1)  # the next power of two below
            else:
                raise InvariantError("run.too_few_free", missing=count)
        return found

    def all(self) -> list[int]:
        """Return all free slots as a list. Cost: O(free slots), and a memory scan."""
        free: list[int] = []
        slot = self._states.find(0)
        while slot >= 0:
            free.append(slot)
            slot = self._states.find(0, slot + 1)
        return free

    def take_these(self, slots: list[int], near: int | None) -> list[SlotRun]:
        """Take exactly these free slots: first the slots that continue `near`, then the rest in order."""
        found: list[SlotRun] = []
        if near is not None and (length := self._length(near + 1, len(slots))):
            found.append(self._mark(near + 1, length))
        first = length = 0
        for slot in sorted(slots):
            if self._states[slot]:
                continue  # taken above, because it continues `near`
            if slot == first + length:
                length += 1
                continue
            if length:
                found.append(self._mark(first, length))
            first, length = slot, 1
        if length:
            found.append(self._mark(first, length))
        return found

    def take_many(self, count: int, near: int | None, headroom: int) -> Slots:
        """Take many free slots, where a search for each run would be slow: one run, or else the largest runs."""
        found = np.empty(0, np.intp)
        if near is not None and (length := self._length(near + 1, count)):
            found = self._mark_run(near + 1, length)
            count -= length
        for size in dict.fromkeys((count + headroom, count)):
            if count and (first := self._find(size)) >= 0:
                self._move(first + size)
                return np.concatenate([found, self._mark_run(first, count)])
        if not count:
            return found
        edges = np.flatnonzero(np.diff(self._all_states == 0, prepend=False, append=False))
        firsts: Slots = edges[::2]
        lengths: Slots = edges[1::2] - firsts
        if lengths.sum() < count:
            raise InvariantError("run.too_few_free", missing=count)
        largest = np.argsort(-lengths, kind="stable")
        num_runs = int(np.searchsorted(np.cumsum(lengths[largest]), count)) + 1
        firsts, lengths = firsts[largest[:num_runs]], lengths[largest[:num_runs]]
        # A slot's number is the first of its run plus its distance behind that.
        behind: Slots = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots: Slots = (np.repeat(firsts, lengths) + behind)[:count]
        SlotIndex(slots).write(self._all_states, self._taken[0])
        self._move(int(slots[-1]) + 1)
        return np.concatenate([found, slots])

    def take_all(self, slots: Slots, near: int | None) -> Slots:
        """Do the same as `take_these`, for many slots."""
        slots = np.sort(slots, kind="stable")  # fast where runs of slots come together
        length = 0 if near is None else self._length(near + 1, len(slots))
        if near is not None and length:
            is_next = (slots > near) & (slots <= near + length)
            slots = np.concatenate([slots[is_next], slots[~is_next]])
        SlotIndex(slots).write(self._all_states, self._taken[0])
        return slots

    def every(self) -> Slots:
        """Return all free slots as an array. Cost: a memory scan."""
        return np.flatnonzero(self._all_states == 0)

    def _mark_run(self, first: int, length: int) -> Slots:
        self._mark(first, length)
        return np.arange(first, first + length)

    def _length(self, first: int, maximum: int) -> int:
        """Length of the run that begins at `first`, at most `most`."""
        run = self._states[first : first + maximum]
        return len(run) - len(run.lstrip(b"\0"))

    def _find(self, size: int) -> int:
        """Return the first slot of a free run of `size`; -1 if the search finds none.

        A single slot is found wherever it is, a longer run only within the slots that one search looks at.
        """
        needle, slots = bytes(size), len(self._states)
        end = self.cursor + (slots if size == 1 else _SEARCH_SLOTS)
        first = self._states.find(needle, self.cursor, end)
        if first < 0 and end > slots:
            first = self._states.find(needle, 1, min(end - slots, self.cursor) + size - 1)
        return first

    def _mark(self, first: int, length: int) -> SlotRun:
        self._states[first : first + length] = self._taken * length
        return first, length

    def _move(self, cursor: int) -> None:
        self.cursor = cursor if cursor < len(self._states) else 1
