"""Typer flags of every verb, made from declared options (`tiercel.settings.option`)."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from tiercel.settings.groups import GROUPS
from tiercel.settings.option import OptionField
from tiercel.settings.settings import SETTINGS
from tiercel.values.errors import ConfigError

COMMON = "common"
ALL = "all"
_LISTINGS = (COMMON, ALL, *(group.name.lower() for group in GROUPS))
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

Run = Callable[[dict[str, Any]], int]  # Any: text, lists of text, or True for a switch


def make_command(run: Run, parameters: Iterable[inspect.Parameter]) -> Callable[..., int]:
    """Return a typer command that calls `run` with the flags that were given, by name, as text."""

    def command(**given: object) -> int:
        return run({name: value for name, value in given.items() if value is not None and value is not False})

    command.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    return command


def with_settings(
    run: Run,
    listing: str,
    options: Iterable[OptionField] = SETTINGS.values(),
    own: Sequence[inspect.Parameter] = (),
) -> Callable[..., int]:
    """Return a typer command that takes settings of the daemon, and the model as an argument.

    `listing` is the part of the flags that --help lists: `common`, `all`, or the name of a group. `own` are further
    flags of the command.
    """

    def run_with_model(given: dict[str, Any]) -> int:
        model = given.pop("positional_model", None)
        if model is not None and given.setdefault("model", model) != model:
            raise ConfigError("config.model", f"two models: {model} and --model {given['model']}")
        return run(given)

    run_with_model.__name__ = run.__name__
    run_with_model.__doc__ = run.__doc__
    flags = (_setting_flag(option, listing) for option in options)
    return make_command(run_with_model, [_model_argument(), *own, *flags])


def flags_of(options: Iterable[OptionField], *, has_headings: bool = True) -> list[inspect.Parameter]:
    """Return the flags of options, with the headings of their groups; a switch takes no value."""
    return [_flag(option, panel=option.option.group.name if has_headings else None) for option in options]


def help_listing(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Replace vLLM's `--help=all` or `--help=cache` by --help; return the arguments and the part of the flags to list.

    Errors: ConfigError for a group that does not exist.
    """
    listing = COMMON
    plain: list[str] = []
    for word in arguments:
        if word.startswith("--help="):
            listing = word.removeprefix("--help=").lower()
            if listing not in _LISTINGS:
                raise ConfigError("config.help", f"{word}: expected one of {', '.join(_LISTINGS)}")
            word = "--help"
        plain.append(word)
    return plain, listing


def _model_argument() -> inspect.Parameter:
    argument = typer.Argument(metavar="MODEL", help=SETTINGS["model"].option.help)
    return inspect.Parameter("positional_model", _KEYWORD, default=None, annotation=Annotated[str | None, argument])


def _setting_flag(option: OptionField, listing: str) -> inspect.Parameter:
    group = option.option.group.name
    is_listed = {COMMON: not option.option.is_rare, ALL: True}.get(listing, listing == group.lower())
    return _flag(
        option,
        panel=None if listing == COMMON else group,
        is_hidden=option.name == "model" or not is_listed,
        takes_switch_value=True,  # `cli.arguments` turns --enable-x into --enable-x=true
    )


def _flag(
    option: OptionField, *, panel: str | None, is_hidden: bool = False, takes_switch_value: bool = False
) -> inspect.Parameter:
    is_plain_switch = option.is_switch and not takes_switch_value
    metavar = "SWITCH" if option.is_switch else option.option.metavar or "|".join(option.choices)
    text = escape(option.option.help)
    if option.shown_default and not is_plain_switch:
        text += f" [dim]\\[{escape(option.shown_default)}][/dim]"
    typer_option = typer.Option(
        option.flag,
        help=text,
        metavar=None if is_plain_switch else metavar or option.name.rsplit("_")[-1].upper(),
        rich_help_panel=panel,
        show_default=False,
        hidden=is_hidden,
    )
    kind: Any = bool if is_plain_switch else list[str] if option.is_list else str  # the option reads the text
    default = False if is_plain_switch else None
    return inspect.Parameter(option.name, _KEYWORD, default=default, annotation=Annotated[kind | None, typer_option])
