"""Host memory in pages of 2 MiB where the kernel allows them: a locked tier has fewer addresses to translate."""

import ctypes
import errno
import mmap
import os
import weakref

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25  # Linux 6.1; absent in the mmap module


def map_file(fd: int, size: int) -> memoryview:
    """Map `size` bytes of a memfd, shared, at an address that is a multiple of 2 MiB.

    The kernel has huge pages for a file only where address and position agree to that multiple, which the address of a
    plain mapping does not. The mapping ends with the last view of it, and not before the process at its end.
    Errors: OSError.
    """
    libc = _libc()
    whole = size + HUGE_PAGE_BYTES
    reserved = libc.mmap(None, whole, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if reserved == _MAP_FAILED:
        raise _last_error()
    start = _round_up(reserved)
    end = start + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _MAP_FAILED:
        failure = _last_error()
        libc.munmap(reserved, whole)
        raise failure
    for first, last in ((reserved, start), (end, reserved + -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE)):
        if last > first:
            libc.munmap(first, last - first)
    held = (ctypes.c_ubyte * size).from_address(start)  # every view keeps it alive
    weakref.finalize(held, libc.munmap, start, size).atexit = False  # threads may still copy at the end of the process
    return memoryview(held).cast("B")


def ask_for_huge_pages(memory: memoryview) -> None:
    """Let the kernel use pages of 2 MiB for this memory when it allocates it.

    Attention reads blocks all over the arena of a CPU. With small pages the translation of their addresses takes as
    long as the reading itself on a virtual machine. Kernels without huge pages refuse it, and for a memfd they obey
    `transparent_hugepage/shmem_enabled`: nothing changes then.
    """
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    size = -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc().madvise(address, size, mmap.MADV_HUGEPAGE)


def collapse(address: int, size: int) -> int:
    """Put memory into pages of 2 MiB now, whatever the system's setting. Return 0, or the error number.

    Every page of 2 MiB that lies in the range completely is allocated, if a part of it is real. Its content stays.
    Cost: clearing or copying each page; nothing for pages that are huge already.
    """
    start, end = _round_up(address), (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= start:
        return 0
    return 0 if _libc().madvise(start, end - start, _MADV_COLLAPSE) == 0 else ctypes.get_errno() or errno.EINVAL


def _round_up(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, address, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
