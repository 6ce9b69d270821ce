"""What the sequences of one tenant hold of the device tier: a block that several share counts once."""

from collections.abc import Iterable


class Holding:
    """Slots in the tables of one tenant. Written by those tables; its quota by the OwnerBook."""

    __slots__ = ("_tables_by_slot", "most_blocks")

    def __init__(self) -> None:
        self.most_blocks: int | None = None  # the quota; None: as many as there are
        self._tables_by_slot: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tables_by_slot)

    def num_tables(self, slot: int) -> int:
        """How many tables of the tenant hold the slot."""
        return self._tables_by_slot.get(slot, 0)

    def add(self, slots: Iterable[int]) -> None:
        """A table holds these slots from now on."""
        tables = self._tables_by_slot
        for slot in slots:
            tables[slot] = tables.get(slot, 0) + 1

    def remove(self, slots: Iterable[int]) -> None:
        """A table does not hold these slots any more."""
        tables = self._tables_by_slot
        for slot in slots:
            if tables[slot] > 1:
                tables[slot] -= 1
            else:
                del tables[slot]

    def is_same(self, other: "Holding") -> bool:
        """Both count the same tables."""
        return self._tables_by_slot == other._tables_by_slot


class HoldingDraft:
    """What a tenant would hold if the plan were sealed now."""

    __slots__ = ("_change_by_slot", "_holding", "blocks")

    def __init__(self, holding: Holding) -> None:
        self.blocks = len(holding)  # the planner's takings, whose slots nobody knows yet, are added to it
        self._holding = holding
        self._change_by_slot: dict[int, int] = {}

    def shift(self, slots: Iterable[int], change: int) -> None:
        """One table more or less (`change` is 1 or -1) would hold each of these slots."""
        changes, num_tables = self._change_by_slot, self._holding.num_tables
        for slot in slots:
            earlier = changes.get(slot, 0)
            before = num_tables(slot) + earlier
            changes[slot] = earlier + change
            self.blocks += (before + change > 0) - (before > 0)
