"""Counters that tell a reader who remembers a slot that the slot has changed since."""

from array import array

from tiercel.kvcache.slot_index import SlotIndex, Slots, as_index, view


class SlotVersions:
    """Two counters for each slot of a tier, and one for all of them.

    A slot's *stamp* counts up when the slot loses its copy, and when something about the copy changes in another tier.
    A slot's *life* counts up only when the slot loses its copy: the same life means the same copy.
    """

    def __init__(self, slots: int) -> None:
        self.num_changes = 0  # as long as this is the same, no stamp has changed
        self._stamps, self._lives = array("q", bytes(8 * slots)), array("q", bytes(8 * slots))
        self.stamps, self.lives = view(self._stamps), view(self._lives)

    def stamp(self, slot: int) -> int:
        """Return the stamp of one slot."""
        return self._stamps[slot]

    def life(self, slot: int) -> int:
        """Return the life of one slot."""
        return self._lives[slot]

    def change(self, slot: int) -> None:
        """Note that something about the slot's copy has changed in another tier."""
        self._stamps[slot] += 1
        self.num_changes += 1

    def change_many(self, slots: Slots | SlotIndex) -> None:
        """Note that something about the copies of these slots has changed in another tier."""
        as_index(slots).add(self.stamps, 1)
        self.num_changes += 1

    def end(self, slot: int) -> None:
        """Note that the slot has lost its copy."""
        self._stamps[slot] += 1
        self._lives[slot] += 1
        self.num_changes += 1

    def end_many(self, index: SlotIndex) -> None:
        """Note that these slots have lost their copies."""
        index.add(self.stamps, 1)
        index.add(self.lives, 1)
        self.num_changes += 1
