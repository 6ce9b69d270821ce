"""Settings for people and programs: each value with where it comes from, secrets masked."""

from pathlib import Path
from typing import Literal, cast

from msgspec import Struct

from tiercel.config import Resolved
from tiercel.options import Options, flag_of
from tiercel.word import MASK, Source


class ShownSetting(Struct, frozen=True):
    """One setting as `tiercel config show` and `GET /admin/config` tell it."""

    value: object  # of JSON
    source: Source | Literal["default"]
    name: str | None  # of the flag or variable, path of the file; None for a default
    is_live: bool  # may change while the server runs


def shown_settings(resolved: Resolved) -> dict[str, ShownSetting]:
    """Every setting by its key in tiercel.toml, in the order of the help."""
    return {name.replace("_", "-"): _shown(name, resolved) for name in Options.model_fields}


def shown_value(name: str, value: object) -> object:
    """A value of a field of `Options` as JSON has it; of a secret nothing but how many there are."""
    is_secret = flag_of(Options.model_fields[name]).is_secret
    if isinstance(value, tuple):
        values = cast(tuple[object, ...], value)
        return [MASK if is_secret else one for one in values]
    return MASK if is_secret and value is not None else value


def _shown(name: str, resolved: Resolved) -> ShownSetting:
    value = shown_value(name, getattr(resolved.options, name))
    is_live = flag_of(Options.model_fields[name]).is_live
    word = resolved.words.get(name)
    if word is None:
        return ShownSetting(value, "default", None, is_live)
    where = str(Path(word.name).absolute()) if word.source == "file" else word.name
    return ShownSetting(value, word.source, where, is_live)
