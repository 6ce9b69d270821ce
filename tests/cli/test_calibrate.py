"""The command `tiercel calibrate`."""

from pathlib import Path

import pytest

from tiercel.cli.main import main
from tiercel.embedded import MODEL_DIR
from tiercel.engine.measure import split_search


def test_a_table_is_searched_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Patched: the command has no option for the duration of the search.
    monkeypatch.setattr(split_search, "_SEARCH_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")  # to be as it was when the test has ended
    flags = ["--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    assert main(["calibrate", str(MODEL_DIR), *flags]) == 0
    (path,) = (tmp_path / "tiercel").glob("splits-*.json")
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == f"written to {path}"
    assert [line.split()[:3] for line in output[1:-1]] == [["64", "0", "0"]]


def test_a_table_that_cannot_be_written_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiercel").write_text("in the way")
    # Patched: the search takes minutes and does not matter here.
    monkeypatch.setattr(split_search, "search", lambda *_: ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    assert main(["calibrate", str(MODEL_DIR)]) == 1
    assert "the table cannot be written" in capsys.readouterr().err
