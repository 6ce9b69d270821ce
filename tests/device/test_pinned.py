"""Locking of host memory, slab by slab."""

import ctypes
import logging
import mmap
import os
import threading

import numpy as np
import pytest
import torch

from tests.device.fake_cuda import FakeLibrary
from tiercel.device.cpu import CpuDevice
from tiercel.device.pinned import PinnedMemory
from tiercel.kvcache.store.arena import open_arena
from tiercel.values.errors import DeviceError
from tiercel.values.tier import KVSpec

PAGE = mmap.PAGESIZE


class Locks:
    """The locked ranges, as a driver keeps them."""

    def __init__(self, refuses: int | None = None, gate: threading.Event | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.tries = 0
        self._refuses = refuses
        self._gate = gate

    def register(self, address: int, size: int) -> None:
        self.tries += 1
        if self._gate is not None:
            self._gate.wait(10)
        if self.tries == self._refuses:
            raise DeviceError("cuda.call", status="CUDA_ERROR_OUT_OF_MEMORY")
        self.locked[address] = size

    def unregister(self, address: int) -> None:
        del self.locked[address]


def memory(pages: int) -> tuple[mmap.mmap, int]:
    """A memfd that outlives its mappings."""
    fd = os.memfd_create("host")
    os.ftruncate(fd, pages * PAGE)
    raw = mmap.mmap(fd, pages * PAGE)
    os.close(fd)
    return raw, ctypes.addressof(ctypes.c_char.from_buffer(raw))


def test_slabs_hold_whole_blocks_begin_on_pages_and_cover_everything() -> None:
    raw, address = memory(50)
    locks = Locks()
    block = 3 * PAGE // 2
    pinned = PinnedMemory(address, 33 * block, block, locks.register, locks.unregister, 16 * PAGE)
    assert pinned.slab_bytes == 15 * PAGE  # 10 blocks
    pinned.start()
    pinned.wait()
    assert locks.locked == {
        address: 15 * PAGE,
        address + 15 * PAGE: 15 * PAGE,
        address + 30 * PAGE: 15 * PAGE,
        address + 45 * PAGE: 5 * PAGE,  # the last block ends within a page, which is mapped completely
    }
    assert pinned.pinned_bytes == 33 * block
    raw[:1] = b"x"
    pinned.close()
    assert locks.locked == {} and pinned.pinned_bytes == 0


def test_every_page_of_a_slab_is_real_before_it_is_locked() -> None:
    """Otherwise the driver would allocate them while holding its locks. Needs Linux 5.14."""
    fd = os.memfd_create("host")
    os.ftruncate(fd, 7 * PAGE)
    raw = mmap.mmap(fd, 7 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), ctypes.c_int(23)):
        pytest.skip("this kernel cannot be asked to make pages real")
    real: list[int] = []
    pinned = PinnedMemory(
        *(address, 6 * PAGE + 1, 1),
        register=lambda address, size: real.append(os.fstat(fd).st_blocks * 512 // PAGE),
        unregister=lambda address: None,
        slab_bytes=2 * PAGE,
    )
    pinned.start()
    pinned.wait()
    pinned.close()
    os.close(fd)
    assert real == [2, 4, 6, 7]


@pytest.mark.parametrize("blocks", [2, 64])
@pytest.mark.parametrize("is_kept", [False, True])
def test_an_arena_is_mapped_to_the_end_of_its_last_page(blocks: int, is_kept: bool) -> None:
    """The locked memory is readable and writable up to its end, in a kept arena and in an anonymous one."""
    spec = KVSpec(layers=3, kv_heads=1, head_dim=64, block_size=4, dtype="float16")  # 3 KiB a block
    fd = os.memfd_create("host") if is_kept else None
    arena = open_arena(spec, blocks, torch.device("cpu"), fd)
    assert arena.kv.nbytes % PAGE
    locks = Locks()
    pinned = PinnedMemory(arena.kv.data_ptr(), arena.kv.nbytes, spec.block_bytes, locks.register, locks.unregister)
    pinned.start()
    pinned.wait()
    ((address, size),) = locks.locked.items()
    assert address % PAGE == size % PAGE == 0
    assert pinned.pinned_bytes == arena.kv.nbytes < size
    ctypes.memset(address + arena.kv.nbytes, 1, size - arena.kv.nbytes)
    assert not arena.kv.any()
    pinned.close()
    if fd is not None:
        os.close(fd)


@pytest.mark.parametrize("block", [1, 180, PAGE + 1, 40 * PAGE])
def test_a_block_that_does_not_divide_the_slab_changes_the_slab_size(block: int) -> None:
    pinned = PinnedMemory(PAGE, 100 * block, block, lambda address, size: None, lambda address: None, 16 * PAGE)
    assert pinned.slab_bytes % block == 0 == pinned.slab_bytes % PAGE


def test_the_content_of_memory_is_not_changed() -> None:
    raw, address = memory(8)
    raw[:] = os.urandom(len(raw))
    before = bytes(raw)
    locks = Locks()
    pinned = PinnedMemory(address, len(raw), PAGE, locks.register, locks.unregister, 2 * PAGE)
    pinned.start()
    pinned.wait()
    pinned.close()
    assert bytes(raw) == before


def test_addresses_are_known_to_lie_in_a_locked_slab() -> None:
    _, address = memory(8)
    locks = Locks(refuses=3)
    pinned = PinnedMemory(address, 8 * PAGE, PAGE, locks.register, locks.unregister, 2 * PAGE)
    asked = np.array([0, address - 1, *(address + at * PAGE for at in range(9)), (1 << 64) - 1], dtype=np.uint64)
    assert not pinned.are_pinned(asked).any()
    pinned.start()
    pinned.wait()
    assert pinned.are_pinned(asked).tolist() == [False] * 2 + [True] * 4 + [False] * 6
    pinned.close()
    assert not pinned.are_pinned(asked).any()


def test_an_empty_range_locks_nothing() -> None:
    pinned = PinnedMemory(PAGE, 0, PAGE, lambda address, size: None, lambda address: None)
    pinned.start()
    pinned.wait()
    assert not pinned.are_pinned(np.array([PAGE], dtype=np.uint64)).any()
    pinned.close()


def test_a_refused_slab_is_logged_and_ends_the_locking(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _, address = memory(8)
    locks = Locks(refuses=3)
    pinned = PinnedMemory(address, 8 * PAGE, PAGE, locks.register, locks.unregister, 2 * PAGE)
    pinned.start()
    pinned.wait()
    assert locks.tries == 3 and list(locks.locked) == [address, address + 2 * PAGE]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["DEBUG", "DEBUG", "WARNING", "INFO"]
    assert "from slab 2 of 4 on" in caplog.text and "OUT_OF_MEMORY" in caplog.text
    assert f"bytes={4 * PAGE} of={8 * PAGE} seconds=" in caplog.text
    pinned.close()
    assert locks.locked == {}


def test_closing_waits_for_the_current_slab_and_locks_no_more() -> None:
    _, address = memory(8)
    gate = threading.Event()
    locks = Locks(gate=gate)
    pinned = PinnedMemory(address, 8 * PAGE, PAGE, locks.register, locks.unregister, 2 * PAGE)
    pinned.start()
    while not locks.tries:
        pass
    closing = threading.Thread(target=pinned.close)
    closing.start()
    while not pinned.is_closed:
        pass
    gate.set()
    closing.join(10)
    assert locks.tries == 1 and locks.locked == {}
    pinned.close()  # a second call has no effect


def test_a_device_that_refuses_to_unlock_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    _, address = memory(4)
    library = FakeLibrary()
    pinned = library.open_device(2 * PAGE).pin(address, 4 * PAGE, PAGE)
    pinned.wait()
    assert set(library.registered.values()) == {2 * PAGE}
    library.registered.clear()  # a lost device returns an error for every call
    pinned.close()
    assert caplog.text.count("host memory not unlocked") == 2


def test_a_later_range_does_not_hide_an_earlier_one() -> None:
    (_first, first), (_second, second) = memory(4), memory(4)  # mapped as long as they are referenced
    library = FakeLibrary()
    device = library.open_device(2 * PAGE)
    tier = device.pin(first, 4 * PAGE, PAGE)
    trial = device.pin(second, 4 * PAGE, PAGE)
    tier.wait()
    trial.wait()
    assert len(library.registered) == 4
    trial.close()
    assert sorted(library.registered) == [first, first + 2 * PAGE]


def test_the_cpu_locks_nothing() -> None:
    pinned = CpuDevice(1).pin(0, 1 << 40, PAGE)
    pinned.wait()
    pinned.close()
    assert (pinned.pinned_bytes, pinned.slab_bytes) == (0, 0)
