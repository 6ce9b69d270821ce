"""Which unreferenced copy goes first when room is needed."""

from array import array
from collections.abc import Iterator

_ENDS = 0  # slot 0 is the sink and never cached: it stands for both ends of the list


class LeastRecent:
    """Slots in the order of their last release, oldest first.

    A doubly linked list inside two arrays: a slot leaves from the middle in O(1), no object exists per slot, and
    because undo runs in exact reverse, a slot returns to its exact place by the neighbour it had.
    """

    def __init__(self, slots: int) -> None:
        self._next = array("i", bytes(4 * slots))
        self._previous = array("i", bytes(4 * slots))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Slots, first victim first."""
        slot = self._next[_ENDS]
        while slot != _ENDS:
            yield slot
            slot = self._next[slot]

    @property
    def first(self) -> int | None:
        """The next victim."""
        return self._next[_ENDS] or None

    def add(self, slot: int) -> None:
        """A copy became unreferenced: it is the last to go."""
        self.restore(slot, self._previous[_ENDS])

    def remove(self, slot: int) -> int:
        """A copy is referenced again, or evicted. Returns its place, for `restore`."""
        before, behind = self._previous[slot], self._next[slot]
        self._next[before] = behind
        self._previous[behind] = before
        self._count -= 1
        return before

    def restore(self, slot: int, place: int) -> None:
        """Put a slot back to the place that `remove` took it from."""
        behind = self._next[place]
        self._next[place] = self._previous[behind] = slot
        self._previous[slot] = place
        self._next[slot] = behind
        self._count += 1
