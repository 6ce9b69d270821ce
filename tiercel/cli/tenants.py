"""`tiercel tenants`: list and replace the tenants of a running server."""

from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.admin import HERE, AdminKey, Url, call
from tiercel.cli.console import fail, print_table

_COLUMNS = {
    "weight": "weight",
    "band": "band",
    "group": "group",
    "requests_per_minute": "req/min",
    "tokens_per_minute": "tok/min",
    "max_concurrency": "max seqs",
    "queue_share": "queue",
    "queue_timeout_s": "queue s",
}


def tenants_app() -> typer.Typer:
    """Return the verbs under `tenants`."""
    app = typer.Typer(help="List or replace the tenants of a running server.", no_args_is_help=True)
    app.command("list")(list_tenants)
    app.command("set")(set_tenants)
    return app


def list_tenants(url: Url = HERE, admin_key: AdminKey = None) -> int:
    """List the tenants in force with their limits, and the version. Keys are shown as the start of their SHA-256."""
    return _show(call("GET", url, "tenants", admin_key))


def set_tenants(
    file: Annotated[Path, typer.Argument(help="Tenants file (YAML).", metavar="FILE")],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> int:
    """Replace the tenants of a running server by those of a file. If one tenant is wrong, nothing changes.

    They stay in force until the server reads its own tenants file again (SIGHUP or restart).
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
    tenants = body["tenants"]
    assert isinstance(tenants, list)
    used = [name for name in _COLUMNS if any(tenant[name] is not None for tenant in tenants)]
    titles = [_COLUMNS[name] for name in used]
    rows = [
        (tenant["name"], *(_show_limit(tenant[name]) for name in used), " ".join(tenant["keys_sha256"]))
        for tenant in tenants
    ]
    print_table(("tenant", *titles, "keys"), rows, right=titles)
    print(f"version {body['version']}, from the {body['source']}")


def _show_limit(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
