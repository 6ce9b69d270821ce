"""`tiercel kv`: correct facts of a volume, and no deletion of a volume in use."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.cli.main import main
from tiercel.device.volume import open_volume
from tiercel.device.volume_format import ALIGN, FORMAT_VERSION, JOURNAL_NAME, VOLUME_NAME, slot_bytes
from tiercel.system.kv_folder import LOCK_NAME

Captured = pytest.CaptureFixture[str]
BLOCK = 8192


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A volume of two folders with ten blocks, closed."""
    names = (tmp_path / "a", tmp_path / "b")
    with open_volume(names, 2 << 20, BLOCK, b"kind") as volume:
        for number in range(10):
            volume.write(number, key_of(number), memoryview(bytes([number]) * BLOCK))
    return names


def told(capsys: Captured, *words: str) -> list[dict[str, object]]:
    main(["kv", words[0], "--json", *words[1:]])
    return json.loads(capsys.readouterr().out)


def test_inspect_prints_the_contents_of_a_folder(folders: tuple[Path, Path], capsys: Captured) -> None:
    first, second = told(capsys, "inspect", *map(str, folders))
    assert first["folder"] == str(folders[0])
    assert (first["used"], second["used"]) == (5, 5)
    assert (first["stripe"], second["stripe"], first["stripes"]) == (0, 1, 2)
    assert (first["block_bytes"], first["format_version"], first["opens"]) == (BLOCK, FORMAT_VERSION, 1)
    assert first["fingerprint"] == b"kind".hex()
    assert first["slots"] == second["slots"]
    assert (first["journal"], second["journal"]) == ("clean", "in the first folder")
    assert first["holder"] is None
    assert first["file_bytes"] == (folders[0] / VOLUME_NAME).stat().st_size
    assert main(["kv", "inspect", str(folders[0])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 of" in shown
    assert "8.0 KiB each" in shown
    assert "seconds ago" in shown


def test_inspect_reports_an_unclean_journal_and_the_owner_of_the_folder(
    folders: tuple[Path, Path], capsys: Captured
) -> None:
    volume = open_volume(folders, 2 << 20, BLOCK, b"kind", lock=True)
    (found,) = told(capsys, "inspect", str(folders[0]))
    assert (found["journal"], found["holder"], found["opens"]) == ("unclean", os.getpid(), 2)
    main(["kv", "inspect", str(folders[0])])
    assert f"by the daemon with pid {os.getpid()}" in " ".join(capsys.readouterr().out.split())
    volume.close()
    (folders[0] / JOURNAL_NAME).write_bytes(b"nonsense")
    (found,) = told(capsys, "inspect", str(folders[0]))
    assert found["journal"] == "missing or damaged"


def test_verify_reads_every_block(folders: tuple[Path, Path], capsys: Captured) -> None:
    words = ["kv", "verify", *map(str, folders)]
    assert main(words) == 0
    capsys.readouterr()
    first, second = told(capsys, "verify", *map(str, folders))
    assert (first["good"], first["torn"], second["good"], second["torn"]) == (5, [], 5, [])
    with (folders[1] / VOLUME_NAME).open("r+b") as file:
        file.seek(ALIGN + 2 * slot_bytes(BLOCK) + ALIGN + 77)
        file.write(b"x")  # payload of slot 5
        file.seek(ALIGN + 4 * slot_bytes(BLOCK) + 2000)
        file.write(b"x")  # header of slot 9
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "2: slots 5 9" in captured.out
    assert captured.err == "tiercel: error: 2 blocks are torn\n"
    first, second = told(capsys, "verify", *map(str, folders))
    assert (first["torn"], second["good"], second["torn"]) == ([], 3, [5, 9])


def test_looking_changes_nothing(folders: tuple[Path, Path]) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folders[0].iterdir()}
    assert main(["kv", "inspect", str(folders[0])]) == 0
    assert main(["kv", "verify", str(folders[0])]) == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folders[0].iterdir()} == before


def test_purge_deletes_the_blocks(folders: tuple[Path, Path], capsys: Captured) -> None:
    first, _ = told(capsys, "purge", *map(str, folders))
    assert isinstance(first["freed_bytes"], int) and first["freed_bytes"] > 500_000
    for folder in folders:
        assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
    assert told(capsys, "purge", str(folders[0])) == [{"folder": str(folders[0]), "freed_bytes": 0}]
    with open_volume(folders, 2 << 20, BLOCK, b"kind") as volume:
        assert list(volume.recover()) == []


def test_purge_refuses_a_folder_in_use_by_a_daemon(folders: tuple[Path, Path], capsys: Captured) -> None:
    with open_volume(folders, 2 << 20, BLOCK, b"kind", lock=True) as volume:
        assert main(["kv", "purge", *map(str, folders)]) == 2
        line = f"tiercel: error: {folders[0]} is in use by the daemon with pid {os.getpid()}\n"
        assert capsys.readouterr().err == line
        into = memoryview(bytearray(BLOCK))
        assert volume.read(3, key_of(3), into)
    assert (folders[0] / VOLUME_NAME).exists()


def test_folders_without_a_volume_are_one_line(tmp_path: Path, capsys: Captured) -> None:
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / VOLUME_NAME).write_bytes(b"not a volume" * 1000)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    lines = {
        empty: f"there is no volume in {empty}",
        other: f"{other / VOLUME_NAME} has no superblock",
        shared: f"{shared} can be read or written by other users; run: chmod 700 {shared}",
        tmp_path / "none": f"cannot use the folder {tmp_path / 'none'}: No such file or directory",
    }
    for verb in ("inspect", "verify"):
        for folder, line in lines.items():
            assert main(["kv", verb, str(folder)]) == 2
            assert capsys.readouterr().err == f"tiercel: error: {line}\n"
    assert main(["kv", "purge", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_the_verbs_live_without_torch(folders: tuple[Path, Path]) -> None:
    code = (
        "import sys; from tiercel.cli.main import main;"
        f"code = main(['kv', 'inspect', {str(folders[0])!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
