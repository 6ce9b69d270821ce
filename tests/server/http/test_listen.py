"""Listening sockets."""

import os
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.server.harness import server_settings
from tiercel.server.http.listen import bind, bind_admin, check_tls, url_of
from tiercel.settings.exposure import check_exposure
from tiercel.system.port_holder import ways_out
from tiercel.values.errors import ConfigError


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
        port = _hold(tmp_path, sock, command)
        assert words.format(pid=77) in ways_out(port, "--port", tmp_path)
        (tmp_path / "77" / "fd" / "3").unlink()
        assert ways_out(port, "--port", tmp_path).startswith("choose another --port, or end")


def _hold(proc: Path, sock: socket.socket, command: list[str]) -> int:
    """Make a /proc with one process that has this socket; return the port of the socket."""
    (proc / "net").symlink_to("/proc/self/net")
    (proc / "77" / "fd").mkdir(parents=True)
    (proc / "77" / "fd" / "3").symlink_to(os.readlink(f"/proc/self/fd/{sock.fileno()}"))
    (proc / "77" / "cmdline").write_text("\0".join(command) + "\0")
    return sock.getsockname()[1]


def test_only_the_port_of_a_daemon_can_be_taken_over(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        way = ways_out(_hold(tmp_path, sock, ["tiercel", "serve"]), "--admin-port", tmp_path)
    assert way == "the process 77 (tiercel serve) listens there: choose another --admin-port, or end that process"


def test_a_holder_of_an_ipv6_port_is_found_and_a_long_command_is_cut(tmp_path: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as sock:
        way = ways_out(_hold(tmp_path, sock, ["python", "x" * 500]), "--port", tmp_path)
    assert way.startswith(f"the process 77 (python {'x' * 73}) listens there")


def test_a_process_that_only_talks_from_a_port_does_not_hold_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert ways_out(_hold(tmp_path, client, ["curl"]), "--port", tmp_path).startswith(
            "choose another --port, or end"
        )


def test_an_address_in_use_names_the_flag_and_the_way_out(model_folder: Path, tmp_path: Path) -> None:
    settings = server_settings(model_folder)
    with bind(settings) as taken:
        port = taken.getsockname()[1]
        for flag, changed in (
            ("--port", replace(settings, port=port)),
            ("--admin-port", replace(settings, admin_port=port, admin_host=settings.host)),
        ):
            with pytest.raises(ConfigError, match=f"Address already in use; .*choose another {flag}[,; ]"):
                (bind if flag == "--port" else bind_admin)(changed)
    path = str(tmp_path / "x.sock")
    with bind(replace(settings, uds=path)):
        for flag, changed in (
            ("--uds", replace(settings, uds=path)),
            ("--admin-uds", replace(settings, admin_uds=path)),
        ):
            with pytest.raises(ConfigError, match=f"Address already in use; choose another {flag}$"):
                (bind if flag == "--uds" else bind_admin)(changed)


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
