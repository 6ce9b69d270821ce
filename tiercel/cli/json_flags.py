"""vLLM's flags that hold a JSON object, whole or by dotted keys: `--structured-outputs-config.backend guidance`."""

import json
from collections.abc import Iterator, Mapping
from typing import cast

from tiercel.settings.settings import SETTINGS
from tiercel.settings.vllm_flags import CONFIGS, Harmless, Renamed
from tiercel.values.errors import ConfigError

_OBJECTS = {option.key for option in SETTINGS.values() if option.takes_object}


class JsonFlags:
    """Decides the keys of JSON flags, and collects the dotted keys of settings that hold an object."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, object]] = {}

    def takes(self, name: str) -> bool:
        """Return whether a flag, without its dashes, is translated here."""
        base, has_key, _ = name.partition(".")
        return base in CONFIGS or (base in _OBJECTS and bool(has_key))

    def read(self, flag: str, text: str, warnings: list[str]) -> Iterator[str]:
        """Yield the flags that act for one flag and its value. Errors: ConfigError naming the flag and the key."""
        name, has_key, key = flag.removeprefix("--").partition(".")
        if name in _OBJECTS:
            _set(self._objects.setdefault(name, {}), flag, key.split("."), _value(text))
            return
        for dotted, value in _leaves(key, _value(text)) if has_key else _leaves("", _read_object(flag, text)):
            yield from _decide(name, dotted, value, warnings)

    def objects(self) -> Iterator[str]:
        """Yield the flags of the objects whose dotted keys were given."""
        for name, found in self._objects.items():
            yield f"--{name}={json.dumps(found)}"


def _decide(name: str, key: str, value: object, warnings: list[str]) -> Iterator[str]:
    keys, flag = CONFIGS[name], f"--{name}.{key}"
    part = keys.get(key.replace("_", "-"))
    word = json.dumps(value) if isinstance(value, bool | list) else f"{value}"
    match part:
        case None:
            known = ", ".join(known.replace("-", "_") for known in keys)
            raise ConfigError("config.refused", f"{flag} is not supported: known keys are {known}")
        case Harmless():
            if warning := check_harmless(flag, part, word):
                warnings.append(warning)
        case Renamed():
            if part.words and word.lower() not in part.words:
                raise ConfigError("config.refused", f"{flag} {word} is not supported: {part.otherwise}")
            yield f"--{part.flag}={word.lower() if part.words else word}"


def check_harmless(flag: str, harmless: Harmless, value: str) -> str:
    """Return the warning for the value of a flag without effect; empty if there is none.

    Errors: ConfigError if the value asks for something that the server does not do.
    """
    if value in harmless.same:
        return ""
    if harmless.otherwise:
        shown = "" if harmless.takes == "nothing" or not value else f" {value}"
        raise ConfigError("config.refused", f"{flag}{shown} is not supported: {harmless.otherwise}")
    return f"{flag}: {harmless.note}" if harmless.note else ""


def _value(text: str) -> object:
    """Return the JSON value that is written, else the text itself, as vLLM reads dotted keys."""
    try:
        return cast(object, json.loads(text))
    except (ValueError, RecursionError):
        return text


def _read_object(flag: str, text: str) -> dict[str, object]:
    found = _value(text)
    if not isinstance(found, dict):
        raise ConfigError("config.value", f"{flag} {text[:80]!r}: expected a JSON object, or keys such as {flag}.KEY")
    return cast(dict[str, object], found)


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values; null is left out, because it stands for the default."""
    if isinstance(value, dict):
        for name, part in cast(Mapping[str, object], value).items():
            yield from _leaves(f"{key}.{name}" if key else name, part)
    elif value is not None:
        yield key, value


def _set(found: dict[str, object], flag: str, keys: list[str], value: object) -> None:
    for name in keys[:-1]:
        inner = found.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError("config.value", f"{flag}: {name} has a value already")
        found = cast(dict[str, object], inner)
    found[keys[-1]] = value
