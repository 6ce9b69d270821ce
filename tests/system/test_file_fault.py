"""Files and folders that cannot be read."""

from pathlib import Path

import pytest

from tests.unreadable import hide
from tiercel.system.file_fault import list_folder


def test_names_are_listed_in_order_and_by_pattern(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", ".c.json", "d.JSON"):
        (tmp_path / name).touch()
    assert [path.name for path in list_folder(tmp_path)] == [".c.json", "a.json", "b.json", "d.JSON"]
    assert list_folder(tmp_path, "?.json") == [tmp_path / "a.json", tmp_path / "b.json"]


def test_a_folder_that_is_missing_or_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError):
        list_folder(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        list_folder(tmp_path / "file")


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, tmp_path)
    with pytest.raises(PermissionError):
        list_folder(tmp_path, "*.json")
