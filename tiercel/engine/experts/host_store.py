"""Experts in host memory, and slots in the memory of a GPU."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tiercel.engine.experts.slots import ExpertSlots
from tiercel.values.errors import ConfigError, DeviceLostError

_LINE = 256  # bytes; slots start at a multiple, as allocations of CUDA do


class UseMark(Protocol):
    """A point in the work of the computing stream."""


class ExpertLane(Protocol):
    """Copies beside the computing stream."""

    def mark(self) -> UseMark:
        """Return a mark behind everything that the computing stream has been given so far."""
        ...

    def copy(self, source: Tensor, target: Tensor, after: UseMark | None) -> None:
        """Copy once the computing stream has passed a mark, and wait for the end. Called by any thread.

        Errors: RuntimeError of the driver.
        """
        ...


class CudaExpertLane:
    """A stream for copies, and events of the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> UseMark:
        """See `ExpertLane.mark`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, source: Tensor, target: Tensor, after: UseMark | None) -> None:
        """See `ExpertLane.copy`."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()


class HostExperts:
    """All experts of a model in host memory, locked for the copy engines where there is a GPU."""

    def __init__(self, device: torch.device, lane: ExpertLane) -> None:
        self._device = device
        self._lane = lane
        self._records: list[Tensor] = []
        self.stored_bytes = 0

    @property
    def record_bytes(self) -> int:
        """See `ExpertStore.record_bytes`."""
        return max((-(-record.nbytes // _LINE) * _LINE for record in self._records), default=0)

    @property
    def num_records(self) -> int:
        """See `ExpertStore.num_records`."""
        return len(self._records)

    def append(self, parts: Sequence[Tensor]) -> int:
        """See `ExpertStore.append`. Errors: ConfigError if the host has no memory for it."""
        total = sum(part.nbytes for part in parts)
        try:
            record = torch.empty(total, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except (RuntimeError, MemoryError) as exc:
            shown = f"--expert-memory: the host has no memory for expert {len(self._records):,} of {total:,} bytes"
            raise ConfigError("experts.no_host_memory", f"{shown}: {exc}") from exc
        start = 0
        for part in parts:
            record[start : start + part.nbytes] = part
            start += part.nbytes
        self._records.append(record)
        self.stored_bytes += total
        return len(self._records) - 1

    def open_slots(self, count: int) -> ExpertSlots:
        """See `ExpertStore.open_slots`. Errors: RuntimeError of the driver if the device has no memory."""
        return _DeviceSlots(self._records, self.record_bytes, count, self._device, self._lane)

    def close(self) -> None:
        """See `ExpertStore.close`."""
        self._records.clear()


class _DeviceSlots:
    """Slots in the memory of a device."""

    def __init__(
        self, records: list[Tensor], slot_bytes: int, count: int, device: torch.device, lane: ExpertLane
    ) -> None:
        self.memory = torch.zeros(count * slot_bytes, dtype=torch.uint8, device=device)
        self.num_slots, self.slot_bytes, self.num_records = count, slot_bytes, len(records)
        self._records = records
        self._lane = lane
        self._marks: list[UseMark | None] = [None] * count

    def fetch(self, record: int, slot: int) -> int:
        """See `ExpertSlots.fetch`."""
        source, start = self._records[record], slot * self.slot_bytes
        try:
            self._lane.copy(source, self.memory[start : start + source.nbytes], self._marks[slot])
        except RuntimeError as exc:
            raise DeviceLostError("experts.not_copied", f"an expert cannot be copied to the device: {exc}") from exc
        return source.nbytes

    def release(self, slots: Sequence[int]) -> None:
        """See `ExpertSlots.release`."""
        mark = self._lane.mark()
        for slot in slots:
            self._marks[slot] = mark
