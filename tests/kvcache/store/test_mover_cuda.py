"""The mover over the copy lanes of a GPU: real lanes, a library that stands in for libcuda, arenas of host memory."""

import random

import pytest

from tests.device.fake_cuda import ILLEGAL_ADDRESS, FakeLibrary
from tests.kvcache.store.builders import MoverBench, content, slots
from tiercel.device.cuda_driver import SourceOrder
from tiercel.values.errors import DeviceLostError
from tiercel.values.tier import KVSpec, Purpose, Route, Verdict

EVEN = KVSpec(layers=2, kv_heads=2, head_dim=64, block_size=4, dtype="float16")  # 4 KiB a block
ODD = KVSpec(layers=3, kv_heads=1, head_dim=64, block_size=4, dtype="float16")  # 3 KiB a block
SLAB = 40 << 10


@pytest.mark.parametrize("spec", [EVEN, ODD])
@pytest.mark.parametrize("version", [12, 0])
@pytest.mark.parametrize("refuses_after", [0, 2, 99])  # slabs
def test_any_transfers_leave_the_right_bytes(spec: KVSpec, version: int, refuses_after: int) -> None:
    library = FakeLibrary(version)
    library.refuses_after = refuses_after
    bench = MoverBench(spec, machine=library.open_device(SLAB))
    assert bench.host is not None
    draw = random.Random(version)
    above = [content(bench.device, slot) for slot in range(bench.device.blocks + 1)]
    below = [content(bench.host, slot) for slot in range(bench.host.blocks + 1)]
    for _ in range(12):
        count = draw.randint(1, 25)
        upper, lower = draw.sample(range(1, 41), 2 * (count // 2) + 2), draw.sample(range(1, 61), 2 * (count // 2) + 2)
        if draw.random() < 0.5:
            upper, lower = sorted(upper), sorted(lower)
        half = len(upper) // 2  # down and up at the same time, on slots of their own
        bench.begin(Route.SPILL, slots(*upper[:half]), slots(*lower[:half]), purpose=draw.choice(list(Purpose)))
        bench.begin(Route.RESTORE, slots(*lower[half:]), slots(*upper[half:]), purpose=draw.choice(list(Purpose)))
        for up, low in zip(upper[:half], lower[:half], strict=True):
            below[low] = above[up]
        for up, low in zip(upper[half:], lower[half:], strict=True):
            above[up] = below[low]
        assert all(landing.verdict is Verdict.LANDED for landing in bench.landings(2))
    assert [content(bench.device, slot) for slot in range(bench.device.blocks + 1)] == above
    assert [content(bench.host, slot) for slot in range(bench.host.blocks + 1)] == below
    assert bool(library.batches) == (version > 0 and refuses_after > 0)
    assert bool(library.singles) == (version == 0 or refuses_after < 99)
    bench.mover.close()


def test_a_piece_is_one_call_of_merged_neighbours_that_end_where_a_slab_does() -> None:
    library = FakeLibrary()
    bench = MoverBench(EVEN, machine=library.open_device(SLAB))  # slabs begin at slots 0, 10, 20, ...
    bench.begin(Route.SPILL, slots(*range(1, 25)), slots(*range(6, 30)))
    assert bench.landings()[0].runs == 3
    assert library.batches == [(SourceOrder.STREAM, 3)]
    bench.begin(Route.RESTORE, slots(6, 7, 8, 20, 30), slots(31, 32, 33, 3, 4))
    assert bench.landings()[0].runs == 3
    assert library.batches[1:] == [(SourceOrder.ANY, 3)]


def test_a_refused_batch_fails_its_transfer_and_a_lost_device_ends_the_engine() -> None:
    library = FakeLibrary()
    bench = MoverBench(EVEN, machine=library.open_device(SLAB))
    library.batch_status = 1
    bench.begin(Route.SPILL, slots(1, 2), slots(3, 4))
    assert bench.landings()[0].verdict is Verdict.FAILED
    library.batch_status = library.stream_status = ILLEGAL_ADDRESS
    bench.begin(Route.SPILL, slots(1, 2), slots(3, 4))
    with pytest.raises(DeviceLostError, match="ILLEGAL_ADDRESS"):
        bench.landings()
    bench.mover.close()
