"""Rows 41 and 42: a folder of the SSD tier that cannot be used any more, at a restart of the engine and a takeover."""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.prompts import ONE_THREAD, PROMPTS
from tests.faults.streams import StreamReader, make_asks
from tiercel.system.kv_folder import lock_folder

CLIENTS = 8
TOKENS = (100, 120)

Break = Callable[[Path, ExitStack], None]


def flags(folder: Path) -> tuple[str, ...]:
    disk = ("--kv-disk-path", str(folder / "kv"), "--kv-disk-size", "32M", "--max-num-seqs", str(CLIENTS))
    return (*disk, "--control-socket", str(folder / "control"), *ONE_THREAD)


def state(running: Daemon) -> str:
    return next(one for one in ("on", "read_only", "off") if running.metric(f'tiercel_kv_disk_state{{state="{one}"}}'))


def begin(running: Daemon) -> list[StreamReader]:
    return [
        StreamReader.reading(running.url, ask) for ask in make_asks(random.Random(41), PROMPTS[:3], CLIENTS, TOKENS)
    ]


def assert_whole(readers: list[StreamReader]) -> None:
    for reader in readers:
        heard = reader.finished()
        assert (heard.status, heard.errors, heard.is_complete) == (200, [], True)
        assert (heard.finish_reason, heard.completion_tokens) == ("length", reader.ask.max_tokens)


def restart_engine(running: Daemon, folder_breaks: Callable[[], None] = lambda: None) -> None:
    """Kill the engine under open streams, which must go on."""
    before = running.metric("tiercel_engine_restarts_total")
    readers = begin(running)
    folder_breaks()
    os.kill(running.engine_pid(), signal.SIGKILL)
    assert_whole(readers)
    assert running.metric("tiercel_engine_restarts_total") == before + 1


def open_to_others(folder: Path, _: ExitStack) -> None:
    folder.chmod(0o777)


def replace_by_a_file(folder: Path, _: ExitStack) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def give_to_another_daemon(folder: Path, closing: ExitStack) -> None:
    """Replace the folder by one that another daemon has locked; the lock of the first daemon is on the deleted one."""
    shutil.rmtree(folder)
    closing.callback(os.close, lock_folder(folder))


def mount(folder: Path, closing: ExitStack, *commands: tuple[str, ...]) -> None:
    for command in commands:
        if subprocess.run([*command, str(folder)], capture_output=True, check=False).returncode:
            pytest.skip("this user cannot mount")
    closing.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)


def make_read_only(folder: Path, closing: ExitStack) -> None:
    mount(folder, closing, ("mount", "--bind", str(folder)), ("mount", "-o", "remount,bind,ro"))


def fill(folder: Path, closing: ExitStack) -> None:
    mount(folder, closing, ("mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs"))
    with pytest.raises(OSError, match="No space"), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def freeze(folder: Path, closing: ExitStack) -> None:
    """Forbid changes to the folder, as after an error of the file system."""
    names = [str(folder), *map(str, folder.iterdir())]
    if subprocess.run(["chattr", "+i", *names], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make files immutable")
    closing.callback(subprocess.run, ["chattr", "-i", *names], check=True)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_row_41_streams_outlive_an_engine_whose_folder_became_unusable(tmp_path: Path, closing: ExitStack) -> None:
    folder = tmp_path / "kv"
    with daemon(tmp_path, *flags(tmp_path)) as running:
        assert state(running) == "on"
        restart_engine(running, lambda: open_to_others(folder, closing))
        assert state(running) == "off"
        (said,) = [line for line in running.log.read_text().splitlines() if "kv disk tier off" in line]
        assert str(folder) in said and "other users" in said


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [replace_by_a_file, give_to_another_daemon, make_read_only, fill, freeze])
def test_row_41_every_fault_of_a_folder_and_its_repair(tmp_path: Path, breaks: Break) -> None:
    """The tier is off for as long as the folder is bad, and on again after the next restart of the engine."""
    folder = tmp_path / "kv"
    with daemon(tmp_path, *flags(tmp_path)) as running:
        with ExitStack() as closing:
            restart_engine(running, lambda: breaks(folder, closing))
            assert state(running) == "off"
            assert running.log.read_text().count("kv disk tier off") == 1
        if folder.is_file():
            folder.unlink()
        restart_engine(running)
        assert state(running) == "on"
        running.assert_nothing_held()
        assert running.stop() == 0


@pytest.mark.slow
def test_row_41_a_deleted_folder_is_made_again_and_locked(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with daemon(tmp_path, *flags(tmp_path)) as running:
        restart_engine(running, lambda: shutil.rmtree(folder))
        assert state(running) == "on"
        with daemon(tmp_path, *flags(tmp_path), wait=False) as second:
            assert second.process.wait(60) == 2
            assert f"{folder} is in use by the daemon with pid {running.engine_pid()}" in second.log.read_text()
        assert running.stop() == 0


def test_row_42_a_takeover_goes_on_without_the_folders(tmp_path: Path, closing: ExitStack) -> None:
    folders = (*flags(tmp_path), "--files-path", str(tmp_path / "files"))
    with daemon(tmp_path, *folders) as old:
        readers = begin(old)
        replace_by_a_file(tmp_path / "kv", closing)
        replace_by_a_file(tmp_path / "files", closing)
        port = old.url.rsplit(":", 1)[1]
        with daemon(tmp_path, *folders, "--port", port, "--takeover") as new:
            assert state(new) == "off"
            files = new.http.get("/v1/files")
            assert (files.status_code, files.json()["error"]["code"]) == (503, "files_unavailable")
            assert_whole(readers)
            assert new.complete("Hello").status_code == 200
            assert old.process.wait(60) == 0
            assert new.stop() == 0


def test_row_42_a_first_start_says_what_is_wrong_or_goes_on_if_told_to(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no folder")
    with daemon(tmp_path, *flags(tmp_path), wait=False) as refused:
        assert refused.process.wait(60) == 2
        assert f"tiercel: --kv-disk-path: {tmp_path / 'kv'} is not a folder" in refused.log.read_text()
    with daemon(tmp_path, *flags(tmp_path), "--kv-disk-optional") as running:
        assert state(running) == "off"
        assert running.stop() == 0
