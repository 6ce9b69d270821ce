"""The harness of the faults itself: a request between two checks of the books is not missed."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.faults import faulty_engine
from tests.faults.crash_plan import CrashPlan


def test_a_request_that_comes_and_goes_between_two_checks_is_followed_by_a_check(
    tmp_path: Path, monkeypatch: Any
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr(faulty_engine, "time", clock)
    loop: Any = SimpleNamespace(is_idle=True, check_integrity=lambda: None)
    inner: Any = SimpleNamespace(tend=lambda: None)
    plan = CrashPlan(tmp_path)
    upkeep = faulty_engine.CheckedUpkeep(inner, loop, plan)
    now_s = 100.0
    upkeep.tend()
    assert plan.checks() == 1
    loop.is_idle, now_s = False, 100.01
    upkeep.tend()
    loop.is_idle, now_s = True, 100.02
    upkeep.tend()
    assert plan.checks() == 1, "the books are checked at most once in an interval"
    now_s = 101.0
    upkeep.tend()
    assert plan.checks() == 2
