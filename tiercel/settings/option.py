"""The declaration of a setting: an annotated field of a msgspec struct with type, default, bounds and help.

The settings of the daemon (`settings.py`), of the load test, the simulator and the planner are declared this way.
Flags, environment variables, keys of tiercel.toml, `--help` and docs/configuration.md are derived from the fields.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from tiercel.values.errors import ConfigError
from tiercel.values.units import parse_bytes, parse_length, write_bytes

LENGTH: Final = "tokens such as 4096, 8k or 8K"
SIZE: Final = "a size such as 1073741824, 512M or 2GiB"
NAMES: Final = "names that are not empty: given again, or as a JSON list"
MASK: Final = "***"
"""Printed in place of a secret."""

_CONFIDENTIAL = re.compile(r"(?<=://).*(?=@)|(?<=[?#]).+", re.DOTALL)
"""The parts of a URL that are never printed: user and password, and the query, where tokens stand."""
_WHOLE = re.compile(r"([+-]?\d+(?:_\d+)*)(?:\.0*)?", re.ASCII)
_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("0", "false", "f", "no", "n", "off")
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}

S = TypeVar("S", bound=Struct)


class _Own(Enum):
    """The default of an option whose default is that of its field."""

    DEFAULT = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A heading in `--help` and in docs/configuration.md."""

    name: str
    why_fixed: str = ""  # why the settings of the group that are not live need a restart


@dataclass(frozen=True, slots=True)
class Option:
    """The metadata of a field: everything about a setting beyond its type and the field's default."""

    group: Group
    help: str
    metavar: str = ""
    within: tuple[float, float] | None = None  # smallest and largest number
    expects: str = ""  # completes the sentence "expected ..."; empty = derived from the type and the bounds
    read: Callable[[object], object] | None = None  # applied to what was written before its type is checked
    name: str = ""  # the operator's name for the setting, with underscores; empty = the field's name
    default: object = _Own.DEFAULT  # the operator's default where the field's default differs
    vllm_variable: str = ""  # environment variable of vLLM that sets it
    takes_many: bool = False  # one flag may be followed by several values
    may_be_empty: bool = False  # of text
    is_rare: bool = False  # listed by --help=all only
    is_secret: bool = False  # the value is never printed
    is_live: bool = False  # may change while the server runs
    at_most_as_started: bool = False  # a live number that may not exceed its value at the start


@dataclass(frozen=True, slots=True)
class OptionField:
    """A declared setting: the option together with its field."""

    name: str  # with underscores
    field: str  # of the struct
    kind: Any  # Any: a type, without None
    default: Any  # Any: a value of that type, or None
    option: Option

    @property
    def flag(self) -> str:
        """The flag, such as `--max-num-seqs`."""
        return flag_name(self.name)

    @property
    def key(self) -> str:
        """The key in tiercel.toml, such as `max-num-seqs`."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, such as `TIERCEL_MAX_NUM_SEQS`."""
        return f"TIERCEL_{self.name.upper()}"

    @property
    def is_switch(self) -> bool:
        """Whether the setting is on or off."""
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        """Whether the setting holds several values."""
        return get_origin(self.kind) in (tuple, list)

    @property
    def takes_object(self) -> bool:
        """Whether the setting is a JSON object."""
        return get_origin(self.kind) is dict

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, if the setting takes only certain words."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def expectation(self) -> str:
        """The end of the sentence "expected ..."."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        expects = self.option.expects or _EXPECTED.get(self.kind, "text")
        if self.option.within is None or " from " in expects:
            return expects
        low, high = self.option.within
        return f"{expects}, from {low:,} to {high:,}"

    @property
    def shown_default(self) -> str:
        """The default as an operator would write it; empty if there is none."""
        default: object = self.default
        match default:
            case None | () | [] | {} | "":
                return ""
            case bool():
                return "true" if default else "false"
            case int() if self.option.read is read_size:
                return write_bytes(default)
            case float():
                return f"{default:g}"
            case tuple():
                return " ".join(cast(tuple[str, ...], default))
            case _:
                return f"{default}"

    def read(self, value: object) -> object:
        """Return the value of the setting that was written as `value`. Errors: ValueError."""
        if isinstance(value, bool) and self.kind is not bool:
            raise ValueError(value)  # Python takes True for 1
        try:
            if self.option.read is not None:
                value = self.option.read(value)
            if value is None:
                return None
            found = _convert(value, self.kind)
        except (TypeError, OverflowError, RecursionError, msgspec.ValidationError) as exc:
            raise ValueError(str(exc)) from exc
        if found == "" and not self.option.may_be_empty:
            raise ValueError(value)
        if self.option.within is not None:
            low, high = self.option.within
            if not low <= cast(float, found) <= high:
                raise ValueError(value)
        return found


def options_of(*structs: type[Struct]) -> dict[str, OptionField]:
    """Return the options that structs declare, by name; a field without an `Option` is left out."""
    found: dict[str, OptionField] = {}
    for struct in structs:
        for field in msgspec.structs.fields(struct):
            option = next((part for part in getattr(field.type, "__metadata__", ()) if isinstance(part, Option)), None)
            if option is None:
                continue
            name = option.name or field.name
            found[name] = OptionField(name, field.name, _without_none(field.type), _default(field, option), option)
    return found


def read_options(struct: type[S], written: Mapping[str, object]) -> S:
    """Make a struct of the flags of one command, by name; the other fields keep their defaults.

    Errors: ConfigError naming the flag, the value and what is allowed.
    """
    values: dict[str, object] = {}
    options = options_of(struct)
    for name, value in written.items():
        option = options[name]
        try:
            values[option.field] = option.read(value)
        except ValueError:
            raise wrong_value(f"{option.flag} ", value, option) from None
    return struct(**values)


def wrong_value(place: str, value: object, option: OptionField) -> ConfigError:
    """Return the error for a value that an option does not take; `place` names where it was written."""
    shown = MASK if option.option.is_secret else show_written(value)
    return ConfigError("config.value", f"{place}{shown}: expected {option.expectation}")


def flag_name(name: str) -> str:
    """Return the flag of a setting: `num_prompts` as `--num-prompts`."""
    return f"--{name.replace('_', '-')}"


def show_written(value: object) -> str:
    """Write a value for an error message: one short line."""
    try:
        text = " ".join(str(part) for part in cast(list[object], value)) if isinstance(value, list) else str(value)
    except RecursionError:  # a.a.a.a = 1, a thousand times
        text = "..."
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = "a number of thousands of digits"
    if "://" in text:
        text = _CONFIDENTIAL.sub(MASK, text)
    return text if 0 < len(text) <= 80 and text.isprintable() else f"{text[:80]!r}"


# Readers


def read_length(value: object) -> object:
    """Read a token count such as `8k`."""
    return parse_length(value) if isinstance(value, str) else value


def read_size(value: object) -> object:
    """Read a number of bytes such as `512M`."""
    return parse_bytes(value) if isinstance(value, str) else value


def read_lower(value: object) -> object:
    """Read a word in any case."""
    return value.lower() if isinstance(value, str) else value


def read_json(value: object) -> object:
    """Read a JSON document."""
    return json.loads(value) if isinstance(value, str) else value


def read_names(value: object) -> object:
    """Read a list, a JSON list, or names between commas."""
    values = cast(list[object], value) if isinstance(value, list) else [value]
    match values:
        case [str() as text] if text.lstrip().startswith("["):
            return json.loads(text)
        case [str() as text] if not isinstance(value, list):
            return [name.strip() for name in text.split(",")]
        case _:
            return values


def _convert(value: object, kind: Any) -> object:  # Any: a type
    """Convert a value, perhaps written as text, to a type. Errors: ValueError, TypeError, OverflowError."""
    origin = get_origin(kind)
    if origin is Literal:
        return _checked(value, value in get_args(kind))
    if origin in (tuple, list):
        parts = cast(list[object], _checked(value, isinstance(value, list)))
        names = [_read_text(part) for part in parts if isinstance(part, str) and part]
        _checked(value, len(names) == len(parts))
        return tuple(names) if origin is tuple else names
    if origin is dict:
        return msgspec.convert(value, kind)
    if kind is bool:
        return _read_switch(value)
    if kind is int:
        return _read_whole(value)
    if kind is float:
        return float(cast(float, _checked(value, isinstance(value, int | float | str))))
    if kind is Path:
        return Path(_read_text(_checked(value, isinstance(value, str | Path) and bool(str(value)))))
    return _read_text(_checked(value, isinstance(value, str)))


def _read_switch(value: object) -> bool:
    word = value.strip().lower() if isinstance(value, str) else str(value).lower()
    if word not in _TRUE and word not in _FALSE:
        raise ValueError(value)
    return word in _TRUE


def _read_whole(value: object) -> int:
    if isinstance(value, float):
        return int(cast(float, _checked(value, value.is_integer())))
    if isinstance(value, str):
        value = cast(re.Match[str], _checked(found := _WHOLE.fullmatch(value.strip()), found is not None))[1]
    return int(cast(int, _checked(value, isinstance(value, int | str))))


def _read_text(value: object) -> str:
    """Return text. Errors: UnicodeEncodeError, a ValueError, if it cannot be written: no file has such a name."""
    text = str(value)
    text.encode()
    return text


def _checked(value: object, is_right: bool) -> object:
    if not is_right:
        raise ValueError(value)
    return value


def _without_none(annotation: Any) -> Any:  # Any: a type
    kind = get_args(annotation)[0]
    while hasattr(kind, "__metadata__"):
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return kind


def _default(field: msgspec.structs.FieldInfo, option: Option) -> object:
    if option.default is not _Own.DEFAULT:
        return option.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default
