"""The work repeated after preemptions for debt or share stays within its bound, also with a full DDR tier."""

import pytest
from msgspec.structs import replace

from benchmarks.scenarios.progress import draw_mix, play
from tiercel.scheduler.preemption_budget import LOSS_SHARE


@pytest.mark.parametrize("seed", [7044, 7074])
def test_copies_of_waiting_sequences_do_not_count_as_room_for_the_next_victim(seed: int) -> None:
    """A victim that is priced as moved evicts the last copies of the victim before it: that one computes all again."""
    mix = draw_mix(seed, 300)
    found = play(replace(mix, settings=replace(mix.settings, host_blocks=mix.settings.blocks)), "fair", 300)
    assert found.ended == len(mix.requests)
    assert found.worst_window <= LOSS_SHARE


def test_copies_of_its_own_victim_are_not_the_room_of_a_spill() -> None:
    mix = draw_mix(5063, 300)
    settings = replace(mix.settings, host_blocks=2 * mix.settings.blocks, async_depth=1)
    assert play(replace(mix, settings=settings), "fair", 300).worst_window <= LOSS_SHARE
