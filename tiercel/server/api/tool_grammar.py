"""Grammars of answers that must call functions, or whose calls must have valid arguments."""

from collections.abc import Mapping

from tiercel.server.api.schemas.tools import MAX_CALLS, FunctionFields
from tiercel.server.api.tool_choice import ToolChoice
from tiercel.server.grammar.constraint import Constraint, lark_constraint
from tiercel.server.grammar.lark import Tag, any_of, literal, repeated, schema_part, tagged
from tiercel.server.grammar.schema import SchemaNotes
from tiercel.server.text.answer.formats import CallFormat
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.server.text.answer.thoughts import END_THINK, THINK
from tiercel.values.errors import AdmissionError

FIELD = "tools"

_NO_PATHS: Mapping[str, str] = {}

_ANY_TEXT = r"ANY_TEXT: /(.|\n)*/"
_LINE_ENDS = r"LINE_ENDS: /\n{1,2}/"


def tool_constraint(
    form: CallFormat,
    choice: ToolChoice,
    reader: AnswerReader,
    ids: Mapping[str, int],
    paths: Mapping[str, str] = _NO_PATHS,
) -> Constraint | None:
    """Return the constraint of an answer; None if its calls are free.

    Required calls are the whole answer, after the thoughts. If a function is strict, an answer is free text, until it
    contains the beginning of a call. `ids` are the special tokens by their texts, `paths` the places of the
    functions' schemas in the body by their names. Errors: AdmissionError (400).
    """
    if not choice.needs_grammar:
        return None
    spell, arguments = _Speller(ids), _Arguments(paths)
    if choice.mode == "required":
        start, rules = _required(form, choice, spell, arguments), list[str]()
    else:
        start, rules = _free(form, choice, spell, arguments)
    if reader.may_think:
        start = f"{_thoughts(spell, is_thinking=reader.is_thinking)} {start}"
        rules += [f"thoughts{spell.lazy(END_THINK)}: ANY_TEXT {spell(END_THINK)}", _ANY_TEXT, _LINE_ENDS]
    return lark_constraint(FIELD, start, rules, SchemaNotes.joined(arguments.notes))


class _Arguments:
    """Makes the expressions of arguments, and collects what of their schemas does not act."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self.notes: list[SchemaNotes] = []

    def __call__(self, function: FunctionFields, *, is_strict: bool) -> str:
        given = {name: value for name, value in (function.parameters or {}).items() if value is not None}
        schema: dict[str, object] = {"type": "object", **given}
        if schema["type"] != "object":
            raise AdmissionError(
                400, f"tools: the parameters of {function.name} must be a schema with the type object", param=FIELD
            )
        part = schema_part(FIELD, schema, is_strict=is_strict, path=self._paths.get(function.name))
        self.notes.append(part.notes)
        return part.text


class _Speller:
    """Spells a text in which some parts may be special tokens, as a Lark expression."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def is_special(self, mark: str) -> bool:
        return mark in self._ids

    def lazy(self, mark: str) -> str:
        """Return the attribute of a rule that ends with a mark at its first occurrence."""
        return "" if self.is_special(mark) else "[lazy]"

    def __call__(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if self.is_special(mark) else literal(mark)


def _thoughts(spell: _Speller, *, is_thinking: bool) -> str:
    return "thoughts LINE_ENDS?" if is_thinking else f"({spell(THINK)} thoughts LINE_ENDS?)?"


def _required(form: CallFormat, choice: ToolChoice, spell: _Speller, arguments: _Arguments) -> str:
    most = MAX_CALLS if choice.max_calls is None else choice.max_calls
    call = any_of(_call(form, one, arguments) for one in choice.functions)
    if form.closing:
        line_end = literal("\n")
        call = f"{spell(form.opening)} {line_end} {call} {line_end} {spell(form.closing)}"
    between = ", " if form.has_lists else f"{form.separator} " if form.separator else "\n"
    others = f" {repeated(f'{literal(between)} {call}', 0, most - 1)}" if most > 1 else ""
    if not form.has_lists:
        return call + others
    opening = f"{spell(form.opening)} " if form.opening else ""
    return f'{opening}"[" {call}{others} "]"'


def _call(form: CallFormat, function: FunctionFields, arguments: _Arguments) -> str:
    """Return the expression of the JSON object of a call."""
    return f"{literal(_before(form, function))} {arguments(function, is_strict=bool(function.strict))} {literal('}')}"


def _before(form: CallFormat, function: FunctionFields) -> str:
    return f'{{"name": "{function.name}", "{form.arguments_key}": '


def _free(form: CallFormat, choice: ToolChoice, spell: _Speller, arguments: _Arguments) -> tuple[str, list[str]]:
    """Return free text with calls in it. Arguments of functions that are not strict are any JSON object."""
    tags: list[Tag] = []
    for function in choice.functions:
        before = _before(form, function)
        part = arguments(function, is_strict=True) if function.strict else '%json {"type": "object"}'
        if form.opening and (form.closing or spell.is_special(form.opening)):
            tags.append(_marked(form, before, part, spell))
        if not form.closing:
            tags.append(Tag(before, before, part, "}"))
    start, rules = tagged(tags, most=choice.max_calls)
    return start, list(rules)


def _marked(form: CallFormat, before: str, part: str, spell: _Speller) -> Tag:
    """Return the tag of a call behind its opening mark."""
    is_special = spell.is_special(form.opening)
    trigger = spell(form.opening) if is_special else form.opening
    if form.closing:
        return Tag(trigger, f"{trigger}\n{before}", part, "}\n", is_special)
    return Tag(trigger, f"{trigger}{' [' if form.has_lists else ''}{before}", part, "}", is_special)
