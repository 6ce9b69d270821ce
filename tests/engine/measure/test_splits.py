"""The search for splits, its file, and the engine that uses it."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from tests.conformance.bench import EngineBench
from tests.conformance.models import FAMILIES, make_checkpoint
from tests.device.fake_cuda import FakeLibrary
from tiercel.engine.measure.split_search import calibrate_splits, open_splits_file
from tiercel.engine.step.flight import Flight, StepRunner
from tiercel.scheduler.nanobatch import MeasuredSplit, Split, SplitRow, SplitTable
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError
from tiercel.values.ids import SeqId
from tiercel.values.plan import StepPlan

PROMPT = list(range(3, 131))  # 128 tokens: one step
HALVES = SplitRow(128, 0, 0, (MeasuredSplit(Split(2, 0), 0.5),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splits") / "model"
    make_checkpoint(next(iter(FAMILIES)), folder)
    return folder


class CountingRunner:
    """A runner that notes how many nano-batches each step has."""

    def __init__(self, runner: StepRunner) -> None:
        self.inner = runner
        self.nano_batches: list[int] = []

    def launch(self, plan: StepPlan) -> Flight:
        self.nano_batches.append(len(plan.nano_batches))
        return self.inner.launch(plan)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self.inner.forget(seqs)


def answer(model: Path, folder: Path) -> tuple[list[list[int]], int]:
    """Return what an engine with this cache folder generates, and the largest number of nano-batches of a step."""
    runners: list[CountingRunner] = []

    def wrap(runner: StepRunner) -> StepRunner:
        runners.append(CountingRunner(runner))
        return runners[0]

    bench = EngineBench(model, wrap=wrap, cache_folder=str(folder), max_num_batched_tokens=128)
    outputs = bench.greedy([PROMPT], 5)
    bench.close()
    return outputs, max(runners[0].nano_batches)


def test_an_engine_uses_the_table_of_its_model_and_generates_the_same(model: Path, tmp_path: Path) -> None:
    whole, nano_batches = answer(model, tmp_path)
    assert nano_batches == 1
    settings = EngineSettings(
        model=str(model),
        threads=1,
        dtype="float32",
        cache_folder=str(tmp_path),
        max_num_batched_tokens=128,
        max_num_seqs=1,  # only few shapes are measured then, and the file is the same
    )
    path = calibrate_splits(settings, lambda row: None, seconds=0.0)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    table = msgspec.json.decode(path.read_bytes(), type=SplitTable)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(table, rows=(HALVES,))))
    split, nano_batches = answer(model, tmp_path)
    assert split == whole
    assert nano_batches == 2


def test_the_search_covers_the_shapes_that_steps_can_have(model: Path, tmp_path: Path) -> None:
    settings = EngineSettings(
        model=str(model),
        threads=1,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        cache_folder=str(tmp_path),
    )
    rows: list[SplitRow] = []
    assert calibrate_splits(settings, rows.append, seconds=0.0) is not None
    shapes = {(row.prefill_tokens, row.decodes) for row in rows}
    assert shapes == {(0, 8), (64, 0), (64, 8)}
    assert all(0 < timed.ratio < 1000 for row in rows for timed in row.cuts)
    assert {timed.split for row in rows if row.prefill_tokens and row.decodes for timed in row.cuts} >= {
        Split(2, 0),
        Split(1, 1),
        Split(4, 2),
    }


def table(rows: str = "[]", **changes: object) -> bytes:
    """Return the bytes of a file; OURS stands for the identity of the file under test."""
    fields = {"version": 1, "identity": "OURS"} | changes
    return f'{json.dumps(fields)[:-1]}, "rows": {rows}}}'.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b"\xff" * (1 << 21),
        table(identity="another"),
        table(version=2),
        table(more=1),
        table("[[-1, 0, 0, []]]"),
        table("[[256, 0, 0, [[[2, 0], 0]]]]"),
        table("[[256, 0, 0, [[[99, 0], 1.0]]]]"),
        table("[[256, 0, 0, [[[2, 0], NaN]]]]"),
        table("[[256, 0, 0, [[[2, 0], 1e999]]]]"),
    ],
)
def test_a_file_that_cannot_be_trusted_leaves_steps_whole(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = open_splits_file(str(tmp_path), {"model": "a"})
    assert file.read() is None
    assert not caplog.records
    assert file.path is not None
    file.path.write_bytes(content.replace(b"OURS", file.identity.encode()))
    with caplog.at_level(logging.WARNING):
        assert file.read() is None
    assert f"path={file.path}" in caplog.text


def test_a_table_is_read_by_the_same_model_only(tmp_path: Path) -> None:
    file, nowhere = open_splits_file(str(tmp_path), {"model": "a"}), open_splits_file(None, {"model": "a"})
    written = SplitTable(identity=file.identity, rows=(HALVES,))
    file.write(written)
    assert open_splits_file(str(tmp_path), {"model": "a"}).read() == written
    assert open_splits_file(str(tmp_path), {"model": "b"}).read() is None
    nowhere.write(written)
    assert nowhere.read() is None


def test_a_gpu_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        calibrate_splits(EngineSettings(model=str(model)), lambda row: None, FakeLibrary().open_device())
