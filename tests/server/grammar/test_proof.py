"""The proof of compiled grammars, and the errors of their compiler in our own words."""

import ast
import json
from functools import cache
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from tiercel.server.grammar.frames import GrammarAccepted, GrammarRefused
from tiercel.server.grammar.proof import read_rules
from tiercel.server.grammar.worker import GrammarTrial
from tiercel.values.grammar_words import NO_END, NO_OUTPUT, in_own_words

ROOT = Path(__file__).resolve().parents[3]
ENDLESS: list[tuple[str, str]] = [
    ('start: "a" b\nb: "c" b', NO_END),
    ('root ::= "a" b\nb ::= "c" b', NO_END),
    ('start: "a" | "b" c\nc: "d" e\ne: "f" c', NO_END),  # one way in is enough
    ('start: "a" b\nb: %json {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}', NO_END),
    ('start: ("a" b)?\nb: "(" b ")"', NO_END),
    ('start: "a" X\nX: /[^\\s\\S]/', NO_END),
    ('start: "a" /[^\\s\\S]/ | "b"', NO_END),  # a lexeme without a name
    ('start: "a" X | "b"\nX: /a+/ & /b+/', "the terminal 'X' matches no text"),
    ('start: "a" X | "start" Y\nX: /a+/ & ~/a+/\nY: /b/', "the terminal 'X' matches no text"),
    ("start: start", NO_OUTPUT),
    ("root ::= root", NO_OUTPUT),
    ("start: a\na: b\nb: a", NO_OUTPUT),
]
WITH_END = [
    'start: "a" start | "b"',
    'start: "(" start ")" | ""',
    'root ::= "a" [0-9]+ | "b" root',
    'start: "a" | b\nb: b "c"',  # no token leads into b
    "start: X\nX: /a+/ & ~/b/",
    'start: e\ne: e e | "a"',
    'start: %json {"type": "object", "properties": {"x": {"$ref": "#"}}}',
]
COMBINED = {
    "type": "object",
    "properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object", "required": ["y"]}]}},
    "$defs": {"a": {"type": "object", "properties": {"y": {"$ref": "#/$defs/b"}}},
              "b": {"type": "object", "properties": {"z": {"allOf": [{"$ref": "#/$defs/b"}]}}, "required": ["z"]}},
}  # fmt: skip


@cache
def trial() -> GrammarTrial:
    return GrammarTrial(LLTokenizer("byte"))


@pytest.mark.parametrize(("text", "words"), ENDLESS)
def test_grammars_whose_answers_never_end_are_refused(text: str, words: str) -> None:
    verdict = trial().verdict("ebnf", text)
    assert isinstance(verdict, GrammarRefused)
    assert words in verdict.message


@pytest.mark.parametrize("text", WITH_END)
def test_grammars_with_an_end_are_accepted(text: str) -> None:
    assert isinstance(trial().verdict("ebnf", text), GrammarAccepted)


def test_what_the_compiler_combines_is_proved_too() -> None:
    text = json.dumps({"grammars": [{"json_schema": COMBINED}]})
    verdict = trial().verdict("llguidance", text)
    assert isinstance(verdict, GrammarRefused)
    assert NO_END in verdict.message


def test_the_rule_without_an_end_is_named() -> None:
    verdict = trial().verdict("ebnf", 'start: "a" first | "b"\nfirst: "c" second\nsecond: "d" first')
    assert isinstance(verdict, GrammarRefused)
    assert "the rule 'first'" in verdict.message or "the rule 'second'" in verdict.message


def test_rules_that_cannot_be_read_are_not_taken_for_proved() -> None:
    """As after a change of what the compiler prints."""
    assert read_rules("Grammar:\nstart => a\n") is None


BAD = [
    *["start: x", "start: <think>", "start: /(/", "start: /(?=a)b/", "start: /(a)\\1/", 'start: "a', "start", "a: /b/"],
    *["start: A\nA: A", 'start: %json {"not": {}}', "start: %json {", "start: <[999999]>", "start: @a", "%import a.B"],
    *['start: "a"{5,3}', 'start: a::1\na::_: "x" a::2 %if is_zeros([0:1])\n | "y"', "root ::= x", "root ::= (", "?"],
    *['start: "a"\nstart: "b"', 'start: "\\ud800"', "start: /\\p{foo}/", 'start: %regex {"x": 1}', "start: a{9}{9"],
]
FOREIGN = (
    *("llguidance", "%json", "serde", "panic", "backtrace", "::", "regex parse error", "Expected", "<unknown>"),
    *("at line 1 column", "NoExtension", "coerce", "Unimplemented", "derivre", "Exception"),
)


@pytest.mark.parametrize("text", BAD)
def test_words_of_the_compiler_are_not_passed_on(text: str) -> None:
    verdict = trial().verdict("ebnf", text)
    assert isinstance(verdict, GrammarRefused)
    assert not [word for word in FOREIGN if word.lower() in verdict.message.lower()], verdict.message


def test_an_unknown_error_of_the_compiler_gets_words_of_ours() -> None:
    assert in_own_words("thread 'main' panicked at src/lib.rs:7") == "it cannot be used"
    assert (
        in_own_words('at 3(8): unknown name: "b"', with_place=True) == "line 3, column 8: the rule 'b' is not defined"
    )
    assert in_own_words('at 3(8): unknown name: "b"') == "the rule 'b' is not defined"


_TRANSLATED = ("in_own_words", "_partly_in", "_misshapen")
_FOLDERS = ("tiercel/server/grammar", "tiercel/server/api", "tiercel/engine/sampling")
_FILES = [
    *sorted(path.relative_to(ROOT).as_posix() for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")),
    *("tiercel/engine/grammars.py", "tiercel/engine/grammar_queue.py"),
]


def _own_errors() -> set[str]:
    """Return the names of our own exceptions, whose messages we have written."""
    trees = [
        ast.parse(path.read_text())
        for path in (*(ROOT / "tiercel/server").rglob("*.py"), ROOT / "tiercel/values/errors.py")
    ]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _untranslated(tree: ast.Module, own: set[str]) -> list[int]:
    """Return the lines on which a foreign exception or an error of the compiler becomes a text."""
    translated = {
        id(inner)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _TRANSLATED
        for inner in ast.walk(call)
    }
    found: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_error":
            found += [node.lineno] if id(node) not in translated else []
        if not isinstance(node, ast.ExceptHandler) or node.name is None:
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if all(isinstance(kind, ast.Name) and kind.id in own for kind in kinds):
            continue
        for inner in ast.walk(node):
            match inner:
                case ast.FormattedValue() | ast.Call(func=ast.Name(id="str" | "repr")):
                    names = {name.id for name in ast.walk(inner) if isinstance(name, ast.Name)}
                    found += [inner.lineno] if node.name in names and id(inner) not in translated else []
                case _:
                    pass
    return found


def test_no_foreign_exception_becomes_a_text_untranslated() -> None:
    own = _own_errors()
    found = {path: lines for path in _FILES if (lines := _untranslated(ast.parse((ROOT / path).read_text()), own))}
    assert not found


def test_the_search_for_foreign_exceptions_finds_them() -> None:
    text = "try:\n    f()\nexcept ValueError as exc:\n    g(f'bad: {exc}')\n    in_own_words(str(exc))\nm.get_error()\n"
    assert _untranslated(ast.parse(text), set()) == [4, 6]
