"""The predicted and measured costs of preemptions. Only the parts of steps that repeat work count."""

import pytest

from tiercel.scheduler.account import Account
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.scheduler.preemption_book import PreemptionBook, ReturnedVictim
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId
from tiercel.values.plan import Slice, SwapCost
from tiercel.values.request import Request, SamplingParams, pack_tokens

COST = SwapCost(0.25, 0.5)
COSTS = StepCosts(linear_times(base_ms=1.0, prefill_ms=1.0, decode_ms=1.0, context_ms=1e-9))


def piece(seq: int, start: int, length: int) -> tuple[SequenceProgress, Slice]:
    request = Request(id=SeqId(seq), prompt=pack_tokens([1]), params=SamplingParams(), arrival_s=0.0)
    return SequenceProgress(request, Account(0, request.tenant), 100), Slice(SeqId(seq), start, length, samples=True)


def step(book: PreemptionBook, measured_s: float, *pieces: tuple[SequenceProgress, Slice]) -> list[ReturnedVictim]:
    book.launch(pieces, COSTS)
    book.settle(measured_s)
    return list(book.take_returned())


def test_steps_that_compute_lost_tokens_again_add_up_until_the_last_one() -> None:
    book = PreemptionBook()
    book.preempt(SeqId(1), COST, 40, is_swap=False)
    assert not step(book, 1.0, piece(1, 0, 16))
    assert not step(book, 2.0, piece(1, 16, 16))
    (back,) = step(book, 4.0, piece(1, 32, 16))
    assert (back.seq, back.is_swap, back.tokens, back.cost) == (1, False, 40, COST)
    assert back.recompute_s == pytest.approx(1.0 + 2.0 + 4.0 / 2), "half of the last slice was new"
    assert not step(book, 8.0, piece(1, 48, 1)), "a return is reported once"


def test_a_step_is_divided_among_its_sequences() -> None:
    book = PreemptionBook()
    book.preempt(SeqId(1), COST, 32, is_swap=False)
    (back,) = step(book, 3.0, piece(1, 0, 32), piece(2, 0, 64))
    assert back.recompute_s == pytest.approx(3.0 * 32.5 / 97)


def test_a_victim_with_all_its_blocks_restored_repeats_no_work() -> None:
    book = PreemptionBook()
    book.preempt(SeqId(1), COST, 32, is_swap=True)
    (back,) = step(book, 1.0, piece(1, 32, 1))
    assert back.recompute_s == 0


def test_a_void_step_costs_nothing_and_ends_nothing() -> None:
    book = PreemptionBook()
    book.preempt(SeqId(1), COST, 32, is_swap=False)
    assert not step(book, 0.0, piece(1, 0, 33))
    (back,) = step(book, 1.0, piece(1, 0, 32))
    assert back.recompute_s == pytest.approx(1.0)


def test_steps_in_flight_behind_the_last_repeating_one_change_nothing() -> None:
    book = PreemptionBook()
    book.preempt(SeqId(1), COST, 32, is_swap=True)
    for start in (32, 33):
        book.launch([piece(1, start, 1)], COSTS)
    book.settle(1.0)
    book.settle(1.0)
    assert len(list(book.take_returned())) == 1


def test_a_victim_preempted_again_is_tracked_afresh_and_an_ended_victim_is_dropped() -> None:
    book = PreemptionBook()
    book.preempt(SeqId(1), COST, 32, is_swap=False)
    book.launch([piece(1, 0, 16)], COSTS)
    book.preempt(SeqId(1), COST, 48, is_swap=True)
    book.settle(5.0)
    (back,) = step(book, 1.0, piece(1, 0, 48))
    assert (back.is_swap, back.tokens, back.recompute_s) == (True, 48, pytest.approx(1.0))
    book.preempt(SeqId(1), COST, 32, is_swap=False)
    book.drop(SeqId(1))
    assert not step(book, 1.0, piece(1, 0, 33))


def test_predicted_and_measured_costs_are_counted_by_mode() -> None:
    book = PreemptionBook()
    assert book.record_return(ReturnedVictim(SeqId(1), True, 32, COST, 0.125), copied_s=1.0) == 1.125
    book.record_return(ReturnedVictim(SeqId(2), False, 32, COST, 2.0), copied_s=0.0)
    book.record_return(ReturnedVictim(SeqId(3), True, 32, SwapCost(float("inf"), 0.5), 2.0), copied_s=0.0)
    swap, recompute = book.gauges()
    assert (swap.mode, swap.count, swap.predicted_s, swap.realised_s) == ("swap", 1, 0.25, 1.125)
    assert (recompute.mode, recompute.count, recompute.predicted_s, recompute.realised_s) == ("recompute", 1, 0.5, 2.0)
