"""Fixtures and options of all test suites.

Slow and long runs are skipped by default; without a GPU kernels run in Triton's interpreter; skipped and excused cases
are reported at the end.
"""

import gc
import logging
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.seeds import run_random

if not torch.cuda.is_available():
    # Before anything imports Triton, whose own functions would be compiled ones: transformers does, now and then.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("tiercel", deadline=None)  # never assert a time: the machine may be busy
settings.load_profile("tiercel")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Give the next test the root logger as it was: a command configures it, for a stderr that is gone afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not looked at and why, and how often the conformance tests excused a differing token."""
    skipped = [report.longrepr for report in terminalreporter.getreports("skipped")]
    reasons = Counter(str(where[2]).removeprefix("Skipped: ") for where in skipped if isinstance(where, tuple))
    for reason, count in reasons.items():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    counts = [
        value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == "excused_tokens"
    ]
    if counts:
        terminalreporter.write_line(
            f"conformance: a differing token was excused {sum(counts)} times in {len(counts)} tests "
            "(margin of the two likeliest under 1e-4)"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: tens of seconds; runs only when asked for with -m slow, as in CI")
    config.addinivalue_line("markers", "long: minutes of simulation; runs only when asked for with -m long")
    config.addinivalue_line("markers", "sampled(count): `make test` runs so many of the cases, -m slow some others")
    config.addinivalue_line(
        "markers", "ray: needs Ray, which `make test-cluster` installs; runs only when asked for with -m ray"
    )


def pytest_collection() -> None:
    gc.disable()  # each look at all that a thousand modules hold takes half a second


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow, the long and those of Ray unless the command line names them; slow and long: long ones."""
    if not config.option.keyword and not any("::" in name for name in config.args):
        _sample(items)

    def is_unasked(item: pytest.Item) -> bool:
        kind = next((name for name in ("ray", "long", "slow") if item.get_closest_marker(name)), None)
        return kind is not None and kind not in (config.option.markexpr or "")

    left_out = {item for item in items if is_unasked(item)}
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _sample(items: list[pytest.Item]) -> None:
    """Leave a sampled test some cases, which are scattered over its parameters.

    Of the others and of those that are marked as slow, twice as many are slow. Every run draws them anew, so that
    `make test-slow` sees all of them in time. The rest is long.
    """
    rng = run_random()
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        count: int = of_test[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr] - it was looked for
        ordered = sorted(of_test, key=lambda item: zlib.crc32(item.nodeid.encode()))
        fast = [item for item in ordered if not item.get_closest_marker("slow")][:count]
        others = [item for item in ordered if item not in fast]
        rng.shuffle(others)
        for place, item in enumerate(others):
            item.add_marker("slow" if place < 2 * count else "long")
