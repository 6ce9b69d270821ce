"""`tiercel tenants`: show and replace the tenants of a running server."""

from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.admin import HERE, AdminKey, Url, call
from tiercel.cli.console import fail

_COLUMNS = {
    "weight": "weight",
    "band": "band",
    "group": "group",
    "requests_per_minute": "req/min",
    "tokens_per_minute": "tok/min",
    "max_concurrency": "at once",
    "queue_share": "queue",
}


def tenants_app() -> typer.Typer:
    """`tiercel tenants list|set`."""
    app = typer.Typer(help="Show and replace the tenants of a running server.", no_args_is_help=True)
    app.command("list")(list_tenants)
    app.command("set")(set_tenants)
    return app


def list_tenants(url: Url = HERE, admin_key: AdminKey = None) -> int:
    """Show the tenants in force, their limits and their version. Keys are never shown."""
    return _show(call("GET", url, "tenants", admin_key))


def set_tenants(
    file: Annotated[Path, typer.Argument(help="Tenants file (YAML).", metavar="FILE")],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> int:
    """Replace the tenants of a running server by those of a file: all of them, or none if one is wrong.

    They last until the server reloads its own file (SIGHUP) or restarts.
    """
    try:
        text = file.read_bytes()
    except OSError as exc:
        fail(f"{file}: cannot be read: {exc.strerror}")
        return 2
    return _show(call("PUT", url, "tenants", admin_key, text, "application/yaml"))


def _show(body: dict[str, object] | None) -> int:
    if body is None:
        return 1
    _print(body)
    return 0


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
