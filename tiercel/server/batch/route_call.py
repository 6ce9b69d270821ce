"""Calls of the server's own routes without a connection: a line of a batch takes the path of every other request."""

import asyncio
import math

from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from tiercel.server.tenancy.auth import BATCH_TENANT
from tiercel.server.tenancy.tenants import Tenant

_JSON = b"application/json"


class RouteAnswer(Struct, frozen=True):
    """The answer of a route."""

    status: int
    body: bytes
    retry_after_s: float | None
    is_json: bool
    ignored_fields: str = ""  # what of the request did not act


class RouteCaller:
    """Calls routes of an application for tenants, with all its layers: limits, admission, metrics, log and traces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(
        self, tenant: Tenant, path: str, body: bytes, request_id: str, gone: asyncio.Event
    ) -> RouteAnswer | None:
        """Return the answer to a JSON body; None if there is none, because `gone` was set.

        Setting `gone` has the effect of a client that closes its connection.
        """
        is_sent = False
        status, headers, parts = 0, dict[bytes, bytes](), bytearray()

        async def receive() -> Message:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update(message["headers"])
            else:
                parts.extend(message.get("body", b""))

        await self._app(_scope(tenant, path, len(body), request_id), receive, send)
        if not status:
            return None
        return RouteAnswer(
            status=status,
            body=bytes(parts),
            retry_after_s=_seconds(headers.get(b"retry-after")),
            is_json=headers.get(b"content-type", b"").startswith(_JSON),
            ignored_fields=headers.get(b"x-tiercel-ignored-fields", b"").decode(),
        )


def _scope(tenant: Tenant, path: str, length: int, request_id: str) -> Scope:
    headers = [(b"host", b"localhost"), (b"content-type", _JSON), (b"content-length", str(length).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        "state": {BATCH_TENANT: tenant},
    }


def _seconds(text: bytes | None) -> float | None:
    """Return the seconds of a Retry-After header; None if there is none."""
    try:
        seconds = float(text or b"nan")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
