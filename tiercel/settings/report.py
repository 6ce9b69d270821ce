"""The settings as they are shown to people and programs: each value with its source, secrets masked."""

from pathlib import Path
from typing import Literal, cast

from msgspec import Struct

from tiercel.settings.config import Resolved
from tiercel.settings.option import MASK
from tiercel.settings.settings import SETTINGS
from tiercel.settings.sourced_value import Source


class SettingReport(Struct, frozen=True):
    """One setting as `tiercel config show` and `GET /admin/config` show it."""

    value: object  # of JSON
    source: Source | Literal["default"]
    name: str | None  # of the flag or variable, or the path of the file; None for a default
    is_live: bool  # may change while the server runs


def report_settings(resolved: Resolved) -> dict[str, SettingReport]:
    """Return every setting by its key in tiercel.toml, in the order of the help."""
    return {option.key: _report(name, resolved) for name, option in SETTINGS.items()}


def masked_value(name: str, value: object) -> object:
    """Return the value of a setting as JSON; of a list of secrets, one mask per secret."""
    is_secret = SETTINGS[name].option.is_secret
    if isinstance(value, tuple):
        values = cast(tuple[object, ...], value)
        return [MASK if is_secret else part for part in values]
    return MASK if is_secret and value is not None else value


def _report(name: str, resolved: Resolved) -> SettingReport:
    value, is_live = masked_value(name, resolved.values[name]), SETTINGS[name].option.is_live
    given = resolved.given.get(name)
    if given is None:
        return SettingReport(value, "default", None, is_live)
    place = str(Path(given.name).absolute()) if given.source == "file" else given.name
    return SettingReport(value, given.source, place, is_live)
