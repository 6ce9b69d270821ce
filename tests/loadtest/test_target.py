"""The calls before the load: an address that can never work ends at once, and a wait says what it waits for."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tiercel.loadtest.settings import BenchSettings
from tiercel.loadtest.target import Target
from tiercel.system.wait_notice import WaitNotice
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import ConfigError, TiercelError


@pytest.fixture
def banner_server() -> Iterator[int]:
    """A server that does not speak HTTP, nor TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as closing:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                closing.callback(sock.close)
                sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 4)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


async def _model(address: str, patience_s: float = 30.0) -> str:
    settings = BenchSettings(base_url=address, ready_check_timeout_sec=patience_s)
    async with Target(settings, {}, MonotonicClock()) as target:
        return await target.model()


def _refusal(address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(_model(address))
    return caught.value.message


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:8000", "an address begins with http:// or https://"),
        ("localhost", "an address begins with http:// or https://"),
        ("ftp://127.0.0.1", "an address begins with http:// or https://"),
        ("http://no-such-host.invalid", "the name of the host cannot be resolved"),
        ("http://127.0.0.1:port", "no port"),
        ("http://127.0.0.1:65536", "a port is a number up to 65535"),
    ],
)
def test_an_address_that_can_never_work_ends_at_once(address: str, reason: str) -> None:
    message = _refusal(address)
    assert f"{address}: " in message and reason in message


def test_a_name_that_the_resolver_cannot_tell_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    with pytest.raises(TiercelError) as caught:
        asyncio.run(_model("http://server", patience_s=0.1))
    assert caught.value.code == "bench.not_ready"


def test_a_server_of_another_protocol_ends_at_once(banner_server: int) -> None:
    assert "does not speak HTTP" in _refusal(f"http://127.0.0.1:{banner_server}")
    assert "no TLS connection" in _refusal(f"https://127.0.0.1:{banner_server}")


def test_a_closed_port_is_waited_for_until_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TiercelError, match="All connection attempts failed"):
        asyncio.run(_model(f"http://127.0.0.1:{port}", patience_s=0.1))


def test_a_wait_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    with WaitNotice("a bus", every_s=0.001) as notice:
        said = ""
        while "a train" not in said:
            notice.words = "a train" if "a bus" in said else "a bus"
            time.sleep(0.001)
            said += capsys.readouterr().err
    assert "tiercel: waiting for a bus (0 s)\n" in said
