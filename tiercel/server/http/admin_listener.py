"""The second listener, for the operator: /admin, /metrics and /ui answer there and not on the public listener."""

import socket
from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send

from tiercel.server.http.failure import fault_response, no_route, route_path

_ADMIN_PATHS = frozenset(("admin", "metrics", "ui"))  # first parts of paths
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class AdminListener:
    """The address of the second listener. Both listeners belong to one HTTP server, which drains and closes them."""

    def __init__(self, sock: socket.socket) -> None:
        name = cast(tuple[str, int] | str, sock.getsockname())
        self._path = name if isinstance(name, str) else None
        self._host, self._port = ("", 0) if isinstance(name, str) else name[:2]

    def has(self, scope: Scope) -> bool:
        """Return whether a request arrived at this listener."""
        host, port = cast(tuple[str, int | None], scope.get("server") or ("", None))
        if self._path is not None:
            return port is None and host == self._path
        return port == self._port and (host == self._host or self._host in _ANY_ADDRESS)


class AdminElsewhere:
    """Answers 404 to requests for the operator's routes that arrive at the public listener.

    The admin listener serves every route: the page at /ui has a chat.
    """

    def __init__(self, app: ASGIApp, listener: AdminListener) -> None:
        self._app = app
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_for_operator(route_path(scope)) and not self._listener.has(scope):
            await fault_response(no_route(route_path(scope)), scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def is_for_operator(path: str) -> bool:
    """Return whether a path belongs to the operator's routes."""
    return path.removeprefix("/").partition("/")[0] in _ADMIN_PATHS
