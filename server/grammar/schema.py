"""JSON schemas of requests: their limits, and the options with which they are compiled."""

from collections.abc import Mapping
from typing import cast

from tiercel.errors import AdmissionError

MAX_SCHEMA_LETTERS = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_ENUM_ENTRIES = 1024
MAX_PROPERTIES = 512
MAX_WHITESPACE_LETTERS = 256

WHITESPACE = r"(?: |\r?\n[ \t]{0,32})?"
"""The white space that JSON outputs may have between two tokens of JSON, as a regular expression: one space, or a line
end and an indentation, which is what writers of JSON use. A model could fill its answer with unlimited white space."""

_OPTIONS = "x-guidance"  # llguidance reads the options of a schema there, at the top level only
_OBJECT, _ARRAY = 2, 2  # letters of the brackets


def prepared_schema(
    field: str, schema: Mapping[str, object], *, is_strict: bool, whitespace: str | None = None
) -> dict[str, object]:
    """Check a schema against the limits of size and return it with the options for llguidance.

    With `is_strict`, a keyword that cannot be enforced is refused when the schema is compiled; otherwise it is ignored,
    and `oneOf` is read as `anyOf`. `whitespace` replaces `WHITESPACE`; "" allows none.
    Errors: AdmissionError (400) naming the field and the limit.
    """
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
    return {**schema, _OPTIONS: options}


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
