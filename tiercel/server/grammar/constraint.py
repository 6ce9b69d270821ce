"""Constraints: the grammars of requests, as they are built and before they are checked."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from msgspec import Struct

from tiercel.server.grammar.lark import any_of, literal
from tiercel.server.grammar.schema import SchemaNotes, prepared_schema
from tiercel.values.errors import AdmissionError

MAX_GRAMMAR_LETTERS = 64 * 1024
MAX_REGEX_LETTERS = 8 * 1024
MAX_CHOICES_LISTED = 1024
_NO_NOTES = SchemaNotes()

GrammarFormat = Literal["llguidance", "regex", "ebnf"]


class Constraint(Struct, frozen=True):
    """A grammar that an output must match from its first token to its last.

    `field` is the field of the request that errors name. `text` is an llguidance grammar, a regular expression in the
    syntax of Rust's `regex` without anchors and look-around, or a grammar in Lark's syntax or in GBNF ("ebnf").
    """

    field: str
    format: GrammarFormat
    text: str
    notes: SchemaNotes = _NO_NOTES  # what of its schemas does not act


def schema_constraint(
    field: str,
    schema: Mapping[str, object],
    *,
    is_strict: bool = True,
    whitespace: str | None = None,
    path: str | None = None,
) -> Constraint:
    """Return the constraint to JSON that is valid under a schema; see `prepared_schema`. Errors: AdmissionError."""
    prepared = prepared_schema(field, schema, is_strict=is_strict, whitespace=whitespace, path=path)
    text = json.dumps({"grammars": [{"json_schema": prepared.schema}]}, ensure_ascii=False)
    return Constraint(field, "llguidance", text, prepared.notes)


def schema_text_constraint(field: str, text: str, *, whitespace: str | None = None) -> Constraint:
    """Return the constraint to JSON that is valid under a schema, given as JSON text. Errors: AdmissionError (400)."""
    _check_length(field, text, MAX_GRAMMAR_LETTERS)
    try:
        schema: object = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise AdmissionError(400, f"{field}: the text is no JSON", param=_param(field)) from exc
    if not isinstance(schema, dict):
        raise AdmissionError(400, f"{field}: the JSON schema must be an object", param=_param(field))
    return schema_constraint(field, cast(dict[str, object], schema), whitespace=whitespace)


def object_constraint(field: str, *, whitespace: str | None = None) -> Constraint:
    """Return the constraint to any JSON object."""
    return schema_constraint(field, {"type": "object"}, whitespace=whitespace)


def regex_constraint(field: str, pattern: str) -> Constraint:
    """Return the constraint to texts that a regular expression matches as a whole. Errors: AdmissionError (400)."""
    _check_length(field, pattern, MAX_REGEX_LETTERS)
    return Constraint(field, "regex", pattern)


def choice_constraint(field: str, choices: Sequence[str]) -> Constraint:
    """Return the constraint to one of several texts. Errors: AdmissionError (400)."""
    if not choices or not all(choices):
        raise AdmissionError(400, f"{field}: one or more choices are required, none of them empty", param=_param(field))
    if len(choices) > MAX_CHOICES_LISTED:
        raise AdmissionError(400, f"{field}: at most {MAX_CHOICES_LISTED} choices", param=_param(field))
    return lark_constraint(field, any_of(map(literal, dict.fromkeys(choices))))


def grammar_constraint(field: str, text: str) -> Constraint:
    """Return the constraint to a context-free grammar, in Lark's syntax or in GBNF. Errors: AdmissionError (400)."""
    _check_length(field, text, MAX_GRAMMAR_LETTERS)
    return Constraint(field, "ebnf", text)


def lark_constraint(field: str, start: str, rules: Iterable[str] = (), notes: SchemaNotes = _NO_NOTES) -> Constraint:
    """Return the constraint to a Lark expression; see `tiercel.server.grammar.lark` for its parts.

    `rules` are further lines, each a rule or a terminal that the expression refers to. `notes` are those on its
    schemas. Errors: AdmissionError (400).
    """
    text = "\n".join(("%llguidance {}", f"start: {start}", *rules, ""))
    _check_length(field, text, MAX_GRAMMAR_LETTERS)
    return Constraint(field, "llguidance", text, notes)


def _check_length(field: str, text: str, limit: int) -> None:
    if not text.strip():
        raise AdmissionError(400, f"{field}: the text is empty", param=_param(field))
    if len(text) > limit:
        raise AdmissionError(
            400, f"{field}: at most {limit} letters are accepted, got {len(text)}", param=_param(field)
        )


def _param(field: str) -> str:
    return field.partition(".")[0]
