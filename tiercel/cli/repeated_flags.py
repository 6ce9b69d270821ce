"""Flags of one value that are given twice: the parser would keep the last value in silence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import typer

Report = Callable[[str], None]


def refuse(line: str) -> None:
    """Refuse a repeated flag. Errors: typer.BadParameter."""
    raise typer.BadParameter(line)


def watch_repeats(command: Any, report: Report) -> None:  # Any: typer exports no types of its parser
    """Report flags of a command, or of the verbs of a group, that are given twice with different values."""
    for verb in getattr(command, "commands", {}).values():
        watch_repeats(verb, report)
    command.make_parser = partial(_make_parser, command.make_parser, report)


def _make_parser(make: Callable[[Any], Any], report: Report, context: Any) -> Any:
    parser = make(context)
    for option in {id(each): each for each in (*parser._long_opt.values(), *parser._short_opt.values())}.values():
        if option.action in ("store", "store_const"):
            option.process = partial(_process, option.process, option, report)
    return parser


def _process(process: Callable[[Any, Any], None], option: Any, report: Report, value: Any, state: Any) -> None:
    before = state.opts.get(option.dest)
    is_repeated = option.dest in state.opts
    process(value, state)
    after = state.opts[option.dest]
    if is_repeated and before != after:
        flag = (option._long_opts or option._short_opts)[0]
        report(f"{flag} is given twice, as {_shown(before)} and {_shown(after)}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
