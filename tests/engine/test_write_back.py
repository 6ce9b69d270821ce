"""Write-back in virtual time: as many blocks in flight as the link copies in 10 ms."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.engine.test_loop_tiers import TierBench
from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.clock import ManualClock
from tiercel.values.outcome import RouteGauges
from tiercel.values.tier import Landing, Purpose, Route, Transfer

H200 = SimRates()  # 50 GB/s and blocks of 2 MiB
STEP_S = 0.01
SEQUENCES = 256  # with blocks of four tokens they grow by 64 blocks a step
CONSTANT = TierLimits(always_loads=True, shadow_share=0.9, write_back_s=0.0)  # 16 blocks, whatever the link
BY_SPEED = TierLimits(always_loads=True, shadow_share=0.9)


class WatchedMover:
    """Counts the blocks that are copied down, by purpose."""

    def __init__(self, mover: SimMover) -> None:
        self.blocks: Counter[Purpose] = Counter()
        self.largest: Counter[Purpose] = Counter()
        self._mover = mover

    def start(self, transfers: Iterable[Transfer]) -> None:
        started = list(transfers)
        for transfer in started:
            if transfer.route is Route.SPILL:
                self.blocks[transfer.purpose] += len(transfer.keys)
                self.largest[transfer.purpose] = max(self.largest[transfer.purpose], len(transfer.keys))
        self._mover.start(started)

    def poll(self) -> list[Landing]:
        return self._mover.poll()

    def gauges(self) -> tuple[RouteGauges, ...]:
        return self._mover.gauges()


class WriteBackBench(TierBench):
    """A `TierBench` with steps of 10 ms, and a large DDR tier."""

    def __init__(self, blocks: int, limits: TierLimits, rates: SimRates = H200, seqs: int = SEQUENCES) -> None:
        self.watched: list[WatchedMover] = []

        def watch(mover: SimMover, clock: ManualClock) -> WatchedMover:
            self.watched.append(WatchedMover(mover))
            return self.watched[0]

        super().__init__(
            blocks=blocks, host=40_000, seqs=seqs, tokens=8192, rates=rates, limits=limits, max_len=8192, wrap=watch,
            step_s=lambda slices: STEP_S,
        )  # fmt: skip

    def step(self) -> bool:
        """Do the same as `TierBench.step`, without checking thousands of blocks after every step."""
        is_busy, due_s = self.loop.step(), self.mover.next_landing_s
        if not is_busy and due_s is not None:
            self.clock.advance(max(0.0, due_s - self.clock.now_s()) + 1e-9)
        return is_busy or due_s is not None

    @property
    def down(self) -> WatchedMover:
        return self.watched[0]


@pytest.mark.parametrize(("limits", "keeps_up"), [(CONSTANT, False), (BY_SPEED, True)], ids=["constant", "by speed"])
@pytest.mark.sampled(1)
def test_write_back_on_a_fast_link_keeps_up_with_the_growth_of_many_sequences(
    limits: TierLimits, keeps_up: bool
) -> None:
    """Then a victim's blocks are below before it is preempted: only the last one may still have to be copied."""
    bench = WriteBackBench(3000, limits)
    for number in range(SEQUENCES):
        bench.submit([number % 11, number % 7, number // 7 % 11, number // 77] * 4, max_tokens=64)

    bench.run()

    bench.assert_all_right()
    preemptions = bench.book.preemption_counts.total
    assert preemptions > 50
    assert (bench.down.blocks[Purpose.SPILL] <= preemptions) == keeps_up


@pytest.mark.parametrize(
    ("rate", "blocks", "limits", "flying"),
    [
        (50e9, 4000, BY_SPEED, 238),  # 10 ms at 50 GB/s
        (1e9, 4000, BY_SPEED, 16),  # a slow link still has the constant number
        (50e9, 800, BY_SPEED, 100),  # an eighth of HBM
        (50e9, 4000, TierLimits(always_loads=True, shadow_share=0.9, carried_blocks=40), 40),
        (50e9, 4000, TierLimits(always_loads=True, shadow_share=0.9, background_blocks=300), 300),
    ],
)
def test_the_number_of_blocks_in_flight_has_bounds(rate: float, blocks: int, limits: TierLimits, flying: int) -> None:
    bench = WriteBackBench(blocks, limits, SimRates(spill_bytes_per_s=rate), seqs=2)
    bench.submit([number % 11 for number in range(2400)], max_tokens=8)

    bench.run()

    bench.assert_all_right()
    assert bench.down.largest[Purpose.BACKGROUND] == flying


def test_nothing_is_written_back_without_background_blocks() -> None:
    bench = WriteBackBench(4000, TierLimits(always_loads=True, background_blocks=0), seqs=2)
    bench.submit([number % 11 for number in range(2400)], max_tokens=8)

    bench.run()

    assert not bench.down.blocks
