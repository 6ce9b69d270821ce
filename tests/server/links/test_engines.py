"""The engines of a front when their addresses change."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.fleet_parts import SECRET, FakeHost, until
from tiercel.server.hosting.front_session import FrontSession
from tiercel.server.links import engines
from tiercel.server.links.engines import RemoteEngines
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.settings.engine_address import EngineSource
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock


class _NoDeaths:
    def on_engine_death(self, kind: str) -> None:
        raise AssertionError(kind)


def test_a_file_of_addresses_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_READ_S", 0.02)
    path = tmp_path / "engines"

    async def run() -> None:
        hosts = [FakeHost(Script()) for _ in range(2)]
        for host in hosts:
            await host.listen()
            await host.start()
        first, second = (f"127.0.0.1:{host.port}\n" for host in hosts)
        clock = MonotonicClock()
        client = FleetClient(clock, ServerMetrics("tiny"), random.Random(1), hold_s=30.0)
        remote = RemoteEngines(EngineSource(path=str(path)), SECRET, tls=None)
        running = asyncio.create_task(remote.run(client, EngineSettings(model="folder"), clock, _NoDeaths()))

        def ports() -> set[int]:
            return {link.port for link in client.links if link.takes_work}

        try:
            await asyncio.sleep(0.05)  # no file: no engine, and no end
            assert not client.links
            path.write_text("# none yet\n")
            await asyncio.sleep(0.05)
            path.write_text(first)
            await until(lambda: ports() == {hosts[0].port})
            path.write_text(first + second)
            await until(lambda: ports() == {host.port for host in hosts})
            for wrong in ("no address", "192.0.2.1:8100\n", first * 2, "#" * 70_000, ""):
                path.write_text(wrong)
                await asyncio.sleep(0.06)
                assert ports() == {host.port for host in hosts}, wrong[:20]
            path.write_text(second)
            await asyncio.sleep(0.06)
            assert len(client.links) == 2  # an engine that is connected stays until it leaves
            await hosts[0].close()
            for session in [*hosts[0].engine._fronts.values()]:  # pyright: ignore[reportPrivateUsage]
                assert isinstance(session, FrontSession)
                session._end("the test ends it")  # pyright: ignore[reportPrivateUsage]
            await until(lambda: {link.port for link in client.links} == {hosts[1].port})
            assert ports() == {hosts[1].port}
        finally:
            remote.stop()
            await running
            client.close()
            for host in hosts:
                await host.close()

    asyncio.run(run())
