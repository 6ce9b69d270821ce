"""Parts of grammars, as expressions in Lark's syntax: a space between two of them puts one after the other.

`lark_constraint` makes a grammar of an expression. An example, a call of one of two tools:

    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    call = schema_part("tools", schema, is_strict=True).text
    start = any_of([
        " ".join((literal('{"name": "weather", "arguments": '), call, literal("}"))),
        " ".join((literal('{"name": "time", "arguments": '), call, literal("}"))),
    ])
    lark_constraint("tools", start)
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from tiercel.server.grammar.schema import SchemaNotes, prepared_schema

_TERMINAL = re.compile(r"^[ \t]*([A-Z_][A-Z0-9_]*)[^:\n]*:", re.MULTILINE)
_WORD_START = re.compile(r"""("(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)|\bstart\b""")
_SPECIAL = re.compile(r"<[^<>\s\[\]]+>|<\[\d+\]>")


def literal(text: str) -> str:
    """Return the part for exactly this text. Special tokens in it are spelled as ordinary text."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def special(token: str) -> str:
    """Return the part for one special token, such as `<tool_call>`, or `<[5]>` for the one with this id.

    Errors: ValueError if llguidance has no spelling for the token: it must look like `<name>`, or be given by its id.
    """
    if not _SPECIAL.fullmatch(token):
        raise ValueError(token)
    return token


def any_of(parts: Iterable[str]) -> str:
    """Return the part for one of several parts."""
    return f"({' | '.join(parts)})"


def repeated(part: str, least: int, most: int | None) -> str:
    """Return the part that repeats another one; `most` = None: without limit."""
    return f"({part}){{{least},{'' if most is None else most}}}"


class SchemaPart(Struct, frozen=True):
    """A part for JSON that is valid under a schema, and what of the schema does not act."""

    text: str
    notes: SchemaNotes


def schema_part(
    field: str, schema: Mapping[str, object], *, is_strict: bool, whitespace: str | None = None, path: str | None = None
) -> SchemaPart:
    """Return the part for JSON that is valid under a schema; see `prepared_schema`. Errors: AdmissionError (400)."""
    prepared = prepared_schema(field, schema, is_strict=is_strict, whitespace=whitespace, path=path)
    return SchemaPart(f"%json {json.dumps(prepared.schema, ensure_ascii=False)}", prepared.notes)


def composed_terminals(grammar: str) -> tuple[list[str], str]:
    """Return the terminals of a grammar that are made with & or ~, and the grammar with another name for `start`."""
    found = list(_TERMINAL.finditer(grammar))
    ends = [*(one.start() for one in found), len(grammar)][1:]
    names = [
        one[1] for one, end in zip(found, ends, strict=True) if re.search("[&~]", grammar[one.end() : end]) is not None
    ]
    return names, _WORD_START.sub(lambda one: one[1] or "start_before", grammar)


class Tag(Struct, frozen=True):
    """A part that may occur anywhere in free text, with the texts around it.

    As soon as the output contains `trigger`, it must go on with the rest of `begin`, then match `part` (an expression),
    then `end`. `begin` starts with `trigger`. If `is_special`, the trigger is a special token.
    """

    trigger: str
    begin: str
    part: str
    end: str = ""
    is_special: bool = False


def tagged(tags: Sequence[Tag], *, least: int = 0, most: int | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the expression and the rules for free text with tags in it, for `lark_constraint`.

    The triggers of two tags are equal, or neither is a part of the other. `least` and `most` limit the number of tags;
    behind the last tag that is allowed there is no text.
    Errors: ValueError if a tag does not begin with its trigger, or a special trigger has no spelling.
    """
    rules = [r"TAG_TEXT: /(.|\n)*/"]
    by_trigger: dict[tuple[str, bool], list[str]] = {}
    for tag in tags:
        if not tag.trigger or not tag.begin.startswith(tag.trigger):
            raise ValueError(tag.begin)
        rest = tag.begin.removeprefix(tag.trigger)
        body = " ".join(
            one for one in (literal(rest) if rest else "", tag.part, literal(tag.end) if tag.end else "") if one
        )
        by_trigger.setdefault((tag.trigger, tag.is_special), []).append(body)
    heads: list[str] = []
    for number, ((trigger, is_special), bodies) in enumerate(by_trigger.items()):
        if is_special:
            heads.append(f"TAG_TEXT {special(trigger)} {any_of(bodies)}")
        else:
            rules.append(f"tag_{number}[lazy]: TAG_TEXT {literal(trigger)}")
            heads.append(f"tag_{number} {any_of(bodies)}")
    repeats = repeated(any_of(heads), least, most)
    return (repeats if most is not None else f"{repeats} tag_end"), (*rules, "tag_end: TAG_TEXT")
