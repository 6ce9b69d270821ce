"""The constraint of a request, from its fields."""

from collections.abc import Callable
from typing import cast

from tiercel.server.api.schemas.structured import ResponseFormat, StructuredFields, StructuredOutputs
from tiercel.server.grammar.constraint import (
    Constraint,
    choice_constraint,
    grammar_constraint,
    object_constraint,
    regex_constraint,
    schema_constraint,
    schema_text_constraint,
)
from tiercel.values.errors import AdmissionError

_Made = Callable[[], Constraint]


def constraint_of(fields: StructuredFields) -> Constraint | None:
    """Return the constraint that the fields name, not checked yet; None if they name none.

    Errors: AdmissionError (400) for more than one constraint, or one that exceeds a limit of size.
    """
    named: dict[str, _Made] = {}
    if fields.response_format is not None:
        _add_response_format(named, fields.response_format, fields.schema_paths.response_format)
    if fields.structured_outputs is not None:
        _add_structured_outputs(named, fields.structured_outputs)
    space = fields.guided_whitespace_pattern
    for name, schema in (("guided_json", fields.guided_json), ("json_schema", fields.json_schema)):
        _add_schema(named, name, schema, space)
    _add_regex(named, "guided_regex", fields.guided_regex)
    _add_regex(named, "regex", fields.regex)
    _add_choice(named, "guided_choice", fields.guided_choice)
    _add_grammar(named, "guided_grammar", fields.guided_grammar)
    _add_grammar(named, "ebnf", fields.ebnf)
    if len(named) > 1:
        raise AdmissionError(
            400,
            "You can only use one kind of structured outputs constraint but multiple are specified:"
            f" {', '.join(named)}",
            param=next(iter(named)).partition(".")[0],
        )
    for make in named.values():
        return make()
    return None


def check_ends(constraint: Constraint, *, ignore_eos: bool) -> None:
    """Refuse what contradicts a constraint. Errors: AdmissionError (400)."""
    if ignore_eos:
        raise AdmissionError(
            400,
            f"ignore_eos cannot be combined with {constraint.field}: an output that matches its grammar has to end",
            param="ignore_eos",
        )


def _add_response_format(named: dict[str, _Made], form: ResponseFormat, path: str) -> None:
    field = "response_format"
    if form.type == "json_object":
        named[field] = lambda: object_constraint(field)
    elif form.type == "json_schema":
        if form.json_schema is None:
            raise AdmissionError(
                400,
                "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                param=field,
            )
        schema, is_strict = form.json_schema.schema_, bool(form.json_schema.strict)
        if schema is None:
            raise AdmissionError(400, "response_format.json_schema.schema is missing", param=field)
        named[field] = lambda: schema_constraint(field, schema, is_strict=is_strict, path=path)


def _add_structured_outputs(named: dict[str, _Made], outputs: StructuredOutputs) -> None:
    field = "structured_outputs"
    before = len(named)
    space = "" if outputs.disable_any_whitespace else outputs.whitespace_pattern
    _add_schema(named, f"{field}.json", outputs.json_, space)
    if outputs.json_object:
        named[f"{field}.json_object"] = lambda: object_constraint(field, whitespace=space)
    _add_regex(named, f"{field}.regex", outputs.regex)
    _add_choice(named, f"{field}.choice", outputs.choice)
    _add_grammar(named, f"{field}.grammar", outputs.grammar)
    if len(named) == before:
        raise AdmissionError(400, f"{field} must have one of json, json_object, regex, choice and grammar", param=field)


def _add_schema(named: dict[str, _Made], field: str, schema: object, whitespace: str | None) -> None:
    if schema is None:
        return
    if isinstance(schema, str):
        named[field] = lambda: schema_text_constraint(field, schema, whitespace=whitespace)
    elif isinstance(schema, dict):
        named[field] = lambda: schema_constraint(field, cast(dict[str, object], schema), whitespace=whitespace)
    else:
        raise AdmissionError(400, f"{field}: expected a string or an object", param=field.partition(".")[0])


def _add_regex(named: dict[str, _Made], field: str, pattern: str | None) -> None:
    if pattern is not None:
        named[field] = lambda: regex_constraint(field, pattern)


def _add_choice(named: dict[str, _Made], field: str, choices: object) -> None:
    if choices is None:
        return
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in cast(list[object], choices)):
        raise AdmissionError(400, f"{field}: expected a list of strings", param=field.partition(".")[0])
    named[field] = lambda: choice_constraint(field, cast(list[str], choices))


def _add_grammar(named: dict[str, _Made], field: str, text: str | None) -> None:
    if text is not None:
        named[field] = lambda: grammar_constraint(field, text)
