"""Runs of neighbouring slots that are copied between two arenas as one."""

from collections import deque
from collections.abc import Sequence

from tiercel.device.extents import Extents
from tiercel.kvcache.store.arena import Arena
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SlotId

CopyRun = tuple[int, int, int]
"""Source slot, target slot, blocks. The slots are neighbours on both sides, so that one copy moves them all."""


def merge_runs(
    sources: Sequence[SlotId], targets: Sequence[SlotId], source_slab: int = 0, target_slab: int = 0
) -> deque[CopyRun]:
    """Merge pairs of slots into runs that are as long as possible.

    A run ends before a slot that is a multiple of its side's slab, because slabs are locked apart; 0: no slabs.
    """
    runs: deque[CopyRun] = deque()
    for source, target in sorted(zip(sources, targets, strict=True)):
        begins_slab = (source_slab and not source % source_slab) or (target_slab and not target % target_slab)
        if runs and not begins_slab and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def cut_runs(runs: deque[CopyRun], maximum: int) -> list[CopyRun]:
    """Remove runs of up to `maximum` blocks from the front and return them."""
    piece: list[CopyRun] = []
    while runs and maximum:
        source, target, blocks = runs.popleft()
        taken = min(blocks, maximum)
        maximum -= taken
        piece.append((source, target, taken))
        if taken < blocks:
            runs.appendleft((source + taken, target + taken, blocks - taken))
    return piece


def check_slots(arena: Arena, slots: Sequence[SlotId]) -> None:
    """Check that these are slots for blocks: a copy to another slot would hit other memory. Errors: InvariantError."""
    if slots and not 0 < min(slots) <= max(slots) <= arena.blocks:
        raise InvariantError("mover.slots", lowest=min(slots), highest=max(slots), blocks=arena.blocks)


def extents_of(source: Arena, target: Arena, runs: Sequence[CopyRun]) -> Extents:
    """Return the extents in memory of these runs, for a copy lane."""
    return Extents.of_runs(runs, source.kv.data_ptr(), target.kv.data_ptr(), source.spec.block_bytes)
