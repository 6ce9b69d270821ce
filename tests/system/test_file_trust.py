"""Whose files are trusted."""

import os
from pathlib import Path

import pytest

from tiercel.system.file_trust import check_found_file, check_named_file
from tiercel.values.errors import ConfigError


def test_a_found_file_belongs_to_this_user_or_to_root(tmp_path: Path) -> None:
    path = tmp_path / "tiercel.toml"
    path.touch(0o600)
    status = path.stat()
    check_found_file(status, "tiercel.toml", status.st_uid)
    foreign = os.stat_result([*status[:4], 1234, *status[5:10]])
    with pytest.raises(ConfigError, match=r"it belongs to user 1234, not to user 77 or root: name it with"):
        check_found_file(foreign, "tiercel.toml", 77)
    check_found_file(os.stat_result([*status[:4], 0, *status[5:10]]), "tiercel.toml", 77)
    check_named_file(foreign, "tiercel.toml")
