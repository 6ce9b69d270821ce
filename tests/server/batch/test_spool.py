"""Files on disk: quotas, restarts, torn uploads, full disks."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.server.batch.folder import ACME, LIMITS, OTHER, Folder, opened
from tests.unreadable import hide
from tiercel.server.batch.quota import SpaceLimits
from tiercel.values.errors import AdmissionError


def run(path: Path, test: Callable[[Folder], Awaitable[None]], limits: SpaceLimits = LIMITS) -> None:
    async def use() -> None:
        async with opened(path, limits=limits) as folder:
            await test(folder)

    asyncio.run(use())


def names(path: Path) -> list[str]:
    return sorted(file.name for folder in ("files", "partial", "batches") for file in (path / folder).iterdir())


def test_files_survive_a_restart_and_belong_to_their_tenant(tmp_path: Path) -> None:
    ids: list[str] = []

    async def add(folder: Folder) -> None:
        for data in (b"one", b"second"):
            ids.append((await folder.add_file(data)).id)
        ids.append((await folder.add_file(b"theirs", OTHER)).id)

    async def look(folder: Folder) -> None:
        assert [record.id for record in folder.spool.of(ACME)] == ids[:2]
        assert folder.spool.find(ACME, ids[2]) is None
        assert folder.spool.find(OTHER, ids[2]) is not None
        assert folder.spool.path_of(ids[0]).read_bytes() == b"one"
        assert folder.spool.space.held_bytes == len(b"onesecondtheirs")
        assert folder.spool.space.num_files == 3
        record = folder.spool.find(ACME, ids[0])
        assert record is not None
        await folder.spool.remove(record)
        assert folder.spool.space.num_files == 2

    run(tmp_path, add)
    run(tmp_path, look)
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("name", ["files", "partial", "batches"])
def test_a_folder_that_may_not_be_read_is_not_an_empty_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def add(folder: Folder) -> None:
        await folder.add_file(b"one")

    async def look(folder: Folder) -> None:
        raise AssertionError(f"opened without {len(folder.spool.of(ACME))} files")

    run(tmp_path, add)
    before = names(tmp_path)
    with monkeypatch.context() as patched:
        hide(patched, tmp_path / name)
        with pytest.raises(PermissionError):
            run(tmp_path, look)
    assert names(tmp_path) == before


def test_only_the_owner_of_the_process_can_read_the_folder(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        record = await folder.add_file(b"secret")
        path = folder.spool.path_of(record.id)
        modes = {one.stat().st_mode & 0o777 for one in (path, path.with_suffix(".json"))}
        assert modes == {0o600} and path.parent.stat().st_mode & 0o777 == 0o700

    run(tmp_path / "new", test)


def test_an_upload_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        with pytest.raises(RuntimeError), folder.spool.uploading(ACME) as upload:
            await upload.write(b"x" * 500_000)
            assert folder.spool.space.held_bytes == 500_000
            raise RuntimeError
        assert (folder.spool.space.held_bytes, folder.spool.space.num_files) == (0, 0)
        assert names(tmp_path) == []

    run(tmp_path, test)


def test_what_a_crash_leaves_is_removed_at_the_next_start(tmp_path: Path) -> None:
    kept: list[str] = []

    async def add(folder: Folder) -> None:
        kept.append((await folder.add_file(b"kept")).id)
        for data in (b"damaged record", b"without data", b"shorter"):
            record = await folder.add_file(data)
            path = folder.spool.path_of(record.id)
            if data == b"damaged record":
                path.with_suffix(".json").write_bytes(b'{"id":')
            elif data == b"without data":
                path.unlink()
            else:
                path.write_bytes(b"s")
        (tmp_path / "partial" / "torn").write_bytes(b"x")
        (tmp_path / "files" / f"file-{'0' * 32}.data").write_bytes(b"without a record")
        (tmp_path / "files" / ".file-1.json.new").write_bytes(b"draft")

    async def look(folder: Folder) -> None:
        assert [record.id for record in folder.spool.of(ACME)] == kept
        assert folder.spool.space.held_bytes == 4

    run(tmp_path, add)
    run(tmp_path, look)
    assert names(tmp_path) == [f"{kept[0]}.data", f"{kept[0]}.json"]


@pytest.mark.parametrize(
    ("limits", "size", "status", "code"),
    [
        (replace(LIMITS, file_bytes=10), 11, 413, "file_too_large"),
        (replace(LIMITS, tenant_bytes=15), 11, 403, "storage_quota_exceeded"),
        (replace(LIMITS, all_bytes=15), 11, 507, "storage_full"),
        (replace(LIMITS, tenant_files=1), 1, 403, "storage_quota_exceeded"),
    ],
)
def test_each_limit_refuses_and_leaves_nothing(
    tmp_path: Path, limits: SpaceLimits, size: int, status: int, code: str
) -> None:
    async def test(folder: Folder) -> None:
        await folder.add_file(b"x" * 5)
        with pytest.raises(AdmissionError) as caught:
            await folder.add_file(b"x" * size)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert (folder.spool.space.held_bytes, folder.spool.space.num_files) == (5, 1)
        if status == 403:
            await folder.add_file(b"x", OTHER)  # its own quota is free

    run(tmp_path, test, limits)
    assert len(list((tmp_path / "partial").iterdir())) == 0


def test_a_tenant_has_a_few_uploads_at_a_time(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        spool = folder.spool
        with spool.uploading(ACME), spool.uploading(ACME), spool.uploading(ACME), spool.uploading(ACME):
            with pytest.raises(AdmissionError) as caught, spool.uploading(ACME):
                pass
            assert caught.value.status == 429
            await folder.add_file(b"x", OTHER)
        await folder.add_file(b"x")

    run(tmp_path, test)


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_refuses_the_upload_and_leaves_nothing(tmp_path: Path, after: int) -> None:
    async def test(folder: Folder) -> None:
        with pytest.raises(AdmissionError) as caught, folder.spool.uploading(ACME) as upload:
            if after:
                await upload.write(b"x" * (1 << 20))
            else:
                await upload.write(b"x")
            folder.disk.failures = 1
            await upload.commit("in", "batch", None)
        assert (caught.value.status, caught.value.code) == (507, "storage_full")
        assert names(tmp_path) == [] and folder.spool.space.held_bytes == 0

    run(tmp_path, test)


def test_another_error_of_the_disk_is_not_hidden(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        folder.disk.error, folder.disk.failures = errno.EIO, 1
        with pytest.raises(OSError, match="injected"):
            await folder.add_file(b"x")
        assert names(tmp_path) == []

    run(tmp_path, test)


def test_files_expire(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        with folder.spool.uploading(ACME) as upload:
            await upload.write(b"x")
            record = await upload.commit("in", "batch", 3600)
        assert list(folder.spool.expired()) == []
        folder.now[0] += 3600
        assert list(folder.spool.expired()) == [record]

    run(tmp_path, test)
