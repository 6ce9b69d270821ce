"""Move the arrays of a step to the device, packed into one buffer of locked memory, and its results to the host.

On a GPU that can address locked memory, kernels of the compute lane read the buffer and write the results
(`engine.kernels.host_memory`): the copy engines ignore the priority of a lane, so a copy would wait behind a running
swap. Elsewhere both are copies. Either way a buffer is read after the call, so it is only refilled when a mark behind
its reader is past.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.device.base import Lane, Mark
from tiercel.engine.step.tables import NO_PATCHES, DeviceTables

log = logging.getLogger(__name__)

Arrays = Sequence[NDArray[np.generic]]

_ALIGNMENT = 64  # bytes; Triton compiles a second kernel for pointers that are no multiple of 16
_MIN_BUFFER_BYTES = 1 << 16
_TORCH_BY_NUMPY = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


class Marking(Protocol):
    """A lane, as far as staging uses it."""

    def mark(self) -> Mark: ...


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory that the device uses. Shapes: memory [bytes] uint8."""

    memory: Tensor
    mark: Mark  # queued behind the last use


class HostRing:
    """Host buffers in the order in which the device last reads them.

    `take` never waits: if every buffer is being read, it allocates another one. The number of buffers is bounded by
    the uploads in flight: the nano-batches of the running step, of the steps launched ahead and of the one being
    launched.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self._given: deque[HostBuffer] = deque()

    def __len__(self) -> int:
        return len(self._given)

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes that nothing reads. Pass it to `give` after queueing its reader.

        Shapes: returns [bytes] uint8.
        """
        if self._given and self._given[0].mark.is_past():
            memory = self._given.popleft().memory
            if len(memory) >= size:
                return memory
        capacity = max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length())
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=self.is_pinned)

    def give(self, memory: Tensor, mark: Mark) -> None:
        """Return a buffer to the ring. What reads it was queued before `mark`."""
        self._given.append(HostBuffer(memory, mark))


class ResultMemory:
    """Host memory that the device writes, kept until it has done so.

    The reader keeps it as long as it needs it. If nobody reads it, because the step was voided, it must not be freed
    before: the next owner of the memory would find it overwritten.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._unmarked: list[Tensor] = []
        self._marked: deque[HostBuffer] = deque()

    def __len__(self) -> int:
        return len(self._unmarked) + len(self._marked)

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor of this type and shape for work that is queued before the next call of `mark`."""
        memory = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._is_pinned)
        self._unmarked.append(memory)
        return memory

    def mark(self, mark: Mark) -> None:
        """Note a mark behind all work that writes the memory taken so far, and free memory whose mark is past."""
        self._marked.extend(HostBuffer(memory, mark) for memory in self._unmarked)
        self._unmarked.clear()
        while self._marked and self._marked[0].mark.is_past():
            self._marked.popleft()


class Carrier(Protocol):
    """Moves bytes between locked host memory and the device, on the lane whose job calls it."""

    def take_inputs_no_sync(
        self, source: Tensor, target: Tensor, num_bytes: int, tables: Tensor | None, patches: int
    ) -> None:
        """Fill the target from host memory, then apply the patches that follow these bytes to block tables.

        Shapes: source [bytes] uint8 on the host, target [bytes] uint8; patches: how many, see `Patches`.
        """
        ...

    def move_no_sync(self, source: Tensor, target: Tensor) -> None:
        """Copy a contiguous tensor to the host. Shapes: equal."""
        ...

    def report_no_sync(
        self, tokens: Tensor, bad_rows: Tensor, rows: Tensor, last_tokens: Tensor, on_host: tuple[Tensor, Tensor]
    ) -> None:
        """Note the last token of rows on the device, and copy tokens and flags to the host. Shapes: all [N]."""
        ...


class CopyCarrier:
    """Queues copies. A copy waits for its engine, whatever the priority of the lane."""

    def take_inputs_no_sync(
        self, source: Tensor, target: Tensor, num_bytes: int, tables: Tensor | None, patches: int
    ) -> None:
        target.narrow(0, 0, num_bytes).copy_(source.narrow(0, 0, num_bytes), non_blocking=True)
        if tables is not None and patches:
            on_host = source.narrow(0, num_bytes, 16 * patches)
            pairs = torch.empty_like(on_host, device=target.device).copy_(on_host, non_blocking=True)
            places, slots = pairs.view(torch.int64).view(patches, 2).unbind(1)
            tables.view(-1).index_copy_(0, places, slots)

    def move_no_sync(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def report_no_sync(
        self, tokens: Tensor, bad_rows: Tensor, rows: Tensor, last_tokens: Tensor, on_host: tuple[Tensor, Tensor]
    ) -> None:
        last_tokens.index_copy_(0, rows, tokens)
        for values, target in zip((tokens, bad_rows), on_host, strict=True):
            target.copy_(values, non_blocking=True)


class KernelCarrier:
    """Launches kernels that address host memory; see `engine.kernels.host_memory`."""

    def __init__(self) -> None:
        # lazy: CPU builds of torch come without Triton
        from tiercel.engine.kernels import host_memory

        self._kernels = host_memory

    def take_inputs_no_sync(
        self, source: Tensor, target: Tensor, num_bytes: int, tables: Tensor | None, patches: int
    ) -> None:
        tables = target.view(torch.int64) if tables is None else tables  # not written
        self._kernels.take_inputs_no_sync(source, target, num_bytes, tables, patches)

    def move_no_sync(self, source: Tensor, target: Tensor) -> None:
        self._kernels.move_no_sync(source, target)

    def report_no_sync(
        self, tokens: Tensor, bad_rows: Tensor, rows: Tensor, last_tokens: Tensor, on_host: tuple[Tensor, Tensor]
    ) -> None:
        self._kernels.report_no_sync(tokens, bad_rows, rows, last_tokens, *on_host)


class Staging:
    """Moves arrays between the host and the device; a `HostLink`. Call it in jobs of one lane."""

    def __init__(
        self, device: torch.device, lane: Marking, ring: HostRing | None, carrier: Carrier | None = None
    ) -> None:
        """`ring`: None if the device reads host memory directly, so that nothing is moved. `carrier`: by default
        copies."""
        self._device = device
        self._lane = lane
        self._ring = ring
        self._carrier = carrier or CopyCarrier()
        self._results = ResultMemory(is_pinned=ring is not None and ring.is_pinned)

    @property
    def is_direct(self) -> bool:
        """Whether the device reads host memory directly."""
        return self._ring is None

    def upload_no_sync(
        self, arrays: Arrays, target: Tensor | None = None, tables: DeviceTables | None = None
    ) -> tuple[Tensor, ...]:
        """Move the arrays to the device and return views of them there, in `target` or in a new buffer.

        `tables`: their unsent changes are sent as well.

        Shapes:  target [bytes] uint8 on the device, at least `packed_bytes` of the arrays. If only the last array
                 changes its size between two calls, all arrays keep their places in it.
        Cost:    one copy on the host and one kernel (or a copy to the device, and one for changes of tables). On the
                 CPU without a target there is no copy: the returned tensors share the memory of the arrays.
        Effects: queued on the lane behind everything that may still read the target.
        """
        patches = NO_PATCHES if tables is None else tables.unsent()
        if self._ring is None:
            if tables is not None:
                tables.apply(patches)
            if target is None:
                return tuple(torch.from_numpy(array) for array in arrays)
            _pack(arrays, target.numpy())
            return unpack(target, arrays)
        size = packed_bytes(arrays)
        memory = self._ring.take(size + patches.nbytes)
        _pack((*arrays, patches), memory.numpy())
        if target is None:
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._carrier.take_inputs_no_sync(memory, target, size, None if tables is None else tables.tables, len(patches))
        mark = self._lane.mark()
        self._ring.give(memory, mark)
        self._results.mark(mark)
        if tables is not None:
            tables.mark_sent()
        return unpack(target, arrays)

    def send_no_sync(self, array: NDArray[np.generic]) -> Tensor:
        """Move one array to the device. Cost: as `upload_no_sync`."""
        return self.upload_no_sync((np.ascontiguousarray(array),))[0]

    def fetch_no_sync(self, values: Tensor) -> Tensor:
        """Return the values on the host, to be read when the lane has passed this point. Cost: one kernel or copy."""
        if self._ring is None:
            return values
        target = self._results.take(values)
        self._carrier.move_no_sync(values.contiguous(), target)
        return target

    def report_no_sync(
        self, tokens: Tensor, bad_rows: Tensor, rows: Tensor, last_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Note the last tokens of rows on the device. Return tokens and flags on the host, as `fetch_no_sync` does.

        Shapes: tokens and rows [N] int64, bad_rows [N] bool; last_tokens [rows of the runner] int64.
        Cost:   one kernel, or a kernel and two copies.
        """
        on_host = self._results.take(tokens), self._results.take(bad_rows)
        self._carrier.report_no_sync(tokens, bad_rows, rows, last_tokens, on_host)
        return on_host


def open_staging(
    device: torch.device,
    lane: Lane,
    *,
    maps_host_memory: bool = False,
    open_carrier: Callable[[], Carrier] = KernelCarrier,
) -> Staging:
    """Return the staging for a device, for jobs of this lane.

    `maps_host_memory`: see `Device`. Kernels are compiled and tried here; if they fail, copies are used.
    """
    if device.type == "cpu":
        return Staging(device, lane, None)
    ring = HostRing(is_pinned=True)
    if not maps_host_memory:
        log.info("steps use copies: the device has no addresses for host memory")
        return Staging(device, lane, ring)
    if find_spec("triton") is None:
        log.warning("steps use copies, which wait for swaps: no triton")
        return Staging(device, lane, ring)
    staging = Staging(device, lane, ring, open_carrier())
    return staging if _moves_right(staging, device, lane) else Staging(device, lane, ring)


def _moves_right(staging: Staging, device: torch.device, lane: Lane) -> bool:
    """Move numbers to the device and back, with every kernel. Return whether they arrived; the log says why not."""
    numbers, flags = np.arange(4, dtype=np.int64), np.array([True, False, False, True])
    floats = np.arange(4, dtype=np.float32)

    def move() -> tuple[Tensor, ...]:
        tables = DeviceTables.open(2, 4, device)  # on the lane's stream, in order with the kernels
        last_tokens = torch.zeros(4, dtype=torch.int64, device=device)
        tables.note(np.array([[5, 7]], np.int64))
        tokens, bad_rows, values = staging.upload_no_sync((numbers, flags, floats), tables=tables)
        on_host = staging.report_no_sync(tokens, bad_rows, tokens, last_tokens)
        return (*on_host, *map(staging.fetch_no_sync, (last_tokens, bad_rows, values, tables.tables)))

    wanted = numbers, flags, numbers, flags, floats, np.array([[0, 0, 0, 0], [0, 7, 0, 0]])
    try:
        found = lane.run(move).result()
    except Exception as exc:  # Triton's errors, also those of compiling, have no base in common with torch's
        if lane.is_lost(exc):
            raise
        log.warning("steps use copies, which wait for swaps: kernels cannot use host memory error=%s", exc)
        return False
    is_right = all(np.array_equal(one.numpy(), other) for one, other in zip(found, wanted, strict=True))
    if not is_right:
        log.warning("steps use copies, which wait for swaps: kernels read host memory wrongly")
    return is_right


def packed_bytes(arrays: Arrays) -> int:
    """Return the bytes of the arrays in one buffer, each aligned."""
    return sum(_aligned_bytes(array) for array in arrays)


def _aligned_bytes(array: NDArray[np.generic]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(arrays: Arrays, buffer: NDArray[np.uint8]) -> None:
    start = 0
    for array in arrays:
        place = buffer[start : start + array.nbytes].view(array.dtype)
        place.reshape(array.shape)[...] = array
        start += _aligned_bytes(array)


def unpack(buffer: Tensor, arrays: Arrays) -> tuple[Tensor, ...]:
    """Return views of a packed buffer with the types and shapes of the arrays."""
    tensors: list[Tensor] = []
    start = 0
    for array in arrays:
        place = buffer.narrow(0, start, array.nbytes).view(_TORCH_BY_NUMPY[array.dtype])
        tensors.append(place if array.ndim == 1 else place.view(array.shape))
        start += _aligned_bytes(array)
    return tuple(tensors)
