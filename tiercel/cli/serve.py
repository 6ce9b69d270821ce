"""`tiercel serve`: resolve the settings, then hand over to the HTTP process."""

from tiercel.cli.console import warn
from tiercel.settings.config import resolve


def serve(given: dict[str, object]) -> int:
    """Serve a model over the OpenAI API.

    Without MODEL, the small embedded model is served. Every flag is also a
    variable (TIERCEL_PORT=8000) and a key of tiercel.toml (port = 8000).
    --help=all lists all flags, --help=server the flags of one group. A SWITCH
    takes no value; --no- turns it off, as in --no-enable-prefix-caching.
    """
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    # lazy: no other verb needs the HTTP stack
    from tiercel.server.launch import serve as launch

    return launch(resolved.settings, origin=resolved)
