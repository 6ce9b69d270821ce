"""The connections over which a peer process sends frames: bytes that are none end it, and the log says why."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import structlog.testing

from tests.server.fleet_parts import until
from tiercel.server.client.connection import EngineConnection
from tiercel.server.hosting.hosted_engine import HostedEngine
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import ManualClock

TOO_LONG = b"\xff\xff\xff\x7f"
NO_MESSAGE = b"\x01\x00\x00\x00\xc1"


async def _own(ours: socket.socket, note_lost: Callable[[], None]) -> None:
    await EngineConnection(lambda message: None, note_lost).open(ours)


async def _hosted(ours: socket.socket, note_lost: Callable[[], None]) -> None:
    engine = HostedEngine(ManualClock(), lambda: None)
    engine.on_lost = note_lost
    await engine.open(ours, EngineSettings(model="folder"))


@pytest.mark.parametrize("sent", [TOO_LONG, NO_MESSAGE], ids=["too long", "no message"])
@pytest.mark.parametrize("opened", [_own, _hosted])
def test_an_engine_that_sends_no_frames_is_left_with_a_line(
    opened: Callable[[socket.socket, Callable[[], None]], "asyncio.Future[None]"], sent: bytes
) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        lost: list[bool] = []
        with theirs:
            await opened(ours, lambda: lost.append(True))
            theirs.sendall(sent)
            await until(lambda: bool(lost))

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())
    lines = [line for line in logs if line["event"] == "engine_frame_unreadable"]
    assert len(lines) == 1 and lines[0]["log_level"] == "error" and lines[0]["error"]
