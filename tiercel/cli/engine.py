"""`tiercel engine`: resolve the settings, then host an engine for fronts."""

import inspect
from typing import Annotated

import typer

from tiercel.cli.console import warn
from tiercel.settings.config import resolve
from tiercel.settings.engine_address import read_address
from tiercel.values.errors import ConfigError

_LISTEN = typer.Option("--listen", help="Address for the fronts; port 0: any.", metavar="HOST:PORT", show_default=False)

ENGINE_FLAGS = [
    inspect.Parameter("listen", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, _LISTEN])
]


def engine(given: dict[str, object]) -> int:
    """Run an engine for fronts on this or other machines.

    The fronts are started with `tiercel serve --engines` and serve HTTP. Both
    sides need the same --engine-secret-file and, unless they are on one machine,
    certificates (--help=fleet). Flags of the HTTP server have no effect here.
    """
    written = given.pop("listen", None)
    if written is None:
        raise ConfigError("engine.listen", "--listen is missing: name an address for the fronts, as in 127.0.0.1:8100")
    listen = read_address(str(written), "--listen", least_port=0)
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    if resolved.settings.server.engines is not None:
        raise ConfigError("engine.engines", "--engines has no effect on an engine: it is for `tiercel serve`")
    # lazy: no other verb needs it
    from tiercel.server.hosting.launch import host_engine

    return host_engine(resolved.settings, listen)
