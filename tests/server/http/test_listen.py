"""Listening sockets."""

import os
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.server.harness import server_settings
from tiercel.errors import ConfigError
from tiercel.exposure import check_exposure
from tiercel.port_holder import ways_out
from tiercel.server.http.listen import bind, check_tls, url_of


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["tiercel", "serve"],
            "tiercel serve with pid {pid} listens there: choose another --port, replace that daemon",
        ),
        (["python", "app.py"], "the process {pid} (python app.py) listens there: choose another --port, or end"),
    ],
)
def test_the_process_that_has_a_port_is_named_with_the_ways_out(command: list[str], words: str, tmp_path: Path) -> None:
    """A process of /proc that holds a real socket of this test."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port, link = sock.getsockname()[1], os.readlink(f"/proc/self/fd/{sock.fileno()}")
        (tmp_path / "net").symlink_to("/proc/self/net")
        (tmp_path / "77" / "fd").mkdir(parents=True)
        (tmp_path / "77" / "fd" / "3").symlink_to(link)
        (tmp_path / "77" / "cmdline").write_text("\0".join(command) + "\0")
        assert words.format(pid=77) in ways_out(port, "--port", tmp_path)
        (tmp_path / "77" / "fd" / "3").unlink()
        assert ways_out(port, "--port", tmp_path).startswith("choose another --port, or end")


def test_answers_are_not_held_back_by_nagle(model_folder: Path) -> None:
    """asyncio sets TCP_NODELAY only on sockets with an explicit protocol; without it answers take 40 ms more."""
    with bind(server_settings(model_folder)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_listening_on_other_hosts_needs_a_key_or_an_explicit_flag(model_folder: Path, host: str) -> None:
    settings = replace(server_settings(model_folder), host=host)
    with pytest.raises(ConfigError, match="can be reached from other machines: give --api-key"):
        check_exposure(settings)
    check_exposure(replace(settings, api_keys=("k",)))
    check_exposure(replace(settings, allow_unauthenticated=True))


def test_the_second_listener_needs_a_key_like_the_first(model_folder: Path) -> None:
    settings = replace(server_settings(model_folder), admin_port=0, admin_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"--admin-host 0\.0\.0\.0 can be reached from other machines"):
        check_exposure(settings)
    check_exposure(replace(settings, api_keys=("k",)))
    check_exposure(replace(settings, admin_host=None))
    check_exposure(replace(settings, admin_port=None, admin_host=None, admin_uds="/run/x.sock"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_listening_on_loopback_needs_no_key(model_folder: Path, host: str) -> None:
    check_exposure(replace(server_settings(model_folder), host=host))


def test_a_missing_certificate_is_named_in_the_error(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        check_tls(replace(server_settings(model_folder), ssl_certfile="absent.pem"))
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        check_tls(replace(server_settings(model_folder), ssl_keyfile="key.pem"))
    check_tls(server_settings(model_folder))


def test_an_address_of_another_machine_is_named_in_the_error(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind(replace(server_settings(model_folder), host="192.0.2.1"))


def test_the_announced_url_can_be_opened(model_folder: Path, tmp_path: Path) -> None:
    settings = replace(server_settings(model_folder), host="0.0.0.0")
    with bind(settings) as listener:
        assert url_of(settings, listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    path = str(tmp_path / "x.sock")
    with bind(replace(settings, uds=path)) as listener:
        assert url_of(settings, listener) == f"unix:{path}"
