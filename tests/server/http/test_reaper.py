"""Removal of idle and stalled connections."""

import asyncio
from pathlib import Path

from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, text_body, until, with_server
from tiercel.server.http.reaper import Reaper
from tiercel.values.clock import ManualClock


async def _connect(server: Running, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


def test_a_connection_with_endless_headers_is_aborted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        clock = ManualClock()
        reaper, connections = Reaper(clock, 10), server.server.server_state.connections
        fresh = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
        slow = [await _connect(server, fresh), await _connect(server, fresh + b"\r\n" + fresh)]
        await slow[1][0].readuntil(b"}")
        busy = asyncio.create_task(server.http.post("/v1/completions", json=text_body(max_tokens=20)))
        await until(lambda: server.engine.steps > 0 and len(connections) == 3)
        reaper.sweep(connections)
        clock.advance(9)
        reaper.sweep(connections)
        assert len(connections) == 3
        clock.advance(1)
        reaper.sweep(connections)
        await until(lambda: len(connections) == 1)
        for _, writer in slow:
            writer.close()
        assert (await busy).status_code == 200

    with_server(server_settings(model_folder), test, Script(step_s=0.1))


def test_a_connection_that_is_used_between_sweeps_is_kept(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        clock = ManualClock()
        reaper, connections = Reaper(clock, 10), server.server.server_state.connections
        for _ in range(5):
            assert (await server.http.get("/version")).status_code == 200
            reaper.sweep(connections)
            clock.advance(9)
        assert len(connections) == 1

    with_server(server_settings(model_folder), test)
