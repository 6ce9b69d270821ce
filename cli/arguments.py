"""Translation of vLLM command lines: deprecated and refused flags, and flags with several values."""

from collections.abc import Iterator, Sequence

from tiercel.errors import ConfigError
from tiercel.settings import SETTINGS
from tiercel.vllm_flags import HARMLESS, IN_GIB, REFUSED, RENAMED, SHORT

_SWITCHES = {
    f"{prefix}{option.key}": f"{option.flag}={value}"
    for option in SETTINGS.values()
    if option.is_switch
    for prefix, value in (("--", "true"), ("--no-", "false"))
}
_MANY = {option.flag for option in SETTINGS.values() if option.option.takes_many}


def translate(arguments: Sequence[str], warnings: list[str]) -> list[str]:
    """Translate a command line to the form that typer reads. Flags without effect are refused or dropped.

    Effects: adds a line to `warnings` for every flag that is accepted and has no effect.
    Errors: ConfigError naming a flag that is not supported, with the reason.
    """
    has_leading_model = bool(arguments) and not arguments[0].startswith("-")
    translated: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*translated, word, *rest]
        if not word.startswith("-"):
            translated.append(word)
            continue
        flag, has_value, value = _spelled(word).partition("=")
        name = flag.removeprefix("--")
        if name in REFUSED:
            raise ConfigError("config.refused", f"{flag} is not supported: {REFUSED[name]}")
        if name in HARMLESS:
            _drop(flag, [value] if has_value else rest, warnings)
        elif name in RENAMED:
            warnings.append(f"{flag} is deprecated: write --{RENAMED[name]}")
            translated.append(_SWITCHES[f"--{RENAMED[name]}"])
        elif name in IN_GIB and (has_value or rest):
            translated.append(f"--{IN_GIB[name]}={_in_gib(value if has_value else rest.pop(0))}")
        elif flag in _SWITCHES and not has_value:
            translated.append(_SWITCHES[flag])
        elif flag in _MANY and not has_value and has_leading_model:
            translated += _repeated(flag, rest)
        else:
            translated.append(f"{flag}{has_value}{value}")
            if not has_value and flag != "--help" and rest:
                translated.append(rest.pop(0))
    return translated


def _spelled(word: str) -> str:
    """Return the full flag: vLLM accepts --max_num_seqs for --max-num-seqs, and -tp for --tensor-parallel-size."""
    flag, has_value, value = word.partition("=")
    flag = f"--{SHORT[flag]}" if flag in SHORT else flag.replace("_", "-")
    return f"{flag}{has_value}{value}"


def _drop(flag: str, rest: list[str], warnings: list[str]) -> None:
    """Drop a flag without effect, and its value. Errors: ConfigError for a value that is refused."""
    harmless = HARMLESS[flag.removeprefix("--")]
    value = rest.pop(0) if harmless.takes_value and rest else ""
    if harmless.values and value not in harmless.values:
        raise ConfigError("config.refused", f"{flag} {value} is not supported: {harmless.otherwise}".replace("  ", " "))
    if harmless.note:
        warnings.append(f"{flag}: {harmless.note}")


def _in_gib(value: str) -> str:
    """Append the unit GiB to a number without a unit."""
    return f"{value}GiB" if value.replace(".", "", 1).isdigit() else value


def _repeated(flag: str, rest: list[str]) -> Iterator[str]:
    """Yield `--api-key A B` as `--api-key A --api-key B`.

    Called only if the model comes first; otherwise `serve --api-key KEY MODEL` would treat the model as a key.
    """
    yield flag
    if rest:
        yield rest.pop(0)
    while rest and not rest[0].startswith("-"):
        yield from (flag, rest.pop(0))
