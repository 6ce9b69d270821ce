"""Which unreferenced copy goes first when room is needed."""

import heapq
from collections.abc import Iterator


class LeastRecent:
    """Slots in the order of their last release, oldest first.

    A heap with lazy deletion: entries of slots that were taken back meanwhile are skipped when they surface, so a
    slot leaves from the middle at no cost and returns to its exact place (`restore`), which undo needs.
    """

    def __init__(self, slots: int) -> None:
        self._heap: list[tuple[int, int]] = []
        self._stamp_by_slot: dict[int, int] = {}
        self._next_stamp = 1
        self._compact_above = 4 * slots + 64

    def __len__(self) -> int:
        return len(self._stamp_by_slot)

    def __iter__(self) -> Iterator[int]:
        """Slots, first victim first."""
        return iter(sorted(self._stamp_by_slot, key=self._stamp_by_slot.__getitem__))

    def add(self, slot: int) -> None:
        """A copy became unreferenced: it is the last to go."""
        self.restore(slot, self._next_stamp)
        self._next_stamp += 1

    def restore(self, slot: int, stamp: int) -> None:
        """Put a slot back to the place that `remove` or `pop` took it from."""
        self._stamp_by_slot[slot] = stamp
        heapq.heappush(self._heap, (stamp, slot))
        if len(self._heap) > self._compact_above:
            self._heap = [(stamp, slot) for slot, stamp in self._stamp_by_slot.items()]
            heapq.heapify(self._heap)

    def remove(self, slot: int) -> int:
        """A copy is referenced again. Returns its stamp, for `restore`."""
        return self._stamp_by_slot.pop(slot)

    def pop(self) -> tuple[int, int]:
        """The next victim and its stamp. Errors: IndexError when there is none."""
        while True:
            stamp, slot = heapq.heappop(self._heap)
            if self._stamp_by_slot.get(slot) == stamp:
                del self._stamp_by_slot[slot]
                return slot, stamp
