"""The bytes of every route, the order of transfers, and their landings."""

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest
import xxhash

from tests.kvcache.store.builders import SMALL, GatedLane, LateLane, MoverBench, content, key, slots
from tiercel.kvcache.store.copy_run import merge_runs
from tiercel.kvcache.store.disk import DiskVerdict
from tiercel.values.errors import DeviceLostError, InvariantError
from tiercel.values.ids import SlotId
from tiercel.values.tier import KVSpec, Landing, Purpose, Route, Verdict

ODD = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=1, dtype="float32")  # 8 bytes a block
WIDE = KVSpec(layers=5, kv_heads=3, head_dim=64, block_size=16, dtype="float32")  # 120 KiB a block

BIG = KVSpec(layers=4, kv_heads=8, head_dim=128, block_size=16, dtype="float32")  # 512 KiB a block: 7 a piece


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("arena")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("spec", [SMALL, ODD, WIDE])
@pytest.mark.parametrize("route", [Route.SPILL, Route.RESTORE])
@pytest.mark.parametrize("seed", range(4))
def test_the_bytes_arrive_and_no_other_slot_is_touched(spec: KVSpec, route: Route, seed: int) -> None:
    bench = MoverBench(spec)
    assert bench.host is not None
    source, target = (bench.device, bench.host) if route is Route.SPILL else (bench.host, bench.device)
    draw = random.Random(seed)
    count = draw.randint(1, 40)
    sources = slots(*draw.sample(range(1, source.blocks + 1), count))
    targets = slots(*draw.sample(range(1, target.blocks + 1), count))
    if seed % 2:
        sources, targets = slots(*range(1, count + 1)), slots(*range(1, count + 1))
    expected = [content(target, slot) for slot in range(target.blocks + 1)]
    for origin, to in zip(sources, targets, strict=True):
        expected[to] = content(source, origin)
    before = [content(source, slot) for slot in range(source.blocks + 1)]
    transfer = bench.begin(route, sources, targets)
    (landing,) = bench.landings()
    assert [content(target, slot) for slot in range(target.blocks + 1)] == expected
    assert [content(source, slot) for slot in range(source.blocks + 1)] == before
    assert (landing.id, landing.verdict) == (transfer, Verdict.LANDED)
    assert bench.wakes == 1
    bench.mover.close()


def test_there_and_back_gives_the_same_bytes() -> None:
    bench = MoverBench(WIDE)
    before = [content(bench.device, slot) for slot in range(1, 31)]
    bench.begin(Route.SPILL, slots(*range(1, 31)), slots(*range(31, 61)))
    bench.landings()
    bench.device.kv.zero_()
    bench.begin(Route.RESTORE, slots(*range(31, 61)), slots(*range(10, 40)))
    bench.landings()
    assert [content(bench.device, slot) for slot in range(10, 40)] == before


@pytest.mark.parametrize("is_unified", [False, True])
def test_a_block_is_written_to_the_disk_and_read_back(is_unified: bool) -> None:
    bench = MoverBench(is_unified=is_unified)
    expected = content(bench.ram, 7)
    bench.begin(Route.PERSIST, slots(7), slots(3), keys=(key(9),))
    assert bench.landings() == [Landing(1, Verdict.LANDED, 0.001)]
    assert bench.disk.blocks == {2: (key(9), expected)}  # slot 3 of the pool is slot 2 of the volume
    bench.begin(Route.PREFETCH, slots(3), slots(20), keys=(key(9),))
    bench.landings()
    assert content(bench.ram, 20) == expected


def test_neighbours_on_both_sides_become_one_copy() -> None:
    assert list(merge_runs(slots(3, 1, 2, 7, 8, 5), slots(13, 11, 12, 2, 3, 14))) == [(1, 11, 3), (5, 14, 1), (7, 2, 2)]
    bench = MoverBench()
    bench.begin(Route.SPILL, slots(4, 3, 2, 9), slots(14, 13, 12, 19))
    (landing,) = bench.landings()
    assert landing.runs == 2
    spill = next(gauges for gauges in bench.mover.gauges() if gauges.route is Route.SPILL)
    assert (spill.transfers, spill.blocks, spill.copies, spill.bytes) == (1, 4, 2, 4 * SMALL.block_bytes)
    assert spill.seconds > 0


def test_an_urgent_transfer_overtakes_after_one_piece() -> None:
    lane = GatedLane()
    bench = MoverBench(BIG, lane=lane)
    background = bench.begin(Route.SPILL, slots(*range(1, 31)), slots(*range(1, 31)))
    while not bench.mover.bytes_in_flight(Route.SPILL):
        time.sleep(0.001)
    time.sleep(0.05)  # the first piece waits in the lane
    urgent = bench.begin(Route.SPILL, slots(35, 36), slots(50, 51), purpose=Purpose.SPILL)
    lane.gate.release(1000)
    assert [landing.id for landing in bench.landings(2)] == [urgent, background]
    assert lane.copies > 3  # cut to pieces


def test_no_copy_reaches_from_one_slab_of_host_memory_into_the_next() -> None:
    neighbours = slots(*range(1, 10))
    assert list(merge_runs(neighbours, slots(*range(6, 15)), target_slab=5)) == [(1, 6, 4), (5, 10, 5)]
    assert list(merge_runs(neighbours, neighbours, source_slab=4)) == [(1, 1, 3), (4, 4, 4), (8, 8, 2)]
    assert list(merge_runs(neighbours, neighbours, 4, 6)) == [(1, 1, 3), (4, 4, 2), (6, 6, 2), (8, 8, 2)]
    for route in (Route.SPILL, Route.RESTORE):
        bench = MoverBench(slab_slots=10)
        assert bench.host is not None
        source, target = (bench.device, bench.host) if route is Route.SPILL else (bench.host, bench.device)
        bench.begin(route, slots(*range(1, 41)), slots(*range(1, 41)))
        assert bench.landings()[0].runs == 5
        assert all(content(source, slot) == content(target, slot) for slot in range(1, 41))


def test_a_lane_with_a_depth_of_two_never_waits_for_the_worker() -> None:
    lane = LateLane()
    bench = MoverBench(BIG, lane=lane)
    assert bench.host is not None
    background = bench.begin(Route.SPILL, slots(*range(1, 31)), slots(*range(1, 31)))
    urgent = bench.begin(Route.SPILL, slots(35, 36), slots(50, 51), purpose=Purpose.SPILL)
    assert {landing.id: landing.verdict for landing in bench.landings(2)} == dict.fromkeys(
        (background, urgent), Verdict.LANDED
    )
    assert len(lane.queued) == len(lane.ended) > 3
    assert lane.max_flying in (2, 3)  # two of one transfer, and the one that overtook it
    assert all(content(bench.device, slot) == content(bench.host, slot) for slot in range(1, 31))
    spill = next(gauges for gauges in bench.mover.gauges() if gauges.route is Route.SPILL)
    assert spill.seconds > 0


def test_a_failed_transfer_ends_when_its_slots_are_not_written_any_more() -> None:
    for fails_at in (1, 2, 3):
        lane = LateLane(fails_at)
        bench = MoverBench(BIG, 30, 30, lane=lane)
        failed = bench.begin(Route.SPILL, slots(*range(1, 31)), slots(*range(1, 31)))
        assert [(landing.id, landing.verdict) for landing in bench.landings()] == [(failed, Verdict.FAILED)]
        assert len(lane.ended) == len(lane.queued) == fails_at + 1


def test_equally_urgent_transfers_go_in_order_of_arrival() -> None:
    lane = GatedLane()
    bench = MoverBench(lane=lane)
    began = [bench.begin(Route.RESTORE, slots(number), slots(number)) for number in range(1, 11)]
    lane.gate.release(1000)
    assert [landing.id for landing in bench.landings(10)] == began


def test_starting_never_waits_for_a_copy() -> None:
    lane = GatedLane()
    bench = MoverBench(lane=lane)
    started_s = time.monotonic()
    for number in range(1, 31):
        bench.begin(Route.SPILL, slots(number), slots(number))
    assert time.monotonic() - started_s < 1.0
    assert bench.mover.poll() == []
    assert bench.mover.bytes_in_flight(Route.SPILL) == 30 * SMALL.block_bytes
    lane.gate.release(1000)
    bench.landings(30)
    assert bench.mover.bytes_in_flight(Route.SPILL) == 0


def test_a_failed_copy_fails_its_transfer_and_no_other() -> None:
    lane = GatedLane()
    bench = MoverBench(lane=lane)
    lane.error = RuntimeError("no")
    failed = bench.begin(Route.SPILL, slots(1, 5), slots(1, 9))
    lane.gate.release()
    assert [(landing.id, landing.verdict) for landing in bench.landings()] == [(failed, Verdict.FAILED)]
    lane.error = None
    lane.gate.release(1000)
    bench.begin(Route.SPILL, slots(1, 5), slots(1, 9))
    assert bench.landings()[0].verdict is Verdict.LANDED
    spill = next(gauges for gauges in bench.mover.gauges() if gauges.route is Route.SPILL)
    assert (spill.transfers, spill.failures, spill.blocks) == (2, 1, 2)


def test_a_lost_device_is_reported() -> None:
    lane = GatedLane()
    lane.is_dead, lane.error = True, RuntimeError("an illegal memory access")
    bench = MoverBench(lane=lane)
    bench.begin(Route.SPILL, slots(1), slots(1))
    lane.gate.release(1000)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        bench.landings()


def test_a_late_read_keeps_its_slot_until_it_returns() -> None:
    bench = MoverBench()
    bench.disk.blocks[2] = (key(1), bytes(SMALL.block_bytes))
    bench.disk.verdicts = [DiskVerdict.LATE]
    transfer = bench.begin(Route.PREFETCH, slots(3), slots(4), keys=(key(1),))
    assert [landing.verdict for landing in bench.landings()] == [Verdict.LATE]
    assert bench.mover.bytes_in_flight(Route.PREFETCH) == SMALL.block_bytes
    bench.disk.report(transfer, DiskVerdict.RETURNED)
    assert [landing.verdict for landing in bench.landings()] == [Verdict.RETURNED]
    assert bench.mover.bytes_in_flight(Route.PREFETCH) == 0
    prefetch = next(gauges for gauges in bench.mover.gauges() if gauges.route is Route.PREFETCH)
    assert (prefetch.late, prefetch.blocks, prefetch.transfers) == (1, 0, 1)


def test_a_block_that_the_disk_does_not_have_is_a_miss() -> None:
    bench = MoverBench()
    bench.begin(Route.PREFETCH, slots(3), slots(4), keys=(key(1),))
    assert bench.landings()[0].verdict is Verdict.MISS


def test_landed_copies_of_a_kept_arena_are_signed_and_overwritten_ones_are_not(memfd: int) -> None:
    bench = MoverBench(fd=memfd)
    journal = bench.ram.journal
    assert journal is not None
    bench.begin(Route.SPILL, slots(1, 2), slots(11, 12), keys=(key(1), key(2)))
    bench.landings()
    bench.signed()
    assert dict(journal.records()) == {11: key(1), 12: key(2)}
    assert journal.digest(SlotId(11)) == xxhash.xxh3_128_digest(content(bench.ram, 11))
    bench.disk.verdicts = [DiskVerdict.LATE]  # the target is being overwritten until the call returns
    bench.begin(Route.PREFETCH, slots(3), slots(11), keys=(key(3),))
    assert dict(journal.records()) == {12: key(2)}
    bench.mover.forget(slots(12))
    assert dict(journal.records()) == {}


def test_a_prefetched_block_is_signed_too(memfd: int) -> None:
    bench = MoverBench(fd=memfd)
    bench.begin(Route.PERSIST, slots(7), slots(3), keys=(key(9),))
    bench.landings()
    bench.begin(Route.PREFETCH, slots(3), slots(20), keys=(key(9),))
    bench.landings()
    bench.signed()
    assert bench.ram.journal is not None
    assert dict(bench.ram.journal.records()) == {20: key(9)}


def test_in_a_unified_arena_a_step_may_overwrite_a_prefetched_block_before_it_is_signed(memfd: int) -> None:
    bench = MoverBench(fd=memfd, is_unified=True)
    journal = bench.ram.journal
    assert journal is not None
    bench.begin(Route.PERSIST, slots(7), slots(3), keys=(key(9),))
    bench.landings()
    bench.begin(Route.PREFETCH, slots(3), slots(20), keys=(key(9),))
    assert bench.landings()[0].verdict is Verdict.LANDED
    bench.ram.slot_bytes(SlotId(20))[0] ^= 1  # as a step would: no reference holds a landed copy
    bench.signed()
    assert dict(journal.records()) == {}
    bench.begin(Route.SIGN, slots(20), keys=(key(9),))  # a SIGN holds the slot
    bench.landings()
    assert dict(journal.records()) == {20: key(9)}


def test_blocks_of_a_unified_arena_are_signed_on_demand(memfd: int) -> None:
    bench = MoverBench(fd=memfd, is_unified=True)
    assert bench.ram.journal is not None
    bench.begin(Route.SIGN, slots(5, 6), keys=(key(5), key(6)))
    assert bench.landings()[0].verdict is Verdict.LANDED
    assert dict(bench.ram.journal.records()) == {5: key(5), 6: key(6)}
    with pytest.raises(InvariantError):
        bench.begin(Route.SPILL, slots(1), slots(2))


def test_a_found_copy_is_compared_with_its_checksum_and_its_key(memfd: int) -> None:
    bench = MoverBench(fd=memfd, is_unified=True)
    journal = bench.ram.journal
    assert journal is not None
    bench.begin(Route.SIGN, slots(1, 2, 3, 4), keys=(key(1), key(2), key(3), key(4)))
    bench.landings()
    bench.ram.slot_bytes(SlotId(2))[17] ^= 1
    verdicts = []
    for slot, name in ((1, 1), (2, 2), (3, 9), (5, 5)):  # right, flipped, another key, never signed
        bench.begin(Route.VERIFY, slots(slot), keys=(key(name),), purpose=Purpose.PREFETCH)
        verdicts.append(bench.landings()[0].verdict)
    assert verdicts == [Verdict.LANDED, Verdict.MISS, Verdict.MISS, Verdict.MISS]
    assert dict(journal.records()) == {1: key(1), 4: key(4)}


def test_a_slot_that_does_not_exist_is_refused_before_anything_is_written() -> None:
    bench = MoverBench()
    for sources, targets in ((slots(41), slots(1)), (slots(1), slots(61)), (slots(0), slots(1)), (slots(1), slots(-1))):
        with pytest.raises(InvariantError, match=r"mover\.slots"):
            bench.begin(Route.SPILL, sources, targets)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_transfers_leaves_the_expected_bytes(memfd: int, seed: int) -> None:
    bench = MoverBench(fd=memfd)
    assert bench.host is not None and bench.host.journal is not None
    draw = random.Random(seed)
    device = {slot: content(bench.device, slot) for slot in range(1, bench.device.blocks + 1)}
    host = {slot: content(bench.host, slot) for slot in range(1, bench.host.blocks + 1)}
    key_by_slot = {}  # of host slots that must be signed in the end
    for _ in range(40):
        free_above, free_below = draw.sample(sorted(device), 30), draw.sample(sorted(host), 50)
        started = 0
        for _ in range(draw.randint(1, 6)):  # at a time, on slots that no other transfer touches
            count = draw.randint(1, 6)
            below = [free_below.pop() for _ in range(count)]
            match draw.choice((Route.SPILL, Route.RESTORE, Route.PREFETCH)):
                case Route.SPILL:
                    above = [free_above.pop() for _ in range(min(count, len(free_above)))]
                    below = below[: len(above)]
                    names = tuple(key(draw.getrandbits(64)) for _ in above)
                    started += bool(above) and bool(
                        bench.begin(
                            Route.SPILL, slots(*above), slots(*below), keys=names, purpose=draw.choice(list(Purpose))
                        )
                    )
                    host |= {to: device[slot] for slot, to in zip(above, below, strict=True)}
                    key_by_slot |= dict(zip(below, names, strict=True))
                case Route.RESTORE:
                    above = [free_above.pop() for _ in range(min(count, len(free_above)))]
                    below = below[: len(above)]
                    started += bool(above) and bool(bench.begin(Route.RESTORE, slots(*below), slots(*above)))
                    device |= {to: host[slot] for slot, to in zip(below, above, strict=True)}
                case _:
                    name, payload = key(draw.getrandbits(64)), draw.randbytes(SMALL.block_bytes)
                    bench.disk.blocks[below[0]] = (name, payload)
                    started += bool(bench.begin(Route.PREFETCH, slots(below[0] + 1), slots(below[0]), keys=(name,)))
                    host[below[0]] = payload
                    key_by_slot[below[0]] = name
        assert all(landing.verdict is Verdict.LANDED for landing in bench.landings(started))
    bench.signed()
    assert {slot: content(bench.device, slot) for slot in device} == device
    assert {slot: content(bench.host, slot) for slot in host} == host
    assert dict(bench.host.journal.records()) == key_by_slot
    assert all(bench.mover.bytes_in_flight(route) == 0 for route in Route)
    bench.mover.close()


def test_waiting_for_a_landing_ends_with_it_or_with_the_time() -> None:
    lane = GatedLane()
    bench = MoverBench(lane=lane)
    bench.begin(Route.RESTORE, slots(1), slots(2))
    began_s = time.monotonic()
    bench.mover.wait_landing(0.02)
    assert time.monotonic() - began_s >= 0.02
    assert not bench.mover.poll()
    threading.Timer(0.01, lane.gate.release).start()
    bench.mover.wait_landing(30.0)
    assert time.monotonic() - began_s < 10.0
    assert [landing.verdict for landing in bench.mover.poll()] == [Verdict.LANDED]
    began_s = time.monotonic()
    bench.mover.wait_landing(0.02)  # the landing that was polled does not count again
    assert time.monotonic() - began_s >= 0.02
    bench.mover.close()
