"""A daemon whose listening socket systemd has opened."""

import socket
from pathlib import Path

import pytest

from tests.e2e.daemon import daemon
from tests.e2e.prompts import ONE_THREAD


@pytest.mark.slow
def test_connections_wait_in_the_socket_of_systemd_while_the_daemon_restarts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as early:
                early.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                with daemon(tmp_path, *ONE_THREAD, sockets=[listener]) as running:
                    assert running.url == f"http://127.0.0.1:{port}"
                    assert early.recv(1024).startswith(b"HTTP/1.1 200")
                    assert running.complete("Once").status_code == 200
                    assert running.stop() == 0
