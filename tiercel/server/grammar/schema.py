"""JSON schemas of requests: their limits, their proof, and the options with which they are compiled."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from msgspec import Struct

from tiercel.server.grammar.keywords import (
    ACTING,
    ANNOTATIONS,
    FORMATS,
    IGNORED_ASSERTIONS,
    PARTLY_ACTING,
    Place,
    copied_schema,
)
from tiercel.server.grammar.pointer import shown
from tiercel.server.grammar.schema_graph import SchemaFaultError, SchemaGraph
from tiercel.values.errors import AdmissionError

MAX_SCHEMA_LETTERS = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_ENUM_ENTRIES = 1024
MAX_PROPERTIES = 512
MAX_WHITESPACE_LETTERS = 256
MAX_NOTED = 16  # keywords of a request that do not act; a header names them

WHITESPACE = r"(?: |\r?\n[ \t]{0,32})?"
"""The white space that JSON outputs may have between two tokens of JSON, as a regular expression: one space, or a line
end and an indentation, which is what writers of JSON use. A model could fill its answer with unlimited white space."""

_NO_HEADER = re.compile(r"[^A-Za-z0-9_.$:/-]")
_EXCLUDING = IGNORED_ASSERTIONS.keys() | {"format"}
_OPTIONS = "x-guidance"  # llguidance reads the options of a schema there, at the top level only
_OBJECT, _ARRAY = 2, 2  # letters of the brackets


class SchemaNotes(Struct, frozen=True):
    """The keywords of schemas that an output is not held to, each with its place, as `tools.0.function.parameters.not`.

    `ignored` have no effect. `partly` are those of `PARTLY_ACTING`: the check of the grammar tells which do not act.
    Each has at most `MAX_NOTED` entries; `more` is the number of those beyond.
    """

    ignored: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    more: int = 0

    def names(self, approximated: Sequence[str]) -> tuple[str, ...]:
        """Return the places of what does not act. `approximated`: the keywords of `PARTLY_ACTING` that do not."""
        found = (*self.ignored, *self.places_of(approximated))
        beyond = self.more + max(len(found) - MAX_NOTED, 0)
        return (*found[:MAX_NOTED], *((f"{beyond} more",) if beyond else ()))

    def places_of(self, keywords: Sequence[str]) -> tuple[str, ...]:
        """Return the places that have one of these keywords of `PARTLY_ACTING`."""
        return tuple(place for place in self.partly if place.rpartition(".")[2] in keywords)

    @staticmethod
    def joined(notes: Iterable["SchemaNotes"]) -> "SchemaNotes":
        """Return the notes on several schemas."""
        every = tuple(notes)
        ignored = [name for one in every for name in one.ignored]
        partly = [name for one in every for name in one.partly]
        beyond = max(len(ignored) - MAX_NOTED, 0)
        return SchemaNotes(
            tuple(ignored[:MAX_NOTED]), tuple(partly[:MAX_NOTED]), sum(one.more for one in every) + beyond
        )


class PreparedSchema(Struct, frozen=True):
    """A schema that has been proved, with the options for its compiler, and what of it does not act."""

    schema: dict[str, object]
    notes: SchemaNotes


def prepared_schema(
    field: str, schema: Mapping[str, object], *, is_strict: bool, whitespace: str | None = None, path: str | None = None
) -> PreparedSchema:
    """Check a schema against the limits of size, prove that values of it have an end, and add the compiler's options.

    Null is as absent, wherever a keyword has it. With `is_strict`, an assertion that cannot be enforced is refused;
    otherwise it is noted, and `oneOf` is read as `anyOf`. `whitespace` replaces `WHITESPACE`; "" allows none. `path` is
    the place of the schema in the body, for errors and notes; by default the field itself.
    Errors: AdmissionError (400) naming the place and the reason.
    """
    path = field if path is None else path
    _check_size(field, schema)
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE}
    if whitespace == "":
        options = {"whitespace_flexible": False}
    elif whitespace is not None:
        if len(whitespace) > MAX_WHITESPACE_LETTERS:
            raise _refusal(field, f"a whitespace pattern has at most {MAX_WHITESPACE_LETTERS} letters")
        options = {"whitespace_pattern": whitespace}
    if not is_strict:
        options |= {"lenient": True, "coerce_one_of": True}
    copy = copied_schema(schema)
    graph = SchemaGraph(copy)
    try:
        graph.resolve()
        notes = _notes(graph, path, is_strict=is_strict)
        graph.prove()
    except SchemaFaultError as exc:
        raise AdmissionError(400, f"{shown(path, exc.place)}: {exc.message}", param=field.partition(".")[0]) from exc
    return PreparedSchema({**copy, _OPTIONS: options}, notes)


def _notes(graph: SchemaGraph, path: str, *, is_strict: bool) -> SchemaNotes:
    """Return the keywords that do not act. Errors: SchemaFaultError for an assertion among them, with `is_strict`."""
    ignored: list[Place] = []
    partly: list[Place] = []
    for place, schema in graph.places:
        for keyword, value in schema.items():
            where = (*place, keyword)
            if keyword in PARTLY_ACTING:
                partly.append(where)
            elif keyword == "format" and value not in FORMATS:
                if is_strict:
                    raise SchemaFaultError(where, f"the format is not enforced; known are {', '.join(sorted(FORMATS))}")
                ignored.append(where)
            elif keyword in IGNORED_ASSERTIONS and is_strict:
                raise SchemaFaultError(where, "the keyword is not enforced, and the schema is strict")
            elif keyword not in ACTING and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                ignored.append(where)
    ignored.sort(key=lambda where: where[-1] not in _EXCLUDING)  # names that nobody knows displace none of these
    return SchemaNotes(
        tuple(_for_header(shown(path, where)) for where in ignored[:MAX_NOTED]),
        tuple(_for_header(shown(path, where)) for where in partly[:MAX_NOTED]),
        max(len(ignored) - MAX_NOTED, 0),
    )


def _for_header(place: str) -> str:
    return _NO_HEADER.sub("?", place)


def _check_size(field: str, schema: Mapping[str, object]) -> None:
    """Check the letters, depth, enums and properties of a schema. Cost: proportional to `MAX_SCHEMA_LETTERS` at most.

    Everything below the schema counts, whatever it means: a schema may refer to any part of itself.
    """
    letters = 0
    rest: list[tuple[object, int]] = [(schema, 1)]
    while rest:
        value, depth = rest.pop()
        if isinstance(value, dict):
            entries = cast(dict[str, object], value)
            letters += _OBJECT + sum(len(name) + 4 for name in entries)
            _check_counts(field, entries)
            rest += ((one, depth + 1) for one in entries.values())
        elif isinstance(value, list):
            items = cast(list[object], value)
            letters += _ARRAY + len(items)
            rest += ((one, depth + 1) for one in items)
        else:
            letters += _scalar_letters(field, value)
            depth -= 1  # a value that contains nothing adds no level
        if letters > MAX_SCHEMA_LETTERS:
            raise _refusal(field, f"a JSON schema has at most {MAX_SCHEMA_LETTERS} letters")
        if depth > MAX_SCHEMA_DEPTH:
            raise _refusal(field, f"a JSON schema has at most {MAX_SCHEMA_DEPTH} levels")


def _check_counts(field: str, entries: Mapping[str, object]) -> None:
    enum = entries.get("enum")
    if isinstance(enum, list) and len(cast(list[object], enum)) > MAX_ENUM_ENTRIES:
        raise _refusal(field, f"an enum has at most {MAX_ENUM_ENTRIES} entries")
    for keyword in ("properties", "patternProperties"):
        properties = entries.get(keyword)
        if isinstance(properties, dict) and len(cast(dict[str, object], properties)) > MAX_PROPERTIES:
            raise _refusal(field, f"an object has at most {MAX_PROPERTIES} {keyword}")


def _scalar_letters(field: str, value: object) -> int:
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _refusal(field, "integers of a JSON schema have 64 bits")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise _refusal(field, "numbers of a JSON schema are finite")
    return 8


def _refusal(field: str, message: str) -> AdmissionError:
    return AdmissionError(400, f"{field}: {message}", param=field.partition(".")[0])
