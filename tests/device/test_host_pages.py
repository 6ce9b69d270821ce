"""Mappings that can have huge pages, and memory that is put into them."""

import gc
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiercel.device import host_pages
from tiercel.device.host_pages import HUGE_PAGE_BYTES, collapse, map_file
from tiercel.device.pinned import PinnedMemory
from tiercel.kvcache.store.arena import open_arena
from tiercel.kvcache.store.memory_file import layout_of
from tiercel.values.tier import KVSpec

PAGE = mmap.PAGESIZE
SPEC = KVSpec(layers=3, kv_heads=1, head_dim=64, block_size=16, dtype="float16")  # 12 KiB a block
BLOCKS = 800  # 9.4 MiB


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("host-pages")
    yield fd
    os.close(fd)


def num_mappings() -> int:
    return sum("memfd:host-pages" in line for line in Path("/proc/self/maps").read_text().splitlines())


def huge_bytes(address: int) -> int:
    """Return the bytes of the mapping with this address that are in huge pages of a file."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            is_found = start <= address < end
        elif is_found and first == "ShmemPmdMapped:":
            return 1024 * int(rest.split()[0])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("size", [1, PAGE, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
@pytest.mark.sampled(2)
def test_a_file_is_mapped_on_a_multiple_of_2_mib_and_until_its_last_view_is_gone(memfd: int, size: int) -> None:
    os.ftruncate(memfd, size)
    before = num_mappings()

    raw = map_file(memfd, size)
    part = memoryview(raw)[size - 1 :]
    tensor = torch.frombuffer(raw, dtype=torch.uint8)

    assert (len(raw), raw.format, tensor.data_ptr() % HUGE_PAGE_BYTES) == (size, "B", 0)
    tensor[-1] = 7
    assert os.pread(memfd, 1, size - 1) == bytes(part) == b"\7"
    assert num_mappings() == before + 1
    del raw, tensor
    gc.collect()
    assert num_mappings() == before + 1
    del part
    gc.collect()
    assert num_mappings() == before


def test_a_descriptor_that_cannot_be_mapped_is_an_error_and_leaves_nothing_reserved() -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        with pytest.raises(OSError, match="Bad file descriptor"):
            map_file(10_000, PAGE)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 2


def test_less_than_a_huge_page_is_left_as_it_is() -> None:
    assert collapse(HUGE_PAGE_BYTES + 1, 2 * HUGE_PAGE_BYTES - 2) == 0


def test_the_blocks_of_a_kept_arena_begin_on_a_huge_page(memfd: int) -> None:
    arena = open_arena(SPEC, BLOCKS, torch.device("cpu"), memfd, b"model")
    assert layout_of(SPEC, b"model", BLOCKS + 1).arena_start == HUGE_PAGE_BYTES
    assert arena.kv.data_ptr() % HUGE_PAGE_BYTES == 0


def pin(arena_bytes: int, address: int) -> PinnedMemory:
    """Lock in slabs of 3 MiB, which end within huge pages."""
    pinned = PinnedMemory(
        address, arena_bytes, SPEC.block_bytes, lambda at, size: None, lambda at: None, slab_bytes=3 << 20
    )
    pinned.wait()
    return pinned


def test_a_tier_is_in_huge_pages_when_it_is_locked(memfd: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    arena = open_arena(SPEC, BLOCKS, torch.device("cpu"), memfd, b"model")
    arena.kv[5] = 3
    address = arena.kv.data_ptr()
    probe = open_arena(SPEC, BLOCKS, torch.device("cpu"), os.memfd_create("probe"), b"model")
    probe.kv[:] = 1
    if collapse(probe.kv.data_ptr(), HUGE_PAGE_BYTES):
        pytest.skip("this kernel cannot collapse pages of a memfd (Linux 6.1)")

    pinned = pin(arena.kv.nbytes, address)

    assert huge_bytes(address) == arena.kv.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    assert bool((arena.kv[5] == 3).all()) and not arena.kv[6:].any()
    assert "pages=2 MiB" in caplog.messages[-1]
    pinned.close()


def test_a_kernel_that_refuses_leaves_small_pages_and_one_line_says_so(
    memfd: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(host_pages, "_MADV_COLLAPSE", 12_345)  # an advice that no kernel knows
    arena = open_arena(SPEC, BLOCKS, torch.device("cpu"), memfd, b"model")

    pinned = pin(arena.kv.nbytes, arena.kv.data_ptr())

    assert pinned.pinned_bytes == arena.kv.nbytes
    (line,) = [line for line in caplog.messages if "pages=" in line]
    assert "pages=4 KiB: Invalid argument" in line
    pinned.close()
