"""A small FastSwitch replay: bytes moved and tokens generated. The benchmark checks times."""

from dataclasses import replace
from functools import cache
from itertools import islice, pairwise, repeat
from typing import get_args

import pytest

from benchmarks import fastswitch, fastswitch_replay, fastswitch_trace
from benchmarks.fastswitch_replay import ALL_OFF, BUILDS, FULL, NO_REUSE, Build, Replay, Result
from benchmarks.fastswitch_trace import Pattern
from tests.seeds import fast_and_slow
from tiercel.values.errors import InvariantError

FREQUENCY = 0.25  # updates per step: many switches in few steps
TRACE = fastswitch_trace.conversations(16, seed=0, scale=0.15)


@cache
def num_blocks() -> int:
    return fastswitch_replay.budget_blocks(fastswitch_replay.endless(TRACE))


def replay(build: Build, pattern: Pattern = "random") -> Replay:
    """Return a replay that has not run."""
    return Replay(TRACE, build, num_blocks(), fastswitch_trace.priorities(pattern, len(TRACE), 1), FREQUENCY)


@cache
def played(build: Build, pattern: Pattern = "random") -> tuple[Replay, Result]:
    """Return a replay that has run, and its result. Replays are deterministic, so that tests may share them."""
    one = replay(build, pattern)
    return one, one.run()


@pytest.mark.parametrize("pattern", get_args(Pattern))
@pytest.mark.parametrize("build", fast_and_slow([FULL], BUILDS[1:]), ids=lambda build: build.name)
@pytest.mark.slow
def test_priorities_that_change_under_way_change_no_token(build: Build, pattern: Pattern) -> None:
    one, result = played(build, pattern)
    assert result.wrong_turns == 0
    assert result.turns == sum(len(talk.turns) for talk in TRACE)
    assert result.output_tokens == sum(turn.answer_tokens for talk in TRACE for turn in talk.turns)
    assert result.preemptions > 0
    assert one.cache.blocks_used == 0
    one.loop.check_integrity()


@pytest.mark.slow
def test_reuse_halves_the_blocks_swapped_out() -> None:
    written = {build: played(build)[1].swapped_bytes for build in (FULL, NO_REUSE)}
    assert written[FULL] <= fastswitch.MAX_SWAPPED * written[NO_REUSE]


@pytest.mark.slow
def test_only_merged_copies_are_larger_than_a_block() -> None:
    assert played(FULL)[1].copy_bytes > fastswitch_replay.BLOCK_TOKENS * fastswitch_replay.TOKEN_BYTES
    assert played(ALL_OFF)[1].copy_bytes == fastswitch_replay.BLOCK_TOKENS * fastswitch_replay.TOKEN_BYTES


@pytest.mark.slow
def test_a_replay_is_the_same_every_time() -> None:
    first, second = played(FULL)[1], replay(FULL).run()
    assert replace(first, real_s=0.0) == replace(second, real_s=0.0)


def test_a_block_that_is_overwritten_under_way_is_noticed() -> None:
    one = replay(NO_REUSE)
    while not (steady := [seq for seq in one.book.running if seq.computed > fastswitch_replay.BLOCK_TOKENS]):
        one.ask()
        if not one.loop.step():
            one.pass_time()
    one.machine.put_block(one.cache.slots(steady[0].id)[0], (0,) * fastswitch_replay.BLOCK_TOKENS)
    with pytest.raises(InvariantError, match=r"sim\.wrong_kv"):
        one.run()


def test_with_memory_for_everything_there_are_no_preemptions() -> None:
    result = Replay(TRACE, FULL, 100 * num_blocks(), repeat([0.0] * len(TRACE)), 0.0).run()
    assert result.preemptions == result.wrong_turns == 0


@pytest.mark.slow
def test_the_traces_agree_with_the_docstring() -> None:
    talks = fastswitch_trace.conversations(4000, seed=0)
    turns = [turn for talk in talks for turn in talk.turns]
    assert len(turns) / len(talks) == pytest.approx(5.5, rel=0.05)
    assert sum(len(turn.question) for turn in turns) / len(turns) == pytest.approx(161, rel=0.1)
    assert sum(turn.answer_tokens for turn in turns) / len(turns) == pytest.approx(338, rel=0.1)
    rows = list(islice(fastswitch_trace.priorities("markov", 500, 0), 20))
    kept = sum(before == after for first, second in pairwise(rows) for before, after in zip(first, second, strict=True))
    assert kept / (19 * 500) == pytest.approx(fastswitch_trace.MARKOV_KEEP, abs=0.02)
    assert all(0 <= priority < 1 for row in rows for priority in row)


@pytest.mark.slow
def test_the_checks_of_idle_time_and_merged_copies_can_fail() -> None:
    full, off = played(FULL)[1], played(ALL_OFF)[1]
    assert full.is_rarely_idle and full.is_merged
    assert not off.is_rarely_idle and not off.is_merged
