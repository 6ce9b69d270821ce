"""The few calls of libcuda that torch does not offer, through ctypes, with the GIL released.

Every CUDA build of torch loads the same library. docs/decisions/0023-the-driver-is-called-through-ctypes.md compares
this with the package cuda-bindings.
"""

import ctypes
import enum
import logging
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from tiercel.device.extents import Extents
from tiercel.values.errors import DeviceError

log = logging.getLogger(__name__)

_OK = 0
_NOT_READY = 600
_NOT_SUPPORTED = 801
_CAPTURING = range(900, 909)  # returned by a stream while a graph is recorded
_NO_INDEX = ctypes.c_size_t(-1).value  # a batch failed, but not because of one of its copies
_CAN_MAP_HOST = 19  # CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
_HAS_UNIFIED_ADDRESSES = 41  # CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

_ARGUMENTS: dict[str, tuple[Any, ...]] = {  # Any: ctypes' type objects
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamQuery": (c_void_p,),
}
# Targets, sources, sizes, count, attributes, first copy of each, number of attributes, failing index, stream.
_BATCH_12 = ctypes.CFUNCTYPE(c_int, *[c_void_p] * 3, c_size_t, *[c_void_p] * 2, c_size_t, c_void_p, c_void_p)
# CUDA 13 returns no failing index.
_BATCH_13 = ctypes.CFUNCTYPE(c_int, *[c_void_p] * 3, c_size_t, *[c_void_p] * 2, c_size_t, c_void_p)


class SourceOrder(enum.IntEnum):
    """When a batch may read its sources (CUmemcpySrcAccessOrder)."""

    STREAM = 1  # after what was queued on the stream before
    ANY = 3  # at any time: no queued work writes them


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the location hints are used for managed memory only."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", c_int * 2),
        ("target_hint", c_int * 2),
        ("flags", c_uint),
    )


class CudaDriver:
    """The driver library: libcuda, or in tests an object with the functions of `_ARGUMENTS`."""

    def __init__(self, library: Any) -> None:  # Any: a ctypes.CDLL has whatever the library has
        self._library = library
        self._context = c_void_p()
        self._functions: dict[str, Callable[..., int]] = {}
        self._batch: Callable[..., int] | None = None
        self._returns_index = False
        self.maps_host_memory = False
        """Whether kernels can address locked memory that the driver allocated, at the address that the host uses."""

    def open(self, ordinal: int) -> None:
        """Find the functions, and the context in which torch computes. Errors: DeviceError."""
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise DeviceError("cuda.old_driver", "", missing=name)
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        self.maps_host_memory = self._has(_CAN_MAP_HOST, device) and self._has(_HAS_UNIFIED_ADDRESSES, device)
        if self._has(_CAN_USE_HOST_POINTER, device):
            self._find_batch()
        else:  # the driver would accept a batch, and the copies would fault later (sglang issue 40232)
            log.info("locked memory has other addresses on this device: blocks are copied one by one")

    @property
    def has_batch(self) -> bool:
        """Whether the driver has batch copies."""
        return self._batch is not None

    def enter(self) -> None:
        """Set the device's context for this thread. Cheap if it is already set."""
        self._call("cuCtxSetCurrent", self._context)

    def register(self, address: int, size: int) -> None:
        """Lock host memory for the copy engines. Errors: DeviceError if the driver refuses."""
        self.enter()
        self._call("cuMemHostRegister_v2", address, size, 0, bytes=size)

    def unregister(self, address: int) -> None:
        """Unlock host memory. Errors: DeviceError."""
        self.enter()
        self._call("cuMemHostUnregister", address)

    def copy(self, source: int, target: int, size: int, stream: int) -> None:
        """Queue one copy. Bytes of pageable memory are staged before this returns. Errors: DeviceError."""
        self._call("cuMemcpyAsync", target, source, size, stream, bytes=size)

    def copy_batch(self, extents: Extents, order: SourceOrder, stream: int) -> bool:
        """Queue a batch of copies between the device and locked memory. Return False if batches are not supported.

        The stream must not be the default stream, which the driver refuses.

        Cost:   one call; the arrays are read before it returns.
        Errors: DeviceError, with the index of the failing copy if the driver returns it.
        Source: cuMemcpyBatchAsync of the CUDA driver API, 12.8 (with failIdx) and 13.0 (without).
        """
        if self._batch is None:
            return False
        attributes = CopyAttributes(source_order=order, flags=_PREFER_OVERLAP)
        first, failed = c_size_t(0), c_size_t(_NO_INDEX)
        arrays = (extents.targets, extents.sources, extents.sizes)
        index = (byref(failed),) if self._returns_index else ()
        status = self._batch(
            *(array.ctypes.data for array in arrays), len(extents), byref(attributes), byref(first), 1, *index, stream
        )
        if status == _NOT_SUPPORTED:
            log.warning("batch copies not supported here: blocks are copied one by one")
            self._batch = None
            return False
        if status != _OK:
            where = {} if failed.value == _NO_INDEX else {"index": failed.value}
            raise DeviceError("cuda.copy_batch", "", status=self._name(status), copies=len(extents), **where)
        return True

    def is_lost(self, stream: int) -> bool:
        """Return whether the context answers every call with an error, by making a harmless call."""
        self._functions["cuCtxSetCurrent"](self._context)
        status = self._functions["cuStreamQuery"](stream)
        return status not in (_OK, _NOT_READY, *_CAPTURING)

    def _has(self, attribute: int, device: c_int) -> bool:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, device)
        return bool(value.value)

    def _find_batch(self) -> None:
        """Find the batch copy with the signature of CUDA 12.8, else with that of 13.0."""
        for version, kind in ((12_080, _BATCH_12), (13_000, _BATCH_13)):
            address, found = c_void_p(), c_int()
            status = self._functions["cuGetProcAddress_v2"](
                b"cuMemcpyBatchAsync", byref(address), version, 0, byref(found)
            )
            if status == _OK and address.value:
                self._batch, self._returns_index = kind(address.value), kind is _BATCH_12
                return
        log.warning("the driver has no batch copies (CUDA 12.8): blocks are copied one by one")

    def _call(self, name: str, *arguments: object, **facts: object) -> None:
        status = self._functions[name](*arguments)
        if status != _OK:
            raise DeviceError("cuda.call", "", call=name, status=self._name(status), **facts)

    def _name(self, status: int) -> str:
        text = c_char_p()
        self._functions["cuGetErrorName"](status, byref(text))
        return (text.value or str(status).encode()).decode()
