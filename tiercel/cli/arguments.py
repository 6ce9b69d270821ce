"""Translation of vLLM command lines: deprecated and refused flags, flags with several values, and JSON flags."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tiercel.cli.json_flags import JsonFlags, check_harmless
from tiercel.settings.settings import SETTINGS
from tiercel.settings.vllm_flags import HARMLESS, IN_GIB, OTHER_NAMES, REFUSED, RENAMED, SHORT
from tiercel.values.errors import ConfigError

_SWITCHES = {
    f"{prefix}{option.key}": f"{option.flag}={value}"
    for option in SETTINGS.values()
    if option.is_switch
    for prefix, value in (("--", "true"), ("--no-", "false"))
}
_MANY = {option.flag for option in SETTINGS.values() if option.option.takes_many}
_SERVED_NAMES = "--served-model-name"


def translate(arguments: Sequence[str], warnings: list[str]) -> list[str]:
    """Translate a command line to the form that typer reads. Flags without effect are refused or dropped.

    Effects: adds a line to `warnings` for every flag that is accepted and has no effect.
    Errors: ConfigError naming a flag that is not supported, with the reason.
    """
    has_model = _names_model(arguments)
    translated: list[str] = []
    objects = JsonFlags()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*translated, *objects.objects(), word, *rest]
        if not word.startswith("-"):
            translated.append(word)
            continue
        flag, has_value, value = _spelled(word).partition("=")
        name = flag.removeprefix("--")
        base = name.partition(".")[0]
        if base in REFUSED:
            raise ConfigError("config.refused", f"{flag} is not supported: {REFUSED[base]}")
        if base in HARMLESS or _is_negated(base):
            _drop(flag, [value] if has_value else rest, warnings)
        elif name in RENAMED:
            warnings.append(f"{flag} is deprecated: write --{RENAMED[name]}")
            translated.append(_SWITCHES[f"--{RENAMED[name]}"])
        elif objects.takes(name):
            if not has_value and not rest:
                raise ConfigError("config.value", f"{flag}: expected a value")
            translated += objects.read(flag, value if has_value else rest.pop(0), warnings)
        elif name in IN_GIB and (has_value or rest):
            translated.append(f"--{IN_GIB[name]}={_in_gib(value if has_value else rest.pop(0))}")
        elif flag in _SWITCHES and not has_value:
            translated.append(_SWITCHES[flag])
        elif flag in _MANY and not has_value and (has_model or flag == _SERVED_NAMES):
            translated += _repeated(flag, rest, has_model=has_model)
        else:
            translated.append(f"{flag}{has_value}{value}")
            if not has_value and flag != "--help" and rest:
                translated.append(rest.pop(0))
    return [*translated, *objects.objects()]


def _names_model(arguments: Sequence[str]) -> bool:
    """Whether the model is named at the beginning, or by --model: a word behind a flag is then no model."""
    is_leading = bool(arguments) and not arguments[0].startswith("-")
    return is_leading or any(word.partition("=")[0] == "--model" for word in arguments)


def _spelled(word: str) -> str:
    """Return the full flag: vLLM accepts --max_num_seqs for --max-num-seqs, and -tp for --tensor-parallel-size."""
    flag, has_value, value = word.partition("=")
    base, has_key, key = flag.partition(".")
    if base in SHORT:
        base = f"--{SHORT[base]}"
    elif base[:2] == "-O" and base[2:].isdigit():
        base, has_value, value = f"--{SHORT['-O']}", "=", base[2:]
    else:
        base = base.replace("_", "-")
    name = base.removeprefix("--")
    base = f"--{OTHER_NAMES[name]}" if name in OTHER_NAMES else base
    return f"{base}{has_key}{key}{has_value}{value}"


def _is_negated(name: str) -> bool:
    """Whether a flag turns off a switch that has no effect."""
    harmless = HARMLESS.get(name.removeprefix("no-"))
    return name.startswith("no-") and harmless is not None and harmless.takes == "nothing"


def _drop(flag: str, rest: list[str], warnings: list[str]) -> None:
    """Drop a flag without effect, and its values. Errors: ConfigError for a value that is refused."""
    name = flag.removeprefix("--").partition(".")[0]
    harmless = HARMLESS.get(name)
    if harmless is None:
        harmless, values = HARMLESS[name.removeprefix("no-")], ["false"]
    elif harmless.takes == "nothing":
        values = ["true"]
    elif harmless.takes == "value":
        values = [rest.pop(0)] if rest else [""]
    else:
        values = list(_plain_words(rest, 1 if harmless.takes == "perhaps a value" else len(rest))) or [""]
    found = dict.fromkeys(check_harmless(flag, harmless, value) for value in values)
    warnings += [warning for warning in found if warning]


def _in_gib(value: str) -> str:
    """Append the unit GiB to a number without a unit."""
    return f"{value}GiB" if value.replace(".", "", 1).isdigit() else value


def _plain_words(rest: list[str], most: int) -> Iterator[str]:
    """Take words from the front, up to the next flag."""
    while most and rest and not rest[0].startswith("-"):
        most -= 1
        yield rest.pop(0)


def _repeated(flag: str, rest: list[str], *, has_model: bool) -> Iterator[str]:
    """Yield `--served-model-name A B` as `--served-model-name A --served-model-name B`.

    Without a model elsewhere, the last of several names is the model if it looks like one: a path that exists, or
    org/name. Keys and folders have several values only beside a model that is named elsewhere, because
    `serve --api-key KEY MODEL` would otherwise take the model for a key.
    """
    if not rest:
        yield flag
        return
    names = [rest.pop(0), *_plain_words(rest, len(rest))]
    model = names.pop() if not has_model and len(names) > 1 and _is_like_model(names[-1]) else None
    for name in names:
        yield from (flag, name)
    if model is not None:
        yield model


def _is_like_model(word: str) -> bool:
    return "/" in word or Path(word).exists()
