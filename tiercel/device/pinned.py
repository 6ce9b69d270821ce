"""Lock host memory for a device's copy engines, slab by slab, on a background thread.

Copies of pageable memory go through small buffers of the driver at a fraction of the speed, and the caller waits.
Locking takes a while, because every page has to be allocated first; until a slab is locked, its copies are slow. A copy
must not cross from one slab into the next, because they are two allocations for the driver.
"""

import ctypes
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tiercel.device.extents import Addresses
from tiercel.device.host_pages import HUGE_PAGE_BYTES, collapse
from tiercel.values.errors import DeviceError

log = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
_POPULATE_BYTES = 64 << 20  # of pages allocated in one call
_MADV_POPULATE_WRITE = 23  # Linux 5.14; absent in the mmap module


class PinnedMemory:
    """A range of host memory in slabs that hold whole blocks and begin on a page.

    The range begins on a page, and its last page is mapped completely, so that the last slab is locked up to its end.

    `register(address, bytes)` locks a slab and raises DeviceError if the driver refuses; `unregister(address)` unlocks
    it. After the first refusal the remaining slabs stay pageable.
    """

    def __init__(
        self,
        address: int,
        size: int,
        block_bytes: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        step = math.lcm(block_bytes, mmap.PAGESIZE)
        self.address = address
        self.size = size
        self.slab_bytes = max(1, slab_bytes // step) * step
        self._register = register
        self._unregister = unregister
        self._page_error = 0  # of the first memory that did not get huge pages
        self._is_pinned = np.zeros(-(-size // self.slab_bytes), dtype=np.bool_)
        self._is_closing = threading.Event()
        self._has_begun = False
        self._thread = threading.Thread(target=self._run, name="kv-pin", daemon=True)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the range that are locked so far."""
        return min(self.size, sum(self._slab(index)[1] for index in np.flatnonzero(self._is_pinned).tolist()))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing.is_set()

    def start(self) -> None:
        """Start to lock on a thread. Cost: on that thread, the time to allocate every page."""
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()

    def wait(self) -> None:
        """Start if necessary, and sleep until everything is locked or refused."""
        self.start()
        self._thread.join()

    def are_pinned(self, addresses: Addresses) -> NDArray[np.bool_]:
        """Return which addresses lie in a locked slab. Shapes: [n] -> [n]."""
        if not len(self._is_pinned):
            return np.zeros(len(addresses), dtype=np.bool_)
        # For an address below the range the difference wraps around to a huge number, which is outside as well.
        offsets = addresses - np.uint64(self.address)
        slabs = np.minimum(offsets // np.uint64(self.slab_bytes), np.uint64(len(self._is_pinned) - 1))
        return (offsets < np.uint64(self.size)) & self._is_pinned[slabs.astype(np.intp)]

    def close(self) -> None:
        """Unlock every slab. No copy may be in progress."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for index in np.flatnonzero(self._is_pinned).tolist():
            self._is_pinned[index] = False
            try:
                self._unregister(self._slab(index)[0])
            except DeviceError as exc:  # a lost device refuses it, and the process ends anyway
                log.warning("host memory not unlocked slab=%d error=%s", index, exc)

    def _slab(self, index: int) -> tuple[int, int]:
        """Return address and bytes of a slab, in whole pages."""
        start = index * self.slab_bytes
        pages = -(-(self.size - start) // mmap.PAGESIZE)
        return self.address + start, min(self.slab_bytes, pages * mmap.PAGESIZE)

    def _run(self) -> None:
        started_s = time.monotonic()
        slabs = len(self._is_pinned)
        for index in range(slabs):
            address, size = self._slab(index)
            if not self._populate(address, size):
                return
            try:
                self._register(address, size)
            except DeviceError as exc:
                log.warning(
                    "host memory not locked from slab %d of %d on: its copies will be slower error=%s",
                    *(index, slabs, exc),
                )
                break
            self._is_pinned[index] = True
            log.debug("host memory locked slab=%d of=%d bytes=%d", index, slabs, size)
        if slabs > 1:
            took_s = time.monotonic() - started_s
            pages = "4 KiB: " + os.strerror(self._page_error) if self._page_error else "2 MiB"
            log.info(
                "host memory locked bytes=%d of=%d seconds=%.1f pages=%s", self.pinned_bytes, self.size, took_s, pages
            )

    def _populate(self, address: int, size: int) -> bool:
        """Allocate pages before locking, because the driver would allocate them while holding its locks.

        Return False if `close` was called. The content of pages does not change. On kernels without this call the
        driver allocates the pages. Memory is put into pages of 2 MiB, until the kernel first refuses it: the driver and
        the copy engines then have far fewer pages to lock and to translate.
        """
        libc, end = ctypes.CDLL(None), self.address + self._slab_end
        for start in range(address, address + size, _POPULATE_BYTES):
            if self.is_closed:
                return False
            length = min(_POPULATE_BYTES, address + size - start)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE))
            if not self._page_error:
                # A page that the next part begins in belongs to this one, because locked pages cannot be moved.
                self._page_error = collapse(start, min(length + HUGE_PAGE_BYTES - 1, end - start))
        return True

    @property
    def _slab_end(self) -> int:
        """Bytes of the range in whole pages."""
        return -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE
