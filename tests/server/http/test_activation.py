"""Listening sockets that systemd passes, as sd_listen_fds(3) describes it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.processes import activated
from tests.server.harness import server_settings
from tiercel.server.http.activation import adopt_listener, settings_of_listener
from tiercel.server.http.listen import bind, url_of
from tiercel.values.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
TAKE = """
import os, socket
from tiercel.values.errors import ConfigError
from tiercel.server.http.activation import activated_listener
try:
    sock = activated_listener()
    found = sock and (sock.fileno(), sock.getsockname()[1], os.get_inheritable(sock.fileno()))
except ConfigError as error:
    found = error.message
print(found, [name for name in os.environ if name.startswith("LISTEN_")])
"""


def taken(sockets: list[socket.socket], *, names: str = "", pid: str = "") -> str:
    """Pass sockets to a program from descriptor 3 on; return what it found."""
    command = activated([sys.executable, "-c", TAKE], sockets, names, pid)
    fds = [sock.fileno() for sock in sockets]
    ran = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def listener(model_folder: Path) -> socket.socket:
    return bind(server_settings(model_folder))


def test_the_only_socket_is_taken_whatever_its_name(listener: socket.socket) -> None:
    with listener:
        port = listener.getsockname()[1]
        assert taken([listener]) == f"(3, {port}, False) []"
        assert taken([listener], names="tiercel.socket") == f"(3, {port}, False) []"


def test_of_several_sockets_the_one_called_http_is_taken(listener: socket.socket, model_folder: Path) -> None:
    with listener, bind(server_settings(model_folder)) as other:
        port = listener.getsockname()[1]
        assert taken([other, listener], names="admin:http") == f"(4, {port}, False) []"
        assert "one must be called http" in taken([other, listener], names="admin:metrics")


def test_descriptors_for_another_process_are_left_alone(listener: socket.socket) -> None:
    with listener:
        assert taken([listener], pid="1") == "None []"
    assert taken([]) == "None []"


def test_a_descriptor_that_is_no_listening_socket_is_refused(tmp_path: Path) -> None:
    idle = socket.socket()
    with pytest.raises(ConfigError, match="descriptor 3 is not a listening"):
        adopt_listener(idle.detach(), "descriptor 3")
    with pytest.raises(ConfigError, match="is not a socket"):
        adopt_listener(os.open(tmp_path, os.O_RDONLY), "descriptor 3")


def test_the_address_of_the_socket_replaces_that_of_the_settings(listener: socket.socket, model_folder: Path) -> None:
    settings = replace(server_settings(model_folder), host="192.0.2.1", port=1)
    with listener:
        found = settings_of_listener(settings, listener)
        assert (found.host, found.port, found.uds) == (*listener.getsockname(), None)
    path = str(model_folder / "sock")
    with bind(replace(settings, uds=path)) as unix:
        assert url_of(settings_of_listener(settings, unix), unix) == f"unix:{path}"
