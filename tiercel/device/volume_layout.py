"""The number of slots that fit a capacity on disk, and the disk space that a number of slots needs."""

from dataclasses import dataclass

from tiercel.device.journal_format import journal_bytes
from tiercel.device.volume_format import ALIGN, MAX_SLOTS, slot_bytes

# Bytes of a folder in addition to the slots: superblock, lock file, directory and the file system's first blocks.
_FOLDER_BYTES = 2 * ALIGN + 16 * ALIGN
# Bytes per slot of the file system's extent map: at most one extent per slot, in half-full leaves.
_EXTENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class VolumeLayout:
    """The number of slots that fit a capacity."""

    slots: int  # of all folders, the same number in each
    total_bytes: int  # upper limit of everything in the folders


def total_bytes(slots: int, stripes: int, block_bytes: int) -> int:
    """Return the maximum bytes of a volume and its journal, including the second journal during a rewrite."""
    fixed = stripes * _FOLDER_BYTES + 2 * journal_bytes(slots)
    return fixed + slots * (slot_bytes(block_bytes) + _EXTENT_BYTES)


def fit_layout(capacity_bytes: int, stripes: int, block_bytes: int) -> VolumeLayout | None:
    """Return the largest layout that fits, or None if one slot per folder does not."""
    each = capacity_bytes // (stripes * slot_bytes(block_bytes))
    each = min(each, MAX_SLOTS // stripes)
    low, high = 0, each
    while low < high:
        middle = (low + high + 1) // 2
        if total_bytes(middle * stripes, stripes, block_bytes) <= capacity_bytes:
            low = middle
        else:
            high = middle - 1
    return VolumeLayout(low * stripes, total_bytes(low * stripes, stripes, block_bytes)) if low else None
