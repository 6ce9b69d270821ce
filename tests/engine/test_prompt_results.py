"""The results of prompts on their way from steps to reports."""

from array import array

import pytest

from tiercel.engine.prompt_results import PromptResults, portions
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.policy import open_policy
from tiercel.values.ids import SeqId
from tiercel.values.outcome import PromptReading
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import MAX_FRAME_BYTES, Report, encode_frame

SEQ = SeqId(1)
PROMPT = list(range(10))


def part(start: int, end: int, num_top: int = 2) -> PromptReading:
    """Return log-probabilities that name their positions."""
    places = range(start, end)
    return PromptReading(
        seq=SEQ,
        start=start,
        end=end,
        num_top=num_top,
        logprobs=array("f", places).tobytes(),
        ranks=array("I", places).tobytes(),
        top_tokens=array("I", [10 * place + rank for place in places for rank in range(num_top)]).tobytes(),
        top_logprobs=array("f", [place + rank for place in places for rank in range(num_top)]).tobytes(),
    )


def opened(params: SamplingParams, num_read: int = 0) -> tuple[PromptResults, SequenceBook]:
    book = SequenceBook(open_policy("fcfs"), 96, ())
    cache = CacheManager(24, 4, b"test")
    request = Request(id=SEQ, prompt=pack_tokens(PROMPT), params=params, arrival_s=0.0, num_read=num_read)
    cache.open(SEQ, book.add(request).tokens, b"")
    results = PromptResults(book, cache)
    results.open(SEQ)
    return results, book


def places(reports: list[Report]) -> list[float]:
    return [place for report in reports for one in report.prompts for place in array("f", one.logprobs)]


def test_every_position_is_reported_once_however_often_it_is_computed() -> None:
    results, book = opened(SamplingParams(prompt_logprobs=2))
    assert places(list(results.take([part(0, 4)]))) == [0, 1, 2, 3]
    assert places(list(results.take([part(0, 3)]))) == []  # preempted, and computed again
    assert places(list(results.take([part(3, 6)]))) == [4, 5]
    assert places(list(results.take([part(7, 9)]))) == []  # behind a step that was voided
    assert book[SEQ].has_unread
    reports = list(results.take([part(6, 9)]))
    assert places(reports) == [6, 7, 8]
    assert array("I", reports[0].prompts[0].top_tokens).tolist() == [60, 61, 70, 71, 80, 81]
    assert not book[SEQ].has_unread
    assert places(list(results.take([part(0, 9)]))) == []


def test_a_resumed_prompt_goes_on_behind_what_the_client_has() -> None:
    results, book = opened(SamplingParams(prompt_logprobs=0), num_read=5)
    assert places(list(results.take([part(4, 9, 0)]))) == [5, 6, 7, 8]
    assert not book[SEQ].has_unread


def test_results_of_a_sequence_that_has_ended_are_left_out() -> None:
    results, _ = opened(SamplingParams(prompt_logprobs=2))
    stranger = PromptReading(seq=SeqId(2), start=0, end=1, logprobs=b"\0" * 4, ranks=b"\0" * 4)
    assert list(results.take([stranger])) == []


def sums(start: int, end: int) -> PromptReading:
    """Return the sum of states that are [place, 1]."""
    state_sum = array("f", [sum(range(start, end)), end - start]).tobytes()
    return PromptReading(seq=SEQ, start=start, end=end, state_sum=state_sum)


def test_the_mean_of_the_states_is_reported_with_the_last_position() -> None:
    results, _ = opened(SamplingParams(max_tokens=0, pooling="mean"))
    assert list(results.take([sums(0, 4)])) == []
    assert list(results.take([sums(6, 8)])) == []  # behind a step that was voided
    (report,) = results.take([sums(4, 7), sums(7, 10)])
    assert array("f", report.pooled[0].vector).tolist() == [4.5, 1]


def test_the_last_state_needs_no_other_position() -> None:
    results, book = opened(SamplingParams(max_tokens=0, pooling="last"))
    assert book[SEQ].num_read == 9
    (report,) = results.take([sums(9, 10)])
    assert array("f", report.pooled[0].vector).tolist() == [9, 1]


@pytest.mark.parametrize("num_top", [0, 1, 5, 200])
def test_portions_are_bounded_and_have_every_position_once(num_top: int) -> None:
    whole = part(3, 90, num_top)
    cut = list(portions(whole, limit_bytes=512))
    assert [place for one in cut for place in array("f", one.logprobs)] == list(range(3, 90))
    assert b"".join(one.top_tokens for one in cut) == whole.top_tokens
    assert all(one.num_bytes <= max(512, 8 * (1 + num_top)) for one in cut)


def test_a_portion_of_a_whole_vocabulary_fits_into_a_frame() -> None:
    positions, vocab_size = 40, 200_000
    whole = PromptReading(
        seq=SEQ,
        start=0,
        end=positions,
        num_top=vocab_size,
        logprobs=bytes(4 * positions),
        ranks=bytes(4 * positions),
        top_tokens=bytes(4 * positions * vocab_size),
        top_logprobs=bytes(4 * positions * vocab_size),
    )
    assert max(len(encode_frame(Report(prompts=(one,)))) for one in portions(whole)) < MAX_FRAME_BYTES // 100


def test_pooling_is_no_generation() -> None:
    with pytest.raises(ValueError, match="max_tokens 0"):
        SamplingParams(pooling="mean")
