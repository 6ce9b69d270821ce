"""Which requests arrived at the second listener."""

import socket
from pathlib import Path

from tiercel.server.http.admin_listener import AdminListener


class Listening(socket.socket):
    """A socket that claims to be bound to an address."""

    def __init__(self, name: object) -> None:
        super().__init__()
        self.name = name

    def getsockname(self) -> object:
        return self.name


def has(bound: object, arrived_at: object) -> bool:
    with Listening(bound) as sock:
        return AdminListener(sock).has({"type": "http", "server": arrived_at})


def test_requests_belong_to_the_listener_at_whose_address_they_arrive(tmp_path: Path) -> None:
    assert has(("127.0.0.1", 9000), ("127.0.0.1", 9000))
    assert has(("0.0.0.0", 9000), ("10.1.2.3", 9000))
    assert has(("::", 9000, 0, 0), ("fd00::1", 9000))
    assert not has(("127.0.0.1", 9000), ("127.0.0.1", 8000))
    assert not has(("127.0.0.1", 8000), ("10.1.2.3", 8000))
    assert not has(("127.0.0.1", 9000), ("/run/public.sock", None))
    assert has("/run/admin.sock", ("/run/admin.sock", None))
    assert not has("/run/admin.sock", ("/run/public.sock", None))
    assert not has("/run/admin.sock", ("127.0.0.1", 8000))
    assert not has("/run/admin.sock", None)
