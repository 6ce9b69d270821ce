"""Speeds: the measurements at the start, and their corrections."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.measure.rate_book import RateBook
from tiercel.engine.measure.rates import measure_rates
from tiercel.engine.memory.capacity import size_pool
from tiercel.engine.memory.tiers import Tiers, open_tiers
from tiercel.engine.models.precision import Precision
from tiercel.kvcache.store.disk import DiskCounts
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import ManualClock, MonotonicClock
from tiercel.values.outcome import RouteGauges
from tiercel.values.rates import Rates
from tiercel.values.tier import KVSpec, Route
from tiercel.values.units import MIB

SPEC = KVSpec(layers=2, kv_heads=2, head_dim=32, block_size=16, dtype="float32")


class SlowModel:
    """A model that takes 1 ms per token, plus 1 us per token of its context."""

    layers, kv_heads, head_dim, vocab_size, max_model_len = 2, 2, 32, 50, 4096
    precision = Precision.of(torch.float32)
    impl, weights_bytes, fingerprint = "native", 0, bytes(32)

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.slots: set[int] = set()

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        self.slots |= set(state.slot_ids.tolist()) | set(state.block_tables.flatten().tolist())
        start = int(state.positions[0])
        self._clock.advance(len(tokens) * (1e-3 + 1e-6 * start))
        return torch.zeros(len(tokens), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def open_all(folder: Path, **changes: object) -> Tiers:
    settings = EngineSettings(
        model="unused",
        kv_cache_memory_bytes=MIB,
        kv_disk_paths=(str(folder),),
        kv_disk_bytes=2 * MIB,
        **changes,  # type: ignore[arg-type]
    )
    device = CpuDevice(1)
    capacity = size_pool(settings, SPEC, device, 64, 0)
    clock = MonotonicClock()
    return open_tiers(settings, SPEC, capacity, device, clock, None, b"model", lambda: None)


def test_every_route_is_measured_and_only_null_blocks_are_written(tmp_path: Path) -> None:
    tiers = open_all(tmp_path / "kv", cpu_device_pool=True)
    clock = MonotonicClock()
    model = SlowModel(ManualClock())
    rates = measure_rates(tiers, model, SPEC, InlineLane(), clock, 4096)  # type: ignore[arg-type]
    assert set(rates.bytes_per_s_by_route) == {Route.SPILL, Route.RESTORE, Route.PERSIST, Route.PREFETCH}
    assert all(rate > 1e6 for rate in rates.bytes_per_s_by_route.values())
    assert model.slots == {0}
    assert not tiers.ram.kv[1:].any() and not tiers.device.kv[1:].any()
    tiers.close()
    again = open_all(tmp_path / "kv")
    assert again.volume is not None
    assert list(again.volume.recover()) == []  # the trial has written nothing
    again.close()


def test_a_volume_in_use_is_read_and_not_written(tmp_path: Path) -> None:
    tiers = open_all(tmp_path / "kv")
    assert tiers.volume is not None
    stored = {slot: slot.to_bytes(32, "big") for slot in range(tiers.volume.slots) if slot}
    for slot, key in stored.items():
        tiers.volume.write(slot, key, memoryview(bytes([slot]) * SPEC.block_bytes))
    tiers.close()
    tiers = open_all(tmp_path / "kv")
    assert tiers.volume is not None
    model = SlowModel(ManualClock())
    rates = measure_rates(tiers, model, SPEC, InlineLane(), MonotonicClock(), 4096)  # type: ignore[arg-type]
    assert rates.bytes_per_s_by_route[Route.PERSIST] == rates.bytes_per_s_by_route[Route.PREFETCH]
    into = memoryview(bytearray(SPEC.block_bytes))
    assert all(tiers.volume.read(slot, key, into) and into[0] == slot for slot, key in stored.items())
    tiers.close()


def test_a_prefill_is_split_into_tokens_and_context(tmp_path: Path) -> None:
    tiers = open_all(tmp_path / "kv")
    clock = ManualClock()
    rates = measure_rates(tiers, SlowModel(clock), SPEC, InlineLane(), clock, 4096)  # type: ignore[arg-type]
    assert rates.prefill_token_s == pytest.approx(1e-3)
    assert rates.prefill_context_s == pytest.approx(1e-6)
    short = measure_rates(tiers, SlowModel(clock), SPEC, InlineLane(), clock, 2)  # type: ignore[arg-type]
    assert short.prefill_token_s == pytest.approx(1e-3)
    tiers.close()


def test_rates_follow_measurements_and_small_copies_count_little() -> None:
    book = RateBook(Rates(bytes_per_s_by_route={Route.RESTORE: 1e9}, block_bytes=1, block_size=1))
    book.note(Route.RESTORE, 1000, 1.0)
    assert book.rates.bytes_per_s_by_route[Route.RESTORE] > 0.9e9
    for _ in range(20):
        book.note(Route.RESTORE, 256 * MIB, 256 * MIB / 3e9)
    assert book.rates.bytes_per_s_by_route[Route.RESTORE] == pytest.approx(3e9, rel=1e-3)
    book.note(Route.PREFETCH, 100, 1.0)
    assert book.rates.bytes_per_s_by_route[Route.PREFETCH] == 100
    before = book.rates
    book.note(Route.RESTORE, 0, 1.0)
    book.note(Route.RESTORE, 100, 0.0)
    assert book.rates == before


def test_the_cost_of_a_prefill_follows_the_steps() -> None:
    book = RateBook(Rates(prefill_token_s=1e-3, prefill_context_s=1e-6, block_bytes=7))
    book.follow(StepCosts(linear_times(base_ms=1e-9, prefill_ms=2.0, context_ms=0.5)))
    chunk = 2048  # the table's largest
    assert book.rates.prefill_context_s == pytest.approx(0.5e-3 / chunk, rel=1e-2)
    assert book.rates.recompute_s(0, chunk) == pytest.approx(2e-3 * chunk, rel=1e-2)
    assert book.rates.recompute_s(1000, chunk) == pytest.approx(2e-3 * chunk + 0.5, rel=1e-2)
    assert book.rates.block_bytes == 7


def test_sums_since_the_start_become_rates() -> None:
    book = RateBook(Rates())
    book.learn([RouteGauges(route=Route.SPILL, bytes=1000, seconds=1.0)], DiskCounts(read_bytes=500, read_seconds=1.0))
    assert book.rates.bytes_per_s_by_route == {Route.SPILL: 1000, Route.PREFETCH: 500}
    big = 1000 + 256 * MIB
    for turn in range(1, 30):
        book.learn([RouteGauges(route=Route.SPILL, bytes=big * turn, seconds=turn / 2)], None)
    assert book.rates.bytes_per_s_by_route[Route.SPILL] == pytest.approx(2 * big, rel=1e-2)


SSD = Rates(
    bytes_per_s_by_route={Route.PREFETCH: 5e9, Route.RESTORE: 50e9}, prefill_token_s=5e-5, block_bytes=2 * MIB,
    block_size=16,
)  # fmt: skip


def slow_seconds(book: RateBook, seconds: int, before: DiskCounts) -> DiskCounts:
    """Let four threads read blocks of 240 ms each, and the book learn twice per second."""
    counts = before
    for _ in range(2 * seconds):
        reads = counts.reads + 8
        counts = DiskCounts(reads=reads, read_bytes=reads * 2 * MIB, read_seconds=counts.read_seconds + 8 * 0.24)
        book.learn((), counts, 0.5)
    return counts


def is_worth(book: RateBook) -> bool:
    return book.rates.load_s(Route.PREFETCH, 512) < book.rates.recompute_s(0, 512 * 16)


def test_after_a_slow_second_the_disk_is_used_again_within_minutes() -> None:
    book = RateBook(SSD)
    counts = slow_seconds(book, 2, DiskCounts())
    assert not is_worth(book)
    idle_s = 0.0
    while not is_worth(book):
        book.learn((), counts, 0.5)  # nothing is read, because recomputing is faster
        idle_s += 0.5
        assert idle_s < 300
    assert idle_s > 10, "a disk that is still slow is not asked all the time"


def test_an_estimate_recovers_by_half_in_thirty_seconds() -> None:
    books = RateBook(SSD), RateBook(SSD)
    for book in books:
        slow_seconds(book, 2, DiskCounts())
    low = books[0].rates.bytes_per_s_by_route[Route.PREFETCH]
    books[0].recover(30.0)
    books[1].recover(1e6)
    half_way, good = (book.rates.bytes_per_s_by_route[Route.PREFETCH] for book in books)
    assert half_way == pytest.approx((low * good) ** 0.5)
    assert 0.75 * 5e9 < good <= 5e9


def test_a_disk_that_stays_slow_is_found_to_be_slow() -> None:
    book, counts, trials = RateBook(SSD), DiskCounts(), 0
    for _ in range(24 * 3600 * 2):
        if is_worth(book):
            trials += 1
            counts = slow_seconds(book, 1, counts)
        else:
            book.learn((), counts, 0.5)
    assert 0 < trials < 200, "in a day"
    assert not is_worth(book)


def test_the_restore_rate_recovers_like_that_of_the_disk() -> None:
    book = RateBook(SSD)
    book.note(Route.RESTORE, 64 * MIB, 64 * MIB / 1e9)
    slow = book.rates.bytes_per_s_by_route[Route.RESTORE]
    assert slow < 10e9
    for _ in range(600):
        book.learn((), None, 0.5)
    assert book.rates.bytes_per_s_by_route[Route.RESTORE] > 0.7 * 50e9


def test_late_reads_are_measurements() -> None:
    book = RateBook(SSD)
    book.learn((), DiskCounts(late=4, late_bytes=8 * MIB, late_seconds=1.0), 0.5)
    assert book.rates.bytes_per_s_by_route[Route.PREFETCH] < 0.6 * 5e9


def test_a_rate_that_is_measured_continuously_does_not_drift() -> None:
    book = RateBook(SSD)
    for turn in range(1, 200):
        routes = [RouteGauges(route=Route.RESTORE, bytes=64 * MIB * turn, seconds=64 * MIB * turn / 20e9)]
        book.learn(routes, None, 0.5)
    assert book.rates.bytes_per_s_by_route[Route.RESTORE] == pytest.approx(20e9, rel=0.01)
