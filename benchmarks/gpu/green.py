"""Streams on disjoint parts of the device: green contexts of the driver.

The driver assigns processors in groups (of eight on Hopper). Kernels that are queued on such a stream run on its
processors only; marks and graphs work across streams as usual.
"""

from types import TracebackType
from typing import Any

import torch

_GROUP = 8  # processors


class SplitError(RuntimeError):
    """The driver refused to split the device."""


class SplitDevice:
    """Two streams: one on `processors` of the device or a few more, the other on all others."""

    def __init__(self, processors: int) -> None:
        self.wanted = processors
        self.first: torch.cuda.Stream
        self.second: torch.cuda.Stream
        self.sizes = (0, 0)  # number of processors of each stream
        self._contexts: list[Any] = []  # handles of cuda-bindings, which has no types
        self._streams: list[Any] = []

    def __enter__(self) -> "SplitDevice":
        """Open both streams. Errors: SplitError; ImportError if cuda-bindings is not installed."""
        from cuda.bindings import driver  # lazy: an optional package

        torch.cuda.synchronize()
        device = _got(driver.cuDeviceGet(torch.cuda.current_device()))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = _got(driver.cuDeviceGetDevResource(device, kind))
        groups, _, rest = _got(driver.cuDevSmResourceSplitByCount(1, whole, 0, self.wanted))
        streams: list[torch.cuda.Stream] = []
        sizes: list[int] = []
        for part in (groups[0], rest):
            wanted = _got(driver.cuDevResourceGenerateDesc([part], 1))
            flags = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
            context = _got(driver.cuGreenCtxCreate(wanted, device, flags))
            self._contexts.append(context)
            is_apart = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            stream = _got(driver.cuGreenCtxStreamCreate(context, is_apart, 0))
            self._streams.append(stream)
            streams.append(torch.cuda.ExternalStream(int(stream)))
            sizes.append(int(part.sm.smCount))
        self.first, self.second = streams
        self.sizes = (sizes[0], sizes[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from cuda.bindings import driver  # lazy: as above

        torch.cuda.synchronize()
        for stream in self._streams:
            driver.cuStreamDestroy(stream)
        for context in self._contexts:
            driver.cuGreenCtxDestroy(context)


def splits(processors: int) -> list[int]:
    """Return the sizes of the smaller part to try on a device with this number of processors."""
    most = processors // 2
    return [size for size in range(2 * _GROUP, most + 1, _GROUP)]


def _got(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call of the driver without its status. Errors: SplitError."""
    if int(answer[0]) != 0:
        raise SplitError(f"the driver says {answer[0]!s}")
    return answer[1:] if len(answer) > 2 else answer[1]
