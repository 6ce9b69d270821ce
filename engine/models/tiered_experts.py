"""Experts of a mixture of which a part is in memory: their bytes in the file, and their tensors in the slots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiercel.clock import Clock
from tiercel.engine.experts.cache import ExpertCache
from tiercel.engine.experts.file import ExpertFile
from tiercel.engine.models.layers import Linear
from tiercel.engine.models.ops import ExpertParts
from tiercel.engine.models.quantized_parts import WeightKernels
from tiercel.engine.native.huge_pages import WeightMemory
from tiercel.errors import ConfigError, InvariantError
from tiercel.outcome import ExpertGauges
from tiercel.units import show_bytes

LibraryOf = Callable[[Linear], WeightKernels | None]
"""Returns the kernels for a layer; None if oneDNN computes it."""

_LINE = 64  # bytes; every tensor of an expert starts at a line of the processor's cache


@dataclass(frozen=True, slots=True)
class StoredTensorPlace:
    """The place of a tensor in the record of its expert."""

    start: int  # bytes
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class ExpertTier:
    """The experts of all mixtures of a model: in a file on an SSD, and as many as fit in memory."""

    def __init__(
        self, memory_bytes: int, folder: Path, clock: Clock, *, threads: int = 2, fetches_ahead: bool = True
    ) -> None:
        """`memory_bytes`: for the experts of all layers. `threads`, `fetches_ahead`: see `ExpertCache`.

        Errors: ConfigError if the folder cannot be written to.
        """
        self.memory_bytes = memory_bytes
        self.layers: list[TieredLayer] = []
        self._file = ExpertFile.create(folder)
        self._clock = clock
        self._threads = threads
        self._fetches_ahead = fetches_ahead
        self._cache: ExpertCache | None = None
        self._memory: Tensor | None = None
        self._slot_bytes = 0

    def open_layer(self, experts: Sequence[ExpertParts], per_token: int) -> "TieredLayer":
        """Return the tier of one layer's experts."""
        layer = TieredLayer(self, experts, per_token)
        self.layers.append(layer)
        return layer

    @property
    def cache(self) -> ExpertCache:
        """The slots, after `start`."""
        if self._cache is None:
            raise InvariantError("experts.not_started")
        return self._cache

    def write(self, tensors: Sequence[Tensor]) -> tuple[int, tuple[StoredTensorPlace, ...]]:
        """Write the tensors of an expert to the file. Return the number of the record, and their places in it.

        Errors: ConfigError.
        """
        places: list[StoredTensorPlace] = []
        parts: list[memoryview] = []
        start = 0
        for tensor in tensors:
            raw = tensor.detach().contiguous().flatten().view(torch.uint8)
            padding = -raw.numel() % _LINE
            places.append(StoredTensorPlace(start, start + raw.numel(), tensor.dtype, tuple(tensor.shape)))
            parts += [raw.numpy().data, memoryview(bytes(padding))]
            start += raw.numel() + padding
        return self._file.append(parts), tuple(places)

    def start(self) -> None:
        """Open the slots and start to fetch, once all experts are in the file.

        Errors: ConfigError if the memory does not hold the experts of one token.
        """
        slot_bytes, count = self._file.record_bytes, len(self._file.records)
        slots = min(count, self.memory_bytes // max(1, slot_bytes))
        least = max((layer.per_token for layer in self.layers), default=1)
        if slots < least:
            raise ConfigError(
                "experts.too_small",
                f"--expert-memory {show_bytes(self.memory_bytes)} is too small: the {least} experts of one token in "
                f"one layer take {show_bytes(least * slot_bytes)} ({least * slot_bytes} bytes)",
            )
        self._slot_bytes = slot_bytes
        self._memory = WeightMemory().take(slots * slot_bytes)
        self._memory.zero_()  # takes its pages now, before the free memory is divided
        self._cache = ExpertCache(
            *(self._file, self._memory.numpy().data, slots, len(self.layers), self._clock),
            threads=self._threads,
            fetches_ahead=self._fetches_ahead,
        )
        self._cache.start()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of experts that are in memory at most, and of all, after `start`."""
        return self.slots_bytes // max(1, self._slot_bytes), len(self._file.records)

    @property
    def slots_bytes(self) -> int:
        """The memory of all slots, after `start`."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def file_bytes(self) -> int:
        """The bytes of all experts in the file."""
        return self._file.file_bytes

    def gauges(self) -> ExpertGauges:
        """Return the counters; all 0 before `start`."""
        return ExpertGauges() if self._cache is None else self._cache.gauges()

    def views(self, slot: int, places: Sequence[StoredTensorPlace]) -> list[Tensor]:
        """Return the tensors of the expert in a slot."""
        assert self._memory is not None
        start = slot * self._slot_bytes
        room = self._memory[start : start + self._slot_bytes]
        return [room[place.start : place.end].view(place.dtype).view(place.shape) for place in places]

    def close(self) -> None:
        """Stop the threads, and free the place of the file. Nothing may compute any more."""
        if self._cache is not None:
            self._cache.close()
        self._file.close()


class TieredLayer:
    """The experts of one layer. Their `Linear` objects have the weights of the slots that they were last found in."""

    def __init__(self, tier: ExpertTier, experts: Sequence[ExpertParts], per_token: int) -> None:
        self.per_token = per_token
        self._tier = tier
        self._experts = experts
        self._places: dict[int, tuple[StoredTensorPlace, ...]] = {}
        self._record_by_expert: dict[int, int] = {}
        self._expert_by_record: dict[int, int] = {}
        self._slot_by_expert: dict[int, int] = {}  # in which the tensors are; its content may be another expert's

    def store(self, index: int, library_of: LibraryOf | None) -> None:
        """Pack a loaded expert, write it to the file, and free its memory. Errors: ConfigError.

        `library_of`: None: weights stay as they are loaded.
        """
        expert = self._experts[index]
        if library_of is not None:
            for linear in expert:
                linear.pack(library_of(linear), moves=True)
        tensors = [tensor for linear in expert for tensor in linear.storage()]
        record, self._places[index] = self._tier.write(tensors)
        self._record_by_expert[index], self._expert_by_record[record] = record, index
        for tensor in tensors:
            _replace(tensor, torch.empty(0, dtype=tensor.dtype))

    def take(self, wanted: Sequence[int], ahead: Sequence[int]) -> Iterator[int]:
        """Yield the wanted experts as they are in memory; each may be used until the next one is asked for.

        `ahead`: records of the next layer (`records`), the likeliest first. Errors: DeviceLostError.
        """
        for record, slot in self._tier.cache.take([self._record_by_expert[index] for index in wanted], ahead):
            index = self._expert_by_record[record]
            if self._slot_by_expert.get(index) != slot:
                self._move(index, slot)
            yield index

    def records(self, experts: Sequence[int]) -> list[int]:
        """Return the records of experts."""
        return [self._record_by_expert[index] for index in experts]

    def _move(self, index: int, slot: int) -> None:
        expert = self._experts[index]
        tensors = [tensor for linear in expert for tensor in linear.storage()]
        for tensor, view in zip(tensors, self._tier.views(slot, self._places[index]), strict=True):
            _replace(tensor, view)
        for linear in expert:
            linear.moved()
        self._slot_by_expert[index] = slot


def _replace(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the memory and the shape of another one."""
    tensor.set_(other)  # pyright: ignore[reportArgumentType] - torch's stub knows storages alone
