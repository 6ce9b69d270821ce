"""The path prefix under which a proxy shows the server."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from tiercel.values.errors import ConfigError


class RootPath:
    """Serves every route with and without the prefix: behind a proxy that removes it, and one that does not.

    As ASGI demands, `path` has the prefix in both cases, and routes are matched without it.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix  # begins with a slash and does not end with one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._prefix
            if not f"{scope['path']}/".startswith(f"{self._prefix}/"):
                scope["path"] = self._prefix + scope["path"]
                scope["raw_path"] = self._prefix.encode() + scope["raw_path"]
        await self._app(scope, receive, send)


def check_root_path(prefix: str, paths: Iterable[str]) -> None:
    """Check that no path is a route both with the prefix and without. Errors: ConfigError."""
    if prefix and any(f"{path}/".startswith(f"{prefix}/") for path in paths):
        raise ConfigError("server.root_path", f"--root-path {prefix}: the server has routes of its own under this path")
