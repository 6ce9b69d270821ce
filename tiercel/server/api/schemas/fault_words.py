"""The faults of a body in words of this server, by the kinds that pydantic distinguishes.

Of a fault, only its kind and the limits that a schema names are read: pydantic's own sentences reach no client.
"""

from collections.abc import Mapping

OWN = "own"
"""The kind of a fault that a schema of ours raises; its message is ours, too."""

_WORDS = {
    "missing": "this field is required",
    "extra_forbidden": "there is no such field",
    "invalid_key": "expected names that are strings",
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "string_type": "expected a string",
    "string_unicode": "expected a string of Unicode text",
    "bytes_type": "expected a string",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "int_type": "expected an integer",
    "int_parsing": "expected an integer",
    "int_parsing_size": "expected an integer of fewer digits",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "multiple_of": "expected a multiple of {multiple_of}",
    "string_too_short": "expected a string with a length of at least {min_length}",
    "string_too_long": "expected a string with a length of at most {max_length}",
    "string_pattern_mismatch": "expected a string that matches {pattern}",
    "too_short": "expected a length of at least {min_length}",
    "too_long": "expected a length of at most {max_length}",
    "literal_error": "expected {expected}",
}


def fault_words(kind: str, limits: Mapping[str, object], own: str = "") -> str:
    """Return the description of a fault.

    `limits`: those that the schema names, by their names in pydantic; `own`: the message of a fault of the kind `OWN`.
    """
    if kind == OWN:
        return own
    words = _WORDS.get(kind)
    return "this value is not valid" if words is None else words.format_map(limits)
