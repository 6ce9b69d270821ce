"""Hundreds of preemptions in every mode, with prefixes from every tier, lose and change no token.

`make test-long` runs ten thousand preemptions, and so does `benchmarks/preemptions.py`, which also reports times.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.churn import Tally, churn, has_used_all_tiers, make_answers


@pytest.mark.parametrize(
    "preemptions", [pytest.param(300, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)]
)
def test_no_token_is_lost_or_changed(
    preemptions: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    answers = make_answers(tmp_path / "model", prompts=32)
    tally = Tally()
    churn(answers, tally, tmp_path / "kv", preemptions, seed=1, is_checked=False)
    record_property("excused_tokens", tally.excused)
    assert tally.preemptions >= preemptions
    assert (tally.wrong, tally.lost) == (0, 0)
    assert tally.excused <= tally.requests // 50
    assert has_used_all_tiers(tally)
