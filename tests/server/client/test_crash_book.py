"""Deaths of engines, and what follows from them."""

import pytest

from tiercel.server.client.crash_book import CrashBook, CrashVerdict, Death, DeathKind
from tiercel.values.ids import SeqId
from tiercel.wire.step_record import ANY_SEQ, EngineTrail

ONE, TWO, THREE = SeqId(1), SeqId(2), SeqId(3)


def death(
    *seqs: SeqId, kind: DeathKind = DeathKind.SIGNAL, entering: SeqId | None = None, had_progress: bool = False
) -> Death:
    return Death(kind, "", EngineTrail(entering, dict.fromkeys(seqs, 10)), had_progress)


def test_the_sequences_of_a_step_in_flight_are_suspected() -> None:
    verdict = CrashBook().judge(death(ONE, TWO), {ONE: 0, TWO: 0, THREE: 0}, 0.0)
    assert verdict == CrashVerdict(suspects={ONE: 10, TWO: 10})


def test_a_suspect_that_dies_alone_is_failed() -> None:
    assert CrashBook().judge(death(ONE), {ONE: 10, TWO: 10}, 0.0).failed == ONE


def test_a_sequence_that_ran_alone_by_chance_is_only_suspected() -> None:
    assert CrashBook().judge(death(ONE), {ONE: 0}, 0.0) == CrashVerdict(suspects={ONE: 10})


def test_suspects_that_die_together_are_not_failed() -> None:
    assert CrashBook().judge(death(ONE, TWO), {ONE: 10, TWO: 10}, 0.0).failed is None


def test_a_kill_from_outside_fails_a_suspect_only_the_third_time() -> None:
    book, killed = CrashBook(), death(ONE, kind=DeathKind.KILLED)
    assert book.judge(killed, {ONE: 10}, 0.0).suspects == {ONE: 10}
    assert book.judge(killed, {ONE: 10}, 1.0).suspects == {ONE: 10}
    assert book.judge(killed, {ONE: 10}, 2.0).failed == ONE


def test_kills_from_outside_are_counted_until_the_suspect_has_passed_its_step() -> None:
    book, killed = CrashBook(), death(ONE, kind=DeathKind.KILLED)
    for round_s in range(0, 30, 10):
        assert book.judge(killed, {ONE: 10, TWO: 0}, round_s + 0.0).failed is None
        assert book.judge(killed, {ONE: 10, TWO: 0}, round_s + 1.0).failed is None
        assert book.judge(death(TWO), {ONE: 0, TWO: 0}, round_s + 2.0).failed is None, "it was not suspected any more"


def test_a_request_that_kills_twice_while_it_is_taken_in_is_failed() -> None:
    book = CrashBook()
    known = {ONE: 0, TWO: 0}
    assert book.judge(death(TWO, entering=ONE), known, 0.0) == CrashVerdict()
    assert book.judge(death(entering=ONE), known, 1.0).failed == ONE


def test_a_sequence_that_has_ended_is_not_suspected() -> None:
    assert CrashBook().judge(death(ONE, TWO), {TWO: 0}, 0.0).suspects == {TWO: 10}


@pytest.mark.parametrize("between_s", [0.0, 29.0])
def test_three_deaths_without_a_suspect_are_a_loop(between_s: float) -> None:
    book = CrashBook()
    verdicts = [book.judge(death(), {ONE: 0}, number * between_s) for number in range(3)]
    assert [verdict.is_crash_loop for verdict in verdicts] == [False, False, True]
    assert verdicts[0].delay_s < verdicts[1].delay_s


def test_deaths_that_are_far_apart_are_no_loop() -> None:
    book = CrashBook()
    assert not any(book.judge(death(), {}, number * 31.0).is_crash_loop for number in range(9))


def test_deaths_of_engines_that_served_are_no_loop() -> None:
    book = CrashBook()
    assert not any(book.judge(death(had_progress=True), {ONE: 0}, 0.0).is_crash_loop for _ in range(9))


def test_after_a_death_in_planning_every_sequence_runs_alone_and_the_cause_is_found() -> None:
    book, known = CrashBook(), {ONE: 0, TWO: 0}
    verdict = book.judge(death(TWO, entering=ANY_SEQ, kind=DeathKind.EXIT), known, 0.0)
    assert verdict.suspects == {ONE: 1, TWO: 10}
    assert verdict.failed is None
    assert not verdict.is_crash_loop
    known = {ONE: 1, TWO: 10}
    assert book.judge(death(entering=ONE, kind=DeathKind.EXIT), known, 1.0) == CrashVerdict()
    assert book.judge(death(entering=ONE, kind=DeathKind.EXIT), known, 2.0).failed == ONE


def test_a_kill_from_outside_while_a_step_is_planned_makes_no_suspects_of_those_that_wait() -> None:
    verdict = CrashBook().judge(death(TWO, entering=ANY_SEQ, kind=DeathKind.KILLED), {ONE: 0, TWO: 0}, 0.0)
    assert verdict.suspects == {TWO: 10}


def test_deaths_in_planning_that_never_name_a_sequence_are_a_loop() -> None:
    book = CrashBook()
    verdicts = [book.judge(death(entering=ANY_SEQ), {ONE: 1}, float(number)) for number in range(3)]
    assert [verdict.is_crash_loop for verdict in verdicts] == [False, False, True]
