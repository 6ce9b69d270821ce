"""The search for cuts that pay, its file, and the engine that goes by it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.bench import EngineBench
from tests.conformance.models import FAMILIES, make_checkpoint
from tiercel.engine import split_search
from tiercel.engine.runner import Flight, Runner
from tiercel.engine.split_search import calibrate_splits
from tiercel.engine.splits_file import SplitsFile
from tiercel.errors import ConfigError
from tiercel.plan import StepPlan
from tiercel.scheduler.nanobatch import MeasuredSplit, Split, SplitRow
from tiercel.settings import EngineSettings

PROMPT = list(range(3, 131))  # 128 tokens: one step
HALVES = SplitRow(128, 0, 0, (MeasuredSplit(Split(2, 0), 0.5),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splits") / "model"
    make_checkpoint(next(iter(FAMILIES)), folder)
    return folder


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many nano-batches each step of the engine has."""
    counted: list[int] = []
    launch = Runner.launch

    def count(self: Runner, plan: StepPlan) -> Flight:
        counted.append(len(plan.nano_batches))
        return launch(self, plan)

    monkeypatch.setattr(Runner, "launch", count)
    yield counted


def test_an_engine_goes_by_what_was_found_for_its_model_and_says_the_same(
    model: Path, tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"cache_folder": str(tmp_path), "max_num_batched_tokens": 128}
    bench = EngineBench(model, **facts)
    expected = bench.greedy([PROMPT], 5)
    bench.close()
    assert max(sizes) == 1
    sizes.clear()
    monkeypatch.setattr(split_search, "search", lambda *_: (HALVES,))
    settings = EngineSettings(model=str(model), threads=1, dtype="float32", **facts)  # type: ignore[arg-type]
    path = calibrate_splits(settings, lambda row: None)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    bench = EngineBench(model, **facts)
    assert bench.greedy([PROMPT], 5) == expected
    bench.close()
    assert max(sizes) == 2


def test_the_search_covers_what_steps_can_be(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_search, "_SEARCH_S", 0.0)
    settings = EngineSettings(
        model=str(model),
        threads=1,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        cache_folder=str(tmp_path),
    )
    rows: list[SplitRow] = []
    assert calibrate_splits(settings, rows.append) is not None
    shapes = {(row.prefill_tokens, row.decodes) for row in rows}
    assert shapes == {(0, 8), (64, 0), (64, 8)}
    assert all(0 < timed.ratio < 1000 for row in rows for timed in row.cuts)
    assert {timed.split for row in rows if row.prefill_tokens and row.decodes for timed in row.cuts} >= {
        Split(2, 0),
        Split(1, 1),
        Split(4, 2),
    }


@pytest.mark.parametrize("content", [b"", b"{}", b'{"identity": "another", "rows": []}', b"\xff" * (1 << 21)])
def test_a_file_that_cannot_be_trusted_leaves_steps_whole(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SplitsFile(str(tmp_path), ("model",))
    assert file.read() is None
    assert not caplog.records
    assert file.path is not None
    file.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.read() is None
    assert f"path={file.path}" in caplog.text


def test_what_is_written_is_read_by_the_same_model_only(tmp_path: Path) -> None:
    SplitsFile(str(tmp_path), ("model",)).write((HALVES,))
    table = SplitsFile(str(tmp_path), ("model",)).read()
    assert table is not None
    assert table.rows == (HALVES,)
    assert SplitsFile(str(tmp_path), ("other",)).read() is None
    SplitsFile(None, ("model",)).write((HALVES,))
    assert SplitsFile(None, ("model",)).read() is None


def test_a_gpu_is_refused_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        name = "cuda"

    monkeypatch.setattr(split_search, "open_device", lambda *_: Gpu())
    with pytest.raises(ConfigError, match="--device cuda"):
        calibrate_splits(EngineSettings(model=str(model)), lambda row: None)
