"""The arithmetic of benchmarks/engine_kills.py and of ties, from made-up answers."""

import pytest

from benchmarks.engine_kills import DISTINCT, Kill, Kills, draw_bodies, judge, load_times_s
from benchmarks.ties import is_tie_between, token_margins
from benchmarks.whole_answer import TEXT, Outcome, WholeAnswer

PAGE = {"tiercel_resumed_tokens_total": 1000.0, "tiercel_resumed_cached_tokens_total": 900.0}


def stream(*times_s: float, outcome: Outcome = Outcome.ANSWERED) -> WholeAnswer:
    return WholeAnswer(TEXT, {}, outcome=outcome, piece_times_s=list(times_s))


def run_of(*answers: WholeAnswer) -> Kills:
    return Kills(answers=list(answers), kills=[Kill(10.0, 10.2)], open_streams=[2])


def missed(
    run: Kills, *, page: dict[str, float] = PAGE, wrong: tuple[str, ...] = (), limit_s: float = 4.0
) -> list[int]:
    """Return the places of the checks that are not met."""
    checks = judge(run, 1, limit_s, [1.0], page, wrong, ())
    return [place for place, (_, is_met) in enumerate(checks) if not is_met]


def test_the_next_token_counts_over_all_streams_and_a_pause_for_each() -> None:
    run = run_of(stream(9.0, 9.5, 13.0, 14.0), stream(9.9, 10.1, 12.0), stream(20.0))
    assert run.next_tokens_s() == [2.0]
    assert run.pauses_s() == [3.5, pytest.approx(1.9)]


def test_a_kill_without_a_later_token_is_missed() -> None:
    run = run_of(stream(9.0))
    assert run.next_tokens_s() == [float("inf")]
    assert missed(run) == [3]


def test_a_good_run_misses_no_check() -> None:
    assert missed(run_of(stream(9.0, 12.0))) == []


def test_each_promise_is_a_check_of_its_own() -> None:
    good = stream(9.0, 12.0)
    assert missed(Kills(answers=[good], kills=[], open_streams=[])) == [0, 3]
    assert missed(run_of(good, stream(outcome=Outcome.FAILED))) == [1]
    assert missed(run_of(good), wrong=("kill-0-1",)) == [2]
    assert missed(run_of(good), limit_s=1.9) == [3]
    assert missed(run_of(good), page={**PAGE, "tiercel_resumed_cached_tokens_total": 899.0}) == [4]
    assert missed(run_of(good), page={}) == [4]


def test_half_of_the_requests_are_greedy_and_half_have_a_seed() -> None:
    bodies = draw_bodies(1, 300, 200)
    assert len(bodies) == DISTINCT
    assert sum("seed" in body for body in bodies) == DISTINCT // 2
    assert bodies == draw_bodies(1, 300, 200)


def test_load_times_are_read_from_the_log() -> None:
    assert load_times_s('{"event": "ready", "load_s": 2.5}\ntiercel serves\n{"load_s": 3, "event": "ready"}') == [
        2.5,
        3.0,
    ]


MARGINS = [("a", 1.0), ("bc", 5e-5), ("d", 2.0)]


@pytest.mark.parametrize(("served", "is_tie"), [("aXX", True), ("Xbc", False), ("abcX", False), ("abcd", False)])
def test_an_answer_is_excused_only_where_it_leaves_at_a_tie(served: str, is_tie: bool) -> None:
    assert is_tie_between(served, MARGINS) is is_tie


def test_margins_are_read_from_chats_and_completions() -> None:
    tops = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    assert token_margins({"content": [{"token": "a", "top_logprobs": tops}]}) == [("a", 1.0)]
    assert token_margins({"tokens": ["a"], "top_logprobs": [{"a": -0.5, "b": -1.5}]}) == [("a", 1.0)]
    assert token_margins({"tokens": ["a"], "top_logprobs": [{"a": -0.5}]}) == [("a", float("inf"))]
