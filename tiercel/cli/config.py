"""`tiercel config`: show or change settings, here or in a running server, and print the reference page."""

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercel.cli.admin import HERE, AdminKey, Url, call
from tiercel.cli.config_page import reference
from tiercel.cli.console import fail, print_table, warn
from tiercel.cli.flags import make_command, with_settings
from tiercel.settings.config import resolve
from tiercel.settings.report import report_settings
from tiercel.settings.settings import SETTINGS

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
        ("is_changed", "--changed", "Print only settings that differ from their default."),
    )
]


def config_app(listing: str, *, has_flags: bool = True) -> typer.Typer:
    """Return the verbs under `config`. Without `has_flags` `show` has none, which saves time."""
    app = typer.Typer(help="Show or change the settings, with the source of each.", no_args_is_help=True)
    app.command("show")(with_settings(show, listing, own=_OWN) if has_flags else make_command(show, ()))
    app.command("get")(get)
    app.command("set")(set_values)
    app.command("reload")(reload)
    app.command("reference")(print_reference)
    return app


def show(given: dict[str, object]) -> int:
    """Show the settings that `tiercel serve` would use here, and the source of each.

    Takes the flags of `tiercel serve`. A flag overrides an environment variable,
    a variable overrides tiercel.toml, tiercel.toml overrides the default.
    Secrets are masked.
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
        list[str], typer.Argument(help="Settings to change, such as max-num-queued-reqs=512.", metavar="KEY=VALUE...")
    ],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> int:
    """Change settings of a running server. If one of them is wrong, nothing changes.

    Changes last until the server reads its files again (SIGHUP, `tiercel config
    reload`) or restarts. KEY= removes an earlier change.
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
    """Make a running server read tiercel.toml and the tenants file again. If either is wrong, neither is applied."""
    body = call("POST", url, "reload", admin_key)
    if body is None:
        return 1
    print(f"settings version {body['config_version']}, tenants version {body['tenants_version']}")
    return 0


def print_reference() -> int:
    """Print docs/configuration.md: every setting with its limits and default."""
    print(reference(), end="")
    return 0


def _print(body: "Mapping[str, Any]", *, as_json: bool) -> None:  # Any: JSON of a server
    if as_json:
        print(json.dumps(body, indent=2))
        return
    settings = body["settings"]
    rows: list[tuple[str, ...]] = []
    group = ""
    for option in SETTINGS.values():
        if option.key not in settings:
            continue
        if option.option.group.name != group:
            group = option.option.group.name
            rows.append((group,))
        one = settings[option.key]
        source = one["source"] if one["name"] is None else f"{one['source']} {one['name']}"
        rows.append((f"  {option.key}", _show_value(one["value"]), source))
    print_table(("key", "value", "source"), rows, has_header=False)
    if "version" in body:
        print(f"version {body['version']}, {body['source']}, since {body['changed_at']}")


def _show_value(value: object) -> str:
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
