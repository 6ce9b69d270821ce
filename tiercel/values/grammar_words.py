"""The errors of the grammar compiler in our own words: the only way from them to a client.

Both processes compile grammars. A message of the compiler names its own syntax, its Rust types or a backtrace, and may
change with its version, so none of it is passed on, except for places and for names that the client wrote.
"""

import re
from collections.abc import Sequence

_MAX_NAME = 64  # letters of a name that is repeated
_NAME = rf"([^\"'\n]{{1,{_MAX_NAME}}})"

TOO_LARGE = "it is too large or too ambiguous for the limits of this server"
NO_VALUES = "its parts exclude each other, so no value is valid"
COMPILER_FAILED = "the compiler of grammars failed"
UNKNOWN_ERROR = "it cannot be used"
NO_END = "an answer could begin and would never end"
NO_OUTPUT = "no output matches it"
NOTHING_ALLOWED = "no token may follow the output so far"

_FORM = "a regular expression in it"

# The first pattern that is found decides. `{}` is replaced by the group of the pattern, a name that the client wrote.
_WORDS: Sequence[tuple[str, str]] = (
    (rf"unknown special token: \"{_NAME}\"", "the model has no special token {}"),
    (rf"[Rr]ule ['\"]{_NAME}['\"] not found|unknown name: \"{_NAME}\"", "the rule {} is not defined"),
    (rf"circular reference in token \"{_NAME}\"", "the terminal {} refers to itself"),
    (rf"duplicate (?:rule|token)[^\"\n]*\"{_NAME}\"", "the rule {} is defined twice"),
    (r"no start rule", "it has no rule named start"),
    (r"[Uu]nknown common regex|unknown grammar|Unknown attribute", "it refers to something that is not there"),
    (r"only supported for tokens", "& and ~ combine terminals only, whose names are in upper case"),
    (r"look-around|lookaround", f"{_FORM} has look-around or an anchor in the middle, which is not supported"),
    (r"[Bb]ackreference", f"{_FORM} has a backreference, which is not supported"),
    (r"[Uu]nimplemented keys|[Uu]nknown format", "a JSON schema in it has a keyword or format that is not enforced"),
    (rf"required property '{_NAME}' is unsatisfiable", "the required property {} has no valid value"),
    (r"Unsatisfiable schema|required item is unsatisfiable", NO_VALUES),
    (r"circular references with sibling", "a $ref that leads back to itself has other keywords beside it"),
    (r"intersection stack level", "schemas that refer to themselves are combined without an end"),
    (r"oneOf constraints", "oneOf is enforced only if its branches exclude each other; use anyOf"),
    (
        r"min/maxProperties",
        "minProperties and maxProperties are enforced only if all of properties are required",
    ),
    (r"not disjoint", "patternProperties are enforced only if no name matches two of them"),
    (r"multiple of", "multipleOf must be larger than 0, and have few digits"),
    (r"\$ref|URI|[Pp]ointer|[Aa]nchor|does not exist|fetch|[Rr]etriev", "a $ref in it leads nowhere"),
    (r"[Tt]oken range|token range", "it names a token id that the model does not have"),
    (r"range (?:end|start)|range order", "a repetition ends before it begins"),
    (r"regex|multiple of", f"{_FORM} cannot be read"),
    (r"NoExtension|no token", NOTHING_ALLOWED),
    (r"(?i)fuel|too (?:large|many|big|complex|long)|limit|exceed|max(?:imum)? is|LexerTooComplex", TOO_LARGE),
    (r"[Ee]xpected|[Ll]exer error|[Uu]nexpected|parse|must be|at EOF|not supported", "it cannot be read"),
)
_PATTERNS = [(re.compile(pattern), words) for pattern, words in _WORDS]
_PLACE = re.compile(r"(?:at )?(\d{1,9})\((\d{1,9})\): |.* at line (\d{1,9}), ", re.DOTALL)


def in_own_words(foreign: str, *, with_place: bool = False) -> str:
    """Return an error of the grammar compiler in our own words.

    `with_place`: behind the line and the column that it names, which tell a client something if the text was the
    client's own.
    """
    words = next((_said(words, found) for pattern, words in _PATTERNS if (found := pattern.search(foreign))), None)
    place = _PLACE.match(foreign) if with_place else None
    if words is None or place is None:
        return words or UNKNOWN_ERROR
    line, column, only_line = place.groups()
    return f"line {only_line}: {words}" if line is None else f"line {line}, column {column}: {words}"


def _said(words: str, found: re.Match[str]) -> str:
    name = next((one for one in found.groups() if one), "")
    return words.replace("{}", f"'{name}'")
