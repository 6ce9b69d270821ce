"""The flags of `tiercel serve` and `tiercel check`, made from the one table in `tiercel.options`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from tiercel.errors import ConfigError
from tiercel.options import Options, Panel, choices_of, flag_name, flag_of

COMMON = "common"
_GROUPS = (COMMON, "all", *(panel.lower() for panel in get_args(Panel)))
_PLAIN = inspect.Parameter.KEYWORD_ONLY


def with_flags(
    run: Callable[[dict[str, object]], int],
    shown: str,
    own: Mapping[str, Any] | None = None,  # Any: annotations
) -> Callable[..., int]:
    """A typer command that takes every flag and calls `run` with those that were given.

    `shown` is what --help lists: `common`, `all`, or one panel. `own` are switches of the command itself, by name.
    """

    def command(**given: object) -> int:
        flags = {name: value for name, value in given.items() if value is not None}
        model = flags.pop("positional_model", None)
        if model is not None and flags.setdefault("model", model) != model:
            raise ConfigError("config.model", f"two models: {model} and --model {flags['model']}")
        return run(flags)

    parameters = [_parameter(name, field, shown) for name, field in Options.model_fields.items()]
    parameters += [
        inspect.Parameter(name, _PLAIN, default=False, annotation=kind) for name, kind in (own or {}).items()
    ]
    command.__signature__ = inspect.Signature([_model_argument(), *parameters])  # type: ignore[attr-defined]
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    return command


def shown_by(arguments: Sequence[str]) -> tuple[list[str], str]:
    """vLLM's `--help=all` and `--help=cache`: the arguments with a plain --help, and what it shall list."""
    shown = COMMON
    plain: list[str] = []
    for word in arguments:
        if word.startswith("--help="):
            shown = word.removeprefix("--help=").lower()
            if shown not in _GROUPS:
                raise ConfigError("config.help", f"{word}: expected one of {', '.join(_GROUPS)}")
            word = "--help"
        plain.append(word)
    return plain, shown


def _model_argument() -> inspect.Parameter:
    words = flag_of(Options.model_fields["model"])
    argument = typer.Argument(metavar="MODEL", help=words.help)
    return inspect.Parameter("positional_model", _PLAIN, default=None, annotation=Annotated[str | None, argument])


def _parameter(name: str, field: FieldInfo, shown: str) -> inspect.Parameter:
    words = flag_of(field)
    is_switch = field.annotation is bool
    option = typer.Option(
        flag_name(name),
        help=f"{escape(words.help)}{_default_text(field)}",
        metavar="SWITCH" if is_switch else words.metavar or "|".join(choices_of(field)) or name.rsplit("_")[-1].upper(),
        rich_help_panel=None if shown == COMMON else words.panel,
        show_default=False,
        hidden=name == "model" or not _is_shown(words.panel, words.is_rare, shown),
    )
    kind: Any = list[str] if "tuple" in str(field.annotation) else str  # `tiercel.config` reads the text
    return inspect.Parameter(name, _PLAIN, default=None, annotation=Annotated[kind | None, option])


def _is_shown(panel: str, is_rare: bool, shown: str) -> bool:
    return {COMMON: not is_rare, "all": True}.get(shown, shown == panel.lower())


def _default_text(field: FieldInfo) -> str:
    """The default, small, at the end of the help; nothing where it is none."""
    value = field.get_default(call_default_factory=True, validated_data={})
    match value:
        case None | () | {} | "":
            return ""
        case bool():
            text = "on" if value else "off"
        case float():
            text = f"{value:g}"
        case tuple():
            text = " ".join(value)
        case _:
            text = f"{value}"
    return f" [dim]\\[{text}][/dim]"
