"""The cost of preempting a victim: its blocks by the routes that they take, and its tokens to compute again."""

import pytest

from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import PreemptionMode
from tiercel.values.rates import Rates
from tiercel.values.tier import Route

BLOCK = 16
SPILL_S, RESTORE_S, PERSIST_S, PREFETCH_S = 1e-3, 2e-3, 40e-3, 20e-3  # of one block
TOKEN_S = 1e-3
ROUTES = {Route.SPILL: SPILL_S, Route.RESTORE: RESTORE_S, Route.PERSIST: PERSIST_S, Route.PREFETCH: PREFETCH_S}
DDR_ONLY = (Route.SPILL, Route.RESTORE)
SSD_ONLY = (Route.PERSIST, Route.PREFETCH)


def chooser(*routes: Route, mode: PreemptionMode = "auto", token_s: float = TOKEN_S) -> SwapChooser:
    """Return a chooser for a machine with these routes; with all routes if none is given."""
    rates = Rates(
        bytes_per_s_by_route={route: 1000.0 / ROUTES[route] for route in routes or ROUTES},
        prefill_token_s=token_s,
        block_bytes=1000,
        block_size=BLOCK,
    )
    return SwapChooser(mode, lambda: rates)


def test_dirty_blocks_are_spilled_to_ddr_and_restored_from_it_if_there_is_ddr() -> None:
    assert chooser().cost(10, 0, 0, 160).swap_s == pytest.approx(10 * (SPILL_S + RESTORE_S))
    assert chooser(*DDR_ONLY).cost(10, 0, 0, 160).swap_s == pytest.approx(10 * (SPILL_S + RESTORE_S))


def test_dirty_blocks_go_to_the_ssd_if_there_is_no_ddr() -> None:
    assert chooser(*SSD_ONLY).cost(10, 0, 0, 160).swap_s == pytest.approx(10 * (PERSIST_S + PREFETCH_S))


def test_the_speed_of_the_ssd_does_not_change_the_cost_of_blocks_in_ddr() -> None:
    routes = {**ROUTES, Route.PERSIST: 1e-6, Route.PREFETCH: 1e-6}
    rates = Rates(bytes_per_s_by_route={route: 1000.0 / one_s for route, one_s in routes.items()}, block_bytes=1000)
    assert SwapChooser("auto", lambda: rates).cost(10, 10, 0, 320).swap_s == pytest.approx(
        10 * SPILL_S + 20 * RESTORE_S
    ), "blocks that lie in DDR cannot take the SSD's route"


def test_blocks_that_are_only_on_the_ssd_are_restored_through_ddr() -> None:
    assert chooser().cost(0, 0, 10, 160).swap_s == pytest.approx(10 * (PREFETCH_S + RESTORE_S))


def test_blocks_that_are_only_on_the_ssd_are_restored_directly_if_there_is_no_ddr() -> None:
    assert chooser(*SSD_ONLY).cost(0, 0, 10, 160).swap_s == pytest.approx(10 * PREFETCH_S)


def test_a_clean_victim_is_recomputed_if_reading_its_copies_costs_more() -> None:
    fast = chooser(token_s=1e-3)  # 16 ms per block: more than a restore from DDR, less than a read from the SSD
    assert fast.decide(0, 10, 0, 160).swaps
    assert not fast.decide(0, 0, 10, 160).swaps


def test_tokens_behind_the_last_kept_block_are_computed_again_in_both_ways() -> None:
    cost = chooser().cost(1, 0, 0, 160)  # the lower tier has space for one block of ten
    assert cost.swap_s == pytest.approx(SPILL_S + RESTORE_S + 144 * TOKEN_S)
    assert cost.recompute_s == pytest.approx(160 * TOKEN_S)


def test_recompute_restores_the_clean_blocks_unless_computing_them_is_cheaper() -> None:
    cost = chooser().cost(1, 9, 0, 160)
    assert cost.recompute_s == pytest.approx(9 * RESTORE_S + 16 * TOKEN_S)
    slow = chooser(*SSD_ONLY, token_s=1e-3)
    assert slow.cost(1, 0, 9, 160).recompute_s == pytest.approx(160 * TOKEN_S), "reading them would take longer"


def test_auto_chooses_the_cheaper_way_and_the_other_modes_are_fixed() -> None:
    for token_s, is_swap in ((1e-2, True), (1e-5, False)):
        assert chooser(token_s=token_s).decide(10, 0, 0, 160).swaps is is_swap
        assert chooser(token_s=token_s, mode="swap").decide(10, 0, 0, 160).swaps
        assert not chooser(token_s=token_s, mode="recompute").decide(10, 0, 0, 160).swaps


def test_a_victim_without_blocks_that_a_lower_tier_can_hold_is_recomputed() -> None:
    for mode in ("auto", "swap", "recompute"):
        decision = chooser(mode=mode).decide(0, 0, 0, 12)
        assert not decision.swaps
        assert decision.chosen_s == pytest.approx(12 * TOKEN_S)


def test_long_contexts_are_swapped_and_short_ones_recomputed() -> None:
    rates = Rates(
        bytes_per_s_by_route={Route.SPILL: 1e6, Route.RESTORE: 1e6},
        prefill_token_s=1e-5,
        prefill_context_s=1e-7,
        block_bytes=1000,
        block_size=BLOCK,
    )
    auto = SwapChooser("auto", lambda: rates)
    assert [auto.decide(blocks, 0, 0, BLOCK * blocks).swaps for blocks in (4, 64, 256)] == [False, False, True]


def test_a_decision_gives_the_cost_of_the_chosen_way() -> None:
    decision = chooser().decide(10, 0, 0, 160)
    assert decision.chosen_s == decision.cost.swap_s
    decision = chooser(mode="recompute").decide(10, 0, 0, 160)
    assert decision.chosen_s == decision.cost.recompute_s
