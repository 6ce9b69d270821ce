"""Requests to /admin of a running server, with the admin key."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercel.cli.console import fail
from tiercel.system.server_url import read_server_url
from tiercel.system.wait_notice import WaitNotice

if TYPE_CHECKING:
    import httpx

Url = Annotated[str, typer.Option(help="URL of the server, with or without /v1, or unix:PATH.")]
AdminKey = Annotated[str | None, typer.Option(help="Admin key. \\[TIERCEL_ADMIN_KEY]", metavar="KEY")]
HERE = "http://127.0.0.1:8000"
_TIMEOUT_S = 30.0


def call(
    method: str, url: str, route: str, admin_key: str | None, text: bytes | None = None, content_type: str = ""
) -> dict[str, Any] | None:  # Any: JSON of a server
    """Call a route of /admin and return its JSON; on failure, print the reason and return None.

    Errors: ConfigError if `url` can be no address of a server.
    """
    # lazy: no other verb needs the HTTP client
    import httpx

    # lazy: as above
    from tiercel.settings.config import client_admin_key

    key = admin_key or client_admin_key()
    if key is None:
        fail("no admin key: give --admin-key or set TIERCEL_ADMIN_KEY")
        raise typer.Exit(2)
    path = url.removeprefix("unix:") if url.startswith("unix:") else None  # a Unix socket: --admin-uds or --uds
    address = f"{read_server_url(url, '--url') if path is None else 'http://localhost'}/admin/{route}"
    headers = {"Authorization": f"Bearer {key}"} | ({} if text is None else {"Content-Type": content_type})
    try:
        with (
            WaitNotice(f"an answer of {address}"),
            httpx.Client(transport=httpx.HTTPTransport(uds=path) if path else None, timeout=_TIMEOUT_S) as client,
        ):
            answer = client.request(method, address, content=text, headers=headers)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        fail(f"{address}: {exc or type(exc).__name__}")
        return None
    if answer.status_code != 200:
        fail(_reason(answer, body))
        return None
    return body


def _reason(answer: "httpx.Response", body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message or f"the server answered {answer.status_code}"
