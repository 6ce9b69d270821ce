"""A fake of libcuda and streams: every address is a host address, and a copy is made when its stream is awaited."""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any  # of ctypes' pointers

from tiercel.device.cuda import CudaDevice
from tiercel.device.cuda_driver import CopyAttributes, CudaDriver
from tiercel.device.timer import CudaTimer

CONTEXT = 0xC0
NOT_FOUND = 500
INVALID_CONTEXT = 201
ILLEGAL_ADDRESS = 700
NOT_SUPPORTED = 801
_NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS",
}


class FakeMark:
    """A mark: the position of an event in a fake stream."""

    def __init__(self, stream: "FakeStream") -> None:
        self._stream = stream
        self._at = stream.queued

    def is_past(self) -> bool:
        return self._stream.ended >= self._at

    def wait(self) -> None:
        self._stream.run_until(self._at)


class FakeStream:
    """A queue that runs when its end is awaited."""

    handles = itertools.count(0x51)

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.handle = next(self.handles)
        self.queue: list[Callable[[], object]] = []
        self.queued = 0
        self.ended = 0
        self.depth = 0  # of `current`
        self.is_dead = False

    def push(self, job: Callable[[], object]) -> None:
        self.queue.append(job)
        self.queued += 1

    def run_until(self, count: int) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        while self.ended < count:
            self.queue.pop(0)()
            self.ended += 1

    @contextmanager
    def current(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def mark(self) -> FakeMark:
        return FakeMark(self)

    def wait(self) -> None:
        self.run_until(self.queued)

    def start_timer(self) -> CudaTimer:
        raise AssertionError("nothing is timed here")


class FakeLibrary:
    """The functions of libcuda that `CudaDriver` uses, callable from C. Their calls are recorded.

    A context belongs to a thread: copying or locking on a thread without a context is refused.
    `version` is the newest signature of the batch copy that it has: 12, 13 or 0 for none.
    """

    def __init__(self, version: int = 12) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.registered: dict[int, int] = {}  # bytes by address
        self.batches: list[tuple[int, int]] = []  # source order, copies
        self.singles: list[int] = []  # bytes of each copy outside of a batch
        self.refuses_after = 1 << 60  # slabs
        self.shares_addresses = True
        self.maps_host = True
        self.has_unified_addresses = True
        self.batch_status = 0
        self.failing_index: int | None = None
        self.single_status = 0
        self.stream_status = 0
        self._of_thread = threading.local()
        self._batch_12 = ctypes.CFUNCTYPE(
            c_int, *[POINTER(c_size_t)] * 3, c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t,
            POINTER(c_size_t), c_uint64,
        )(self._copy_batch)  # fmt: skip
        self._batch_13 = ctypes.CFUNCTYPE(
            c_int, *[POINTER(c_size_t)] * 3, c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t, c_uint64
        )(self._copy_batch_13)
        self._batches = {12: {12_080: self._batch_12}, 13: {13_000: self._batch_13}, 0: {}}[version]
        self.cuDeviceGet = _call(self._device, POINTER(c_int), c_int)
        self.cuDeviceGetAttribute = _call(self._attribute, POINTER(c_int), c_int, c_int)
        self.cuDevicePrimaryCtxRetain = _call(self._context, POINTER(c_void_p), c_int)
        self.cuCtxSetCurrent = _call(self._enter, c_void_p)
        self.cuGetErrorName = _call(self._name, c_int, POINTER(c_char_p))
        self.cuGetProcAddress_v2 = _call(self._find, c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int))
        self.cuMemHostRegister_v2 = _call(self._register, c_uint64, c_size_t, c_uint)
        self.cuMemHostUnregister = _call(self._unregister, c_uint64)
        self.cuMemcpyAsync = _call(self._copy, c_uint64, c_uint64, c_size_t, c_uint64)
        self.cuStreamQuery = _call(lambda stream: self.stream_status, c_uint64)

    def open_stream(self, priority: int) -> FakeStream:
        stream = FakeStream(priority)
        self.streams[stream.handle] = stream
        return stream

    def open_device(self, slab_bytes: int = 1 << 20) -> CudaDevice:
        driver = CudaDriver(self)
        driver.open(0)
        return CudaDevice(driver, self.open_stream, slab_bytes)

    def _device(self, device: Any, ordinal: int) -> int:
        device[0] = 7 + ordinal
        return 0

    def _attribute(self, value: Any, attribute: int, device: int) -> int:
        assert device == 7
        value[0] = {19: self.maps_host, 41: self.has_unified_addresses, 91: self.shares_addresses}[attribute]
        return 0

    def _context(self, context: Any, device: int) -> int:
        assert device == 7
        context[0] = CONTEXT
        return 0

    def _enter(self, context: int) -> int:
        assert context == CONTEXT
        self._of_thread.has_context = True
        return 0

    def _has_context(self) -> bool:
        return getattr(self._of_thread, "has_context", False)

    def _name(self, status: int, text: Any) -> int:
        if status not in _NAMES:
            return 1
        text[0] = _NAMES[status]
        return 0

    def _find(self, name: bytes, address: Any, version: int, flags: int, found: Any) -> int:
        assert (name, flags) == (b"cuMemcpyBatchAsync", 0)
        if version not in self._batches:
            address[0] = None
            return NOT_FOUND
        address[0] = ctypes.cast(self._batches[version], c_void_p).value
        return 0

    def _register(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self._has_context():
            return INVALID_CONTEXT
        if len(self.registered) >= self.refuses_after:
            return 2
        assert all(address >= at + held or address + size <= at for at, held in self.registered.items())
        self.registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        if not self._has_context():
            return INVALID_CONTEXT
        return 0 if self.registered.pop(address, None) else 1

    def _is_locked(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + held for at, held in self.registered.items())

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        if not self._has_context():
            return INVALID_CONTEXT
        if self.single_status:
            return self.single_status
        self._check_border(source, size)
        self._check_border(target, size)
        self.singles.append(size)
        self.streams[stream].push(lambda: ctypes.memmove(target, source, size))
        return 0

    def _check_border(self, address: int, size: int) -> None:
        """Check that no range is locked in part only, which the real driver refuses."""
        touched = [at for at, held in self.registered.items() if address < at + held and at < address + size]
        assert not touched or self._is_locked(address, size)

    def _copy_batch(
        self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, firsts: Any,
        num_attributes: int, failed: Any, stream: int,
    ) -> int:  # fmt: skip
        assert num_attributes == 1 and firsts[0] == 0 and stream in self.streams
        if not self._has_context():
            return INVALID_CONTEXT
        copies = [(targets[at], sources[at], sizes[at]) for at in range(count)]
        assert all(self._is_locked(source, size) or self._is_locked(target, size) for target, source, size in copies)
        if self.batch_status:
            if failed is not None and self.failing_index is not None:
                failed[0] = self.failing_index
            return self.batch_status
        self.batches.append((attributes[0].source_order, count))
        for target, source, size in reversed(copies):  # in no order
            self.streams[stream].push(lambda at=target, of=source, most=size: ctypes.memmove(at, of, most))
        return 0

    def _copy_batch_13(self, *given: Any) -> int:
        return self._copy_batch(*given[:-1], failed=None, stream=given[-1])


def _call(function: Callable[..., int], *arguments: type) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(c_int, *arguments)(function)
