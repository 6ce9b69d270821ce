"""`tiercel config`: the settings with their sources, here or in a running server, and the reference page."""

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercel.cli.admin import HERE, AdminKey, Url, call
from tiercel.cli.config_page import reference
from tiercel.cli.console import fail, warn
from tiercel.cli.flags import with_settings
from tiercel.config import resolve
from tiercel.settings import SETTINGS
from tiercel.settings_report import report_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

_OWN = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option(flag, help=text)],
    )
    for name, flag, text in (
        ("as_json", "--json", "Print JSON."),
        ("is_changed", "--changed", "Only settings that are not at their default."),
    )
]


def config_app(listing: str) -> typer.Typer:
    """`tiercel config show|get|set|reload|reference`."""
    app = typer.Typer(help="Show and change settings, with the source of each.", no_args_is_help=True)
    app.command("show")(with_settings(show, listing, own=_OWN))
    app.command("get")(get)
    app.command("set")(set_values)
    app.command("reload")(reload)
    app.command("reference")(print_reference)
    return app


def show(given: dict[str, object]) -> int:
    """Show the settings that `tiercel serve` would start with, and the source of each.

    Takes the flags of `tiercel serve`. Flags take precedence over variables,
    variables over tiercel.toml, and tiercel.toml over defaults. Keys are masked.
    """
    as_json, is_changed = (bool(given.pop(name, False)) for name in ("as_json", "is_changed"))
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    rows = {
        key: {"value": one.value, "source": one.source, "name": one.name, "is_live": one.is_live}
        for key, one in report_settings(resolved).items()
        if one.source != "default" or not is_changed
    }
    _print({"settings": rows}, as_json=as_json)
    return 0


def get(
    url: Url = HERE,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show the settings of a running server, with their version."""
    body = call("GET", url, "config", admin_key)
    if body is None:
        return 1
    _print(body, as_json=as_json)
    return 0


def set_values(
    pairs: Annotated[
        list[str], typer.Argument(help="Settings, such as max-num-queued-reqs=512.", metavar="KEY=VALUE...")
    ],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> int:
    """Change settings of a running server: all of them, or none if one is wrong.

    The changes last until the server reloads its files (SIGHUP, `tiercel config
    reload`) or restarts. KEY= drops an earlier change of KEY.
    """
    values: dict[str, object] = {}
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not is_pair:
            fail(f"{pair}: expected KEY=VALUE, such as max-num-queued-reqs=512")
            return 2
        values[key] = value or None
    body = call("PATCH", url, "config", admin_key, json.dumps(values).encode(), "application/json")
    if body is None:
        return 1
    print(f"version {body['version']}")
    return 0


def reload(url: Url = HERE, admin_key: AdminKey = None) -> int:
    """Reload tiercel.toml and the tenants file of a running server: both, or none if one is wrong."""
    body = call("POST", url, "reload", admin_key)
    if body is None:
        return 1
    print(f"settings version {body['config_version']}, tenants version {body['tenants_version']}")
    return 0


def print_reference() -> int:
    """Print docs/configuration.md: every setting with its bounds and default."""
    print(reference(), end="")
    return 0


def _print(body: "Mapping[str, Any]", *, as_json: bool) -> None:  # Any: JSON of a server
    if as_json:
        print(json.dumps(body, indent=2))
        return
    # lazy: most verbs print no table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    settings = body["settings"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("source", style="dim")
    group = ""
    for option in SETTINGS.values():
        if option.key not in settings:
            continue
        if option.option.group.name != group:
            group = option.option.group.name
            table.add_row(Text(group, style="bold"), "", "")
        one = settings[option.key]
        source = one["source"] if one["name"] is None else f"{one['source']} {one['name']}"
        table.add_row(f"  {option.key}", Text(_cell(one["value"])), Text(source))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if "version" in body:
        console.print(f"version {body['version']}, {body['source']}, since {body['changed_at']}")


def _cell(value: object) -> str:
    match value:
        case None | [] | {} | "":
            return "-"
        case bool():
            return "true" if value else "false"
        case list():
            return " ".join(str(part) for part in value)
        case dict():
            return json.dumps(value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)
