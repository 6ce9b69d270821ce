"""Hosts with fake engines and a front's client in one event loop; engines die when a test says so."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tests.server.fake_engine import FakeEngine, Script
from tiercel.server.client.collector import Mailbox, StreamEnd
from tiercel.server.client.crash_book import CrashVerdict, Death, DeathKind
from tiercel.server.client.sequences import SequenceStart
from tiercel.server.hosting.front_session import FrontSession
from tiercel.server.hosting.hosted_engine import HostedEngine
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.links.link import EngineLink
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.ids import TenantId
from tiercel.values.request import SamplingParams, pack_tokens
from tiercel.wire.step_record import EngineTrail

SECRET = b"a secret of sixteen bytes or more"


class FakeHost:
    """A host without a supervisor: a listener, and a fake engine that the test replaces."""

    def __init__(self, script: Script, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.script = script
        self.engine = HostedEngine(self.clock, lambda: None)
        self.fakes: list[FakeEngine] = []
        self.secret = SECRET
        self.identity = b"host-identity-01"
        self.num_strangers = 0
        self.port = 0
        self._numbers = 0
        self._server: asyncio.Server | None = None

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    @property
    def fake(self) -> FakeEngine:
        """The present engine."""
        return self.fakes[-1]

    async def listen(self, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        make = lambda: FrontSession(self.engine, self, self.clock)  # noqa: E731
        self._server = await loop.create_server(make, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Start an engine, as a supervisor does."""
        self.engine.on_lost = lambda: None
        self.fakes.append(FakeEngine(self.script))
        ours, theirs = socket.socketpair()
        await self.fake.open(theirs)
        await self.engine.open(ours, EngineSettings(model="folder"))

    async def die(self, kind: DeathKind = DeathKind.SIGNAL, trail: EngineTrail | None = None) -> None:
        """End the engine, as a supervisor finds it dead. It is not replaced."""
        lost = asyncio.Event()
        self.engine.on_lost = lost.set
        self.fake.die()
        await lost.wait()
        self.engine.disconnect()
        death = Death(kind=kind, cause="test", trail=trail or EngineTrail(), had_progress=True)
        self.engine.take_verdict(death, CrashVerdict())

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for fake in self.fakes:
            fake.die()


@dataclass
class Access:
    """What links need."""

    secret: bytes = SECRET
    identity: bytes = b"front-identity-1"
    tls: ssl.SSLContext | None = None
    heartbeat_s: float = 5.0


@dataclass
class FrontParts:
    """A front's client, its links and its mailboxes."""

    client: FleetClient
    access: Access
    mailboxes: list[Mailbox] = field(default_factory=list[Mailbox])
    tasks: list["asyncio.Task[None]"] = field(default_factory=list["asyncio.Task[None]"])

    def connect(self, port: int) -> EngineLink:
        link = EngineLink("127.0.0.1", port, "127.0.0.1", self.access, self.client, MonotonicClock())
        self.client.add(link)
        self.tasks.append(asyncio.create_task(link.run()))
        return link

    def submit(self, *prompt: int, max_tokens: int = 8, seed: int = 0, tenant: str = "default") -> Mailbox:
        params = SamplingParams(max_tokens=max_tokens, seed=seed)
        start = SequenceStart(
            prompt=pack_tokens(prompt), num_prompt=len(prompt), params=params, n=1, tenant=TenantId(tenant)
        )
        mailbox = Mailbox()
        self.client.submit([start], mailbox, MonotonicClock().now_s())
        self.mailboxes.append(mailbox)
        return mailbox


async def read_tokens(mailbox: Mailbox) -> list[int]:
    """Read a stream to its end, which is that of a finished sequence."""
    tokens: list[int] = []
    while True:
        taken = await mailbox.take()
        assert not isinstance(taken, StreamEnd), taken
        for delivery in taken:
            tokens += delivery.tokens
            if delivery.finished is not None:
                return tokens


async def read_end(mailbox: Mailbox) -> StreamEnd:
    """Read a stream to its early end."""
    while not isinstance(taken := await mailbox.take(), StreamEnd):
        assert not any(delivery.finished for delivery in taken), "it has ended by itself"
    return taken


async def until(condition: Callable[[], bool], patience_s: float = 20.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def fleet_parts(
    *scripts: Script, heartbeat_s: float = 5.0, hold_s: float = 30.0
) -> AsyncIterator[tuple[FrontParts, list[FakeHost]]]:
    """A front with an engine for each script; all of them serve."""
    hosts = [FakeHost(script) for script in scripts]
    client = FleetClient(MonotonicClock(), ServerMetrics("tiny"), random.Random(1), hold_s=hold_s)
    front = FrontParts(client, Access(heartbeat_s=heartbeat_s))
    try:
        for host in hosts:
            await host.listen()
            await host.start()
            front.connect(host.port)
        await until(lambda: all(link.takes_work for link in client.links))
        yield front, hosts
    finally:
        client.close()
        for task in front.tasks:
            task.cancel()
        await asyncio.gather(*front.tasks, return_exceptions=True)
        for host in hosts:
            await host.close()
