"""The control socket of a daemon: requests, descriptors, and peers that are not understood."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from tiercel.server.control.caller import ControlCaller
from tiercel.server.control.listener import ControlConnection, ControlListener
from tiercel.server.control.messages import (
    HTTP,
    ControlError,
    Drain,
    Leaving,
    Offer,
    Refused,
    Serving,
    TakeOver,
    decode,
    decode_answer,
)
from tiercel.server.http.uvicorn_server import loop_factory

T = TypeVar("T")


class Handler:
    """Records what is asked of a daemon, and offers one socket."""

    def __init__(self, offered: tuple[int, ...] = ()) -> None:
        self.offered = offered
        self.heard: list[object] = []

    def drain(self) -> float:
        self.heard.append("drain")
        return 1.0

    async def hand_over(self, request: TakeOver, connection: ControlConnection) -> None:
        self.heard.append(request.pid)
        connection.send(Offer(os.getpid(), (HTTP,) * len(self.offered)), self.offered)
        packet = await connection.receive()
        self.heard.append(decode(packet, Serving) if packet else "gone")
        connection.send(Leaving())


def while_listening(path: Path, handler: Handler, act: Callable[[], T]) -> T:
    """Call a blocking function in a thread while a control socket is open."""

    async def run() -> T:
        listener = ControlListener(path, handler)
        listener.open()
        try:
            return await asyncio.to_thread(act)
        finally:
            await asyncio.sleep(0.05)
            listener.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run())


def caller_of(path: Path) -> ControlCaller:
    caller = ControlCaller.connect(path)
    assert caller is not None
    return caller


def ask_raw(path: Path, packet: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        sock.sendall(packet)
        return sock.recv(4096)


def test_a_drain_is_passed_on_and_the_socket_goes_with_its_daemon(tmp_path: Path) -> None:
    path, handler = tmp_path / "sock", Handler()

    def act() -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with caller_of(path) as caller:
            assert caller.pid == os.getpid()
            caller.drain()

    while_listening(path, handler, act)
    assert handler.heard == ["drain"]
    assert not path.exists()
    assert ControlCaller.connect(path) is None


def test_listening_sockets_are_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        handler = Handler((listening.fileno(),))

        def act() -> int:
            with caller_of(path) as caller:
                names, (fd,) = caller.take_over()
                assert names == (HTTP,)
                assert not os.get_inheritable(fd)
                with socket.socket(fileno=fd) as taken:
                    caller.confirm()
                    return taken.getsockname()[1]

        assert while_listening(path, handler, act) == listening.getsockname()[1]
    assert handler.heard == [os.getpid(), Serving()]


def test_a_daemon_that_dies_before_it_serves_is_noticed(tmp_path: Path) -> None:
    path, handler = tmp_path / "sock", Handler()

    def die() -> None:
        with caller_of(path) as caller:
            caller.take_over()

    while_listening(path, handler, die)
    assert handler.heard == [os.getpid(), "gone"]


@pytest.mark.parametrize("packet", [b"", b"\xc1", b"x" * 5000, msgspec.msgpack.encode({"type": "serving"})])
def test_what_is_no_request_is_refused(tmp_path: Path, packet: bytes) -> None:
    path, handler = tmp_path / "sock", Handler()
    answer = while_listening(path, handler, lambda: ask_raw(path, packet or b"\x80"))
    assert isinstance(decode_answer(answer), Refused)
    assert not handler.heard


def test_a_request_of_another_version_is_refused_by_its_version(tmp_path: Path) -> None:
    path, handler = tmp_path / "sock", Handler()
    packet = msgspec.msgpack.encode(Drain(version=99))
    refused = decode_answer(while_listening(path, handler, lambda: ask_raw(path, packet)))
    assert isinstance(refused, Refused)
    assert "not 99" in refused.reason
    assert not handler.heard


def test_a_refusal_is_an_error_for_the_caller(tmp_path: Path) -> None:
    class Refusing(Handler):
        async def hand_over(self, request: TakeOver, connection: ControlConnection) -> None:
            connection.send(Refused("the engine is still loading"))

    def act() -> None:
        with caller_of(tmp_path / "sock") as caller:
            caller.take_over()

    with pytest.raises(ControlError, match="still loading"):
        while_listening(tmp_path / "sock", Refusing(), act)


def test_a_socket_that_a_dead_daemon_left_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    handler = Handler()

    def act() -> None:
        with pytest.raises(FileExistsError):
            ControlListener(path, Handler()).open()
        with caller_of(path) as caller:
            caller.drain()

    while_listening(path, handler, act)
    assert handler.heard == ["drain"]
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_the_socket_of_the_daemon_that_took_over_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"

    def replace() -> None:
        path.unlink()
        path.write_text("of another daemon")

    while_listening(path, Handler(), replace)
    assert path.read_text() == "of another daemon"
