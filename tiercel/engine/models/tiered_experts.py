"""A mixture that keeps a part of its experts in memory: the layout of an expert's bytes in the file and in a slot."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.experts.cache import ExpertCache
from tiercel.engine.experts.slots import ExpertSlots, ExpertStore
from tiercel.engine.models.layers import Linear
from tiercel.engine.models.ops import ExpertParts
from tiercel.engine.models.quantized_parts import WeightKernels
from tiercel.values.clock import Clock
from tiercel.values.errors import ConfigError, InvariantError
from tiercel.values.outcome import ExpertGauges
from tiercel.values.units import show_bytes

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
    """The experts of all mixtures of a model: all of them in a store, and as many as fit in the device's memory."""

    def __init__(
        self, memory_bytes: int, store: ExpertStore, clock: Clock, *, threads: int = 2, fetches_ahead: bool = True
    ) -> None:
        """`memory_bytes`: for the experts of all layers. `threads`, `fetches_ahead`: see `ExpertCache`."""
        self.memory_bytes = memory_bytes
        self.layers: list[TieredLayer] = []
        self._store = store
        self._clock = clock
        self._threads = threads
        self._fetches_ahead = fetches_ahead
        self._cache: ExpertCache | None = None
        self._slots: ExpertSlots | None = None

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
        """Store the tensors of an expert. Return the number of the record, and their places in it.

        Errors: ConfigError.
        """
        places: list[StoredTensorPlace] = []
        parts: list[Tensor] = []
        start = 0
        for tensor in tensors:
            raw = tensor.detach().contiguous().flatten().view(torch.uint8)
            padding = -raw.numel() % _LINE
            places.append(StoredTensorPlace(start, start + raw.numel(), tensor.dtype, tuple(tensor.shape)))
            parts += [raw, torch.zeros(padding, dtype=torch.uint8)]
            start += raw.numel() + padding
        return self._store.append(parts), tuple(places)

    def start(self) -> None:
        """Open the slots and start to fetch, once all experts are stored.

        Errors: ConfigError if the memory does not hold the experts of one token.
        """
        slot_bytes, count = self._store.record_bytes, self._store.num_records
        slots = min(count, self.memory_bytes // max(1, slot_bytes))
        least = max((layer.per_token for layer in self.layers), default=1)
        if slots < least:
            raise ConfigError(
                "experts.too_small",
                f"--expert-memory {show_bytes(self.memory_bytes)} is too small: the {least} experts of one token in "
                f"one layer take {show_bytes(least * slot_bytes)} ({least * slot_bytes} bytes)",
            )
        self._slots = self._store.open_slots(slots)
        self._cache = ExpertCache(
            *(self._slots, len(self.layers), self._clock),
            threads=self._threads,
            fetches_ahead=self._fetches_ahead,
        )
        self._cache.start()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of experts that are in memory at most, and of all, after `start`."""
        return 0 if self._slots is None else self._slots.num_slots, self._store.num_records

    @property
    def slots_bytes(self) -> int:
        """The memory of all slots, after `start`."""
        return 0 if self._slots is None else self._slots.memory.nbytes

    def gauges(self) -> ExpertGauges:
        """Return the counters; all 0 before `start`."""
        return ExpertGauges() if self._cache is None else self._cache.gauges()

    def views(self, slot: int, places: Sequence[StoredTensorPlace]) -> list[Tensor]:
        """Return the tensors of the expert in a slot."""
        assert self._slots is not None
        start = slot * self._slots.slot_bytes
        room = self._slots.memory[start : start + self._slots.slot_bytes]
        return [room[place.start : place.end].view(place.dtype).view(place.shape) for place in places]

    def close(self) -> None:
        """Stop the threads, and free what is stored. Nothing may compute any more."""
        if self._cache is not None:
            self._cache.close()
        self._store.close()


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
        """Pack a loaded expert, store it, and free its memory. Errors: ConfigError.

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
            _replace(tensor, tensor.new_empty(0))

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
