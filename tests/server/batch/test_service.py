"""The folder of files at a takeover: a daemon that must not end tries it again."""

import asyncio
from pathlib import Path

import pytest

from tests.server.batch.folder import Answers, Conditions
from tests.server.harness import until
from tiercel.server.batch.durable import FolderLock
from tiercel.server.batch.service import BatchService
from tiercel.settings.settings import ServerSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import AdmissionError, ConfigError


def test_a_first_start_names_the_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    settings = ServerSettings(model="m", served_model_names=("m",), files_path=str(tmp_path / "files"))
    with pytest.raises(ConfigError, match="--files-path"):
        BatchService.of(settings, Conditions(), MonotonicClock(), lambda: 0.0)
    service = BatchService.of(settings, Conditions(), MonotonicClock(), lambda: 0.0, is_takeover=True)
    assert service is not None and service.num_lines == (0, 0)


def test_a_folder_that_cannot_be_used_is_tried_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.write_text("no folder")
    settings = ServerSettings(model="m", served_model_names=("m",), files_path=str(folder))

    async def test() -> None:
        service = BatchService(settings, folder, Conditions(), MonotonicClock(), lambda: 0.0, reopen_s=0.01)
        service.start(Answers())
        await until(lambda: _code(service) == "files_unavailable")
        folder.unlink()
        await until(lambda: _code(service) is None)
        assert service.held == (0, 0)
        await service.stop()

    asyncio.run(test())


@pytest.mark.parametrize(("is_locked", "reason"), [(False, "is being read"), (True, "another server process")])
def test_files_that_are_not_available_yet_say_why(is_locked: bool, reason: str, tmp_path: Path) -> None:
    settings = ServerSettings(model="m", served_model_names=("m",), files_path=str(tmp_path))
    other = FolderLock(tmp_path)
    assert not is_locked or other.try_lock()

    async def test() -> None:
        service = BatchService(settings, tmp_path, Conditions(), MonotonicClock(), lambda: 0.0)
        service.start(Answers())
        await asyncio.sleep(0)  # its first look at the folder
        with pytest.raises(AdmissionError, match=reason):
            _ = service.folder
        other.release()
        await service.wait_open()
        assert _code(service) is None
        await service.stop()

    asyncio.run(test())


def _code(service: BatchService) -> str | None:
    try:
        _ = service.folder
    except AdmissionError as exc:
        assert exc.status == 503
        return exc.code
    return None
