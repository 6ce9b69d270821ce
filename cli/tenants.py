"""`tiercel tenants`: whom a running server serves, and others in their place."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import fail

if TYPE_CHECKING:
    import httpx

Url = Annotated[str, typer.Option(help="Where the server listens, with or without /v1.")]
AdminKey = Annotated[str | None, typer.Option(help="Admin key. \\[TIERCEL_ADMIN_KEY]", metavar="KEY")]
_HERE = "http://127.0.0.1:8000"
_COLUMNS = {
    "weight": "weight",
    "band": "band",
    "group": "group",
    "requests_per_minute": "req/min",
    "tokens_per_minute": "tok/min",
    "max_concurrency": "at once",
    "queue_share": "queue",
}
_TIMEOUT_S = 30.0


def tenants_app() -> typer.Typer:
    """`tiercel tenants list|set`."""
    app = typer.Typer(help="Whom a running server serves.", no_args_is_help=True)
    app.command("list")(list_tenants)
    app.command("set")(set_tenants)
    return app


def list_tenants(url: Url = _HERE, admin_key: AdminKey = None) -> int:
    """Show the tenants in force, their limits and their version. Keys are never shown."""
    return _call("GET", url, admin_key, None)


def set_tenants(
    file: Annotated[Path, typer.Argument(help="A tenants file (YAML).", metavar="FILE")],
    url: Url = _HERE,
    admin_key: AdminKey = None,
) -> int:
    """Put the tenants of a file into force at once: all of them, or none if one is wrong.

    They last until the server reads its own file again (SIGHUP, or a restart).
    """
    try:
        text = file.read_bytes()
    except OSError as exc:
        fail(f"{file}: cannot be read: {exc.strerror}")
        return 2
    return _call("PUT", url, admin_key, text)


def _call(method: str, url: str, admin_key: str | None, text: bytes | None) -> int:
    # lazy: no other verb needs the HTTP client
    import httpx

    # lazy: as above
    from tiercel.config import client_admin_key

    key = admin_key or client_admin_key()
    if key is None:
        fail("no admin key: give --admin-key, or set TIERCEL_ADMIN_KEY")
        return 2
    where = f"{url.rstrip('/').removesuffix('/v1')}/admin/tenants"
    headers = {"Authorization": f"Bearer {key}"} | ({} if text is None else {"Content-Type": "application/yaml"})
    try:
        answer = httpx.request(method, where, content=text, headers=headers, timeout=_TIMEOUT_S)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        fail(f"{where}: {exc or type(exc).__name__}")
        return 1
    if answer.status_code != 200:
        fail(_reason(answer, body))
        return 1
    _print(body)
    return 0


def _reason(answer: "httpx.Response", body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message or f"the server answered {answer.status_code}"


def _print(body: dict[str, object]) -> None:
    # lazy: most verbs print no table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    tenants = body["tenants"]
    assert isinstance(tenants, list)
    used = [name for name in _COLUMNS if any(tenant[name] is not None for tenant in tenants)]
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant", no_wrap=True)
    for name in used:
        table.add_column(_COLUMNS[name], justify="right")
    table.add_column("keys")
    for tenant in tenants:
        cells = ["-" if tenant[name] is None else _cell(tenant[name]) for name in used]
        table.add_row(*(Text(cell) for cell in (tenant["name"], *cells, " ".join(tenant["keys_sha256"]))))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"version {body['version']}, from the {body['source']}")


def _cell(value: object) -> str:
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
