"""The parts of a folder of files and batches in a test, with an application that answers instead of a server."""

import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.types import Receive, Scope, Send

from tiercel.server.batch.book import BatchBook
from tiercel.server.batch.quota import SpaceBook, SpaceLimits
from tiercel.server.batch.records import MESSAGES_ENDPOINT, BatchRecord, FileRecord
from tiercel.server.batch.route_call import RouteCaller
from tiercel.server.batch.spool import FileSpool
from tiercel.server.batch.worker import BatchWorker
from tiercel.server.tenancy.auth import BATCH_TENANT
from tiercel.server.tenancy.tenants import Tenant
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import TenantId
from tiercel.values.tenant import TenantShare

ACME, OTHER = TenantId("acme"), TenantId("other")
CHAT = "/v1/chat/completions"
LIMITS = SpaceLimits(file_bytes=1 << 20, tenant_bytes=4 << 20, all_bytes=8 << 20, tenant_files=20)
T = TypeVar("T")


@dataclass
class Answers:
    """An application that answers `{"echo": BODY}` and counts. `status_of` may choose another status by body."""

    status_of: Callable[[dict[str, Any]], int] = lambda body: 200
    asked: list[str] = field(default_factory=list)  # the contents of the bodies that arrived
    answered: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0  # at the same time
    gate: asyncio.Event | None = None  # answers wait for it
    free: int = 0  # answers that do not wait
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.scopes.append(scope)
        self.asked.append(body["n"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.gate is not None and len(self.asked) > self.free:
                gone = asyncio.ensure_future(receive())
                opened = asyncio.ensure_future(self.gate.wait())
                await asyncio.wait([gone, opened], return_when=asyncio.FIRST_COMPLETED)
                is_gone = gone.done()
                gone.cancel()
                opened.cancel()
                if is_gone:
                    return
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        self.answered.append(body["n"])
        headers = [(b"content-type", b"application/json"), *self.headers]
        await send({"type": "http.response.start", "status": self.status_of(body), "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"echo": body}).encode()})


@dataclass
class Conditions:
    """The conditions of a worker, which a test changes."""

    is_calm: bool = True
    max_body_bytes: int = 64 * 1024
    names: tuple[TenantId, ...] = (ACME, OTHER)

    def tenant(self, name: TenantId) -> Tenant | None:
        return Tenant(TenantShare(name=name)) if name in self.names else None


class Disk:
    """Runs work in threads. While `full` is set, work named in `fails` raises as on a full disk."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)
        self.failures = 0  # that are still to come
        self.error = errno.ENOSPC

    async def __call__(self, work: Callable[[], T]) -> T:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(self.error, "injected")
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


@dataclass
class Folder:
    """The parts."""

    spool: FileSpool
    book: BatchBook
    worker: BatchWorker
    disk: Disk
    conditions: Conditions
    now: list[float]

    async def add_file(self, data: bytes, tenant: TenantId = ACME) -> FileRecord:
        with self.spool.uploading(tenant) as upload:
            await upload.write(data)
            return await upload.commit("in.jsonl", "batch", None)

    async def begin(self, data: bytes, tenant: TenantId = ACME, endpoint: str = CHAT) -> BatchRecord:
        """Upload a file and begin a batch of it."""
        file = await self.add_file(data, tenant)
        record = await self.book.create(tenant, endpoint, file.id, None, None)
        self.worker.wake(tenant)
        return record

    async def until_over(self, batch_id: str, limit_s: float = 20.0) -> BatchRecord:
        async with asyncio.timeout(limit_s):
            while not self.book.get(batch_id).is_over:  # noqa: ASYNC110 - a record on disk
                await asyncio.sleep(0.002)
        return self.book.get(batch_id)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file of the tenant acme or another; none without a file."""
        if file_id is None:
            return []
        return [json.loads(line) for line in self.spool.path_of(file_id).read_bytes().splitlines()]


@contextlib.asynccontextmanager
async def opened(
    path: Path,
    answers: Answers | None = None,
    *,
    limits: SpaceLimits = LIMITS,
    conditions: Conditions | None = None,
    concurrency: int = 4,
    now: list[float] | None = None,
) -> AsyncIterator[Folder]:
    """Open a folder as a start of the daemon does, and leave it as an orderly stop does."""
    now = now if now is not None else [1_000_000.0]
    disk, space, conditions = Disk(), SpaceBook(limits), conditions or Conditions()
    spool = FileSpool(path, space, disk, lambda: now[0])
    book = BatchBook(path, disk, lambda: now[0], limits.tenant_files)
    spool.load()
    book.load()
    worker = BatchWorker(
        book, spool, RouteCaller(answers or Answers()), conditions, disk, MonotonicClock(), lambda: now[0],
        concurrency=concurrency,
    )  # fmt: skip
    worker.start()
    try:
        yield Folder(spool, book, worker, disk, conditions, now)
    finally:
        await worker.stop()
        disk.threads.shutdown()


def line(number: object, **more: object) -> bytes:
    """Return a line of an input whose custom id and body have this number."""
    fields = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": {"n": str(number)}, **more}
    return json.dumps(fields).encode() + b"\n"


def lines(count: int) -> bytes:
    return b"".join(line(number) for number in range(count))


def message_lines(count: int) -> bytes:
    return b"".join(line(number, url=MESSAGES_ENDPOINT) for number in range(count))


def tenant_in(scope: Scope) -> str:
    return cast(Tenant, scope["state"][BATCH_TENANT]).name
