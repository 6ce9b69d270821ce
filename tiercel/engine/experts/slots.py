"""The stores that hold all experts, and the slots that hold some of them: what differs between devices."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ExpertSlots(Protocol):
    """Memory of the device for a fixed number of experts."""

    @property
    def memory(self) -> Tensor:
        """All slots one after the other, uint8."""
        ...

    @property
    def num_slots(self) -> int: ...
    @property
    def num_records(self) -> int:
        """The number of experts in the store."""
        ...

    @property
    def slot_bytes(self) -> int: ...

    def fetch(self, record: int, slot: int) -> int:
        """Bring an expert into a slot, and wait until it is there. Return its bytes. Called by any thread.

        It does not overtake the uses of the slot that `release` has told of. Errors: DeviceLostError.
        """
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Note that the computing thread has queued its last use of the experts in these slots for now."""
        ...


class ExpertStore(Protocol):
    """All experts of a model: written once, by one thread, then read from any."""

    @property
    def record_bytes(self) -> int:
        """The memory that the largest expert takes in a slot; 0 without experts."""
        ...

    @property
    def num_records(self) -> int: ...
    @property
    def stored_bytes(self) -> int:
        """The bytes of all experts."""
        ...

    def append(self, parts: Sequence[Tensor]) -> int:
        """Store the tensors of an expert, uint8 of any device, one after the other; return its number.

        Errors: ConfigError.
        """
        ...

    def open_slots(self, count: int) -> ExpertSlots:
        """Return memory for so many experts, once all are stored."""
        ...

    def close(self) -> None:
        """Free what is stored. No other call may be in progress."""
        ...
