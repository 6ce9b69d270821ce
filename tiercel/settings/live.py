"""Which settings may change while the server runs, and why the others may not."""

from collections.abc import Mapping
from typing import cast

from tiercel.settings.settings import DEFAULT_SEQUENCES, SETTINGS


def changed_settings(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the settings whose values differ."""
    return tuple(name for name in SETTINGS if before[name] != after[name])


def why_restart(name: str, started: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """Return the reason why a setting needs a restart to get its new value; None if it does not.

    `started` are the values at the start of the server, `after` the new ones.
    """
    option = SETTINGS[name].option
    if not option.is_live:
        return option.group.why_fixed
    if option.at_most_as_started:
        most, wanted = cast(int | None, started[name]), cast(int | None, after[name])
        if wanted is None:  # as many as at the start
            return None
        if most is None and wanted > DEFAULT_SEQUENCES:
            return f"the server started with the default, which is {DEFAULT_SEQUENCES:,} on some devices"
        if most is not None and wanted > most:
            return f"the server started with {most:,}, and memory for that many is laid out"
    return None
