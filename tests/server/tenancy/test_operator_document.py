"""Reading of YAML and JSON documents."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tiercel.server.tenancy.operator_document import MAX_BYTES, DocumentError, read_json, read_yaml

_leaves = st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.floats(-1e6, 1e6) | st.text(max_size=9)
_trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_a_document_is_plain_values() -> None:
    text = b"a: 1\nb: [x, 'y', \"z\", 1.5, -2.0e+3, .5, true, NULL, ~]\nc:\n  - d: on\n    e: 010\n    f: '7'\n"
    assert read_yaml(text) == {
        "a": 1,
        "b": ["x", "y", "z", 1.5, -2000.0, 0.5, True, None, None],
        "c": [{"d": "on", "e": 10, "f": "7"}],
    }
    assert read_yaml(b"") is None
    assert read_yaml(b"\xef\xbb\xbfa: |\n  two\n  lines\n") == {"a": "two\nlines\n"}


@given(_trees)
def test_yaml_is_read_as_by_safe_load(tree: Any) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")
    try:
        found = read_yaml(text)
    except DocumentError:
        assert any(word in text for word in (b"nan", b"!!")) or _depth(tree) >= 8 or b"\xed" in text
    else:
        assert found == yaml.safe_load(text.decode())


def _depth(tree: object) -> int:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + max(map(_depth, inner), default=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: &x 1\nb: *x\n", "line 1: anchors"),
        (b"a: *x\n", "line 1: aliases"),
        (b"a: &x [1]\n", "line 1: anchors"),
        (b"a: !!python/object/apply:os.system [ls]\n", "line 1: tags"),
        (b"a: !!str 1\n", "line 1: tags"),
        (b"a: 1\na: 2\n", "line 2: 'a' is given twice"),
        (b"? [1]\n: 2\n", "line 1: a key must be plain text"),
        (b"a: 1\n---\nb: 2\n", "line 2: a second document"),
        (b"[" * 9 + b"]" * 9, "deeper than 8"),
        (b"a: [1\n", "not YAML: line 2: "),
        (b'a: "secret\n', "not YAML: line 2: "),
        (b"a: \x00", "not YAML"),
        (b"\xff\xfe\xfa", "not YAML"),
        (b"a" * (MAX_BYTES + 1), "at most 1,048,576"),
    ],
)
def test_yaml_with_more_than_plain_values_is_refused_in_one_line(text: bytes, words: str) -> None:
    with pytest.raises(DocumentError) as refusal:
        read_yaml(text)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_thousandfold_expansion_is_refused_at_its_first_anchor() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    with pytest.raises(DocumentError, match="anchors"):
        read_yaml("\n".join(lines).encode())


@given(_trees)
def test_our_json_is_standard_json(tree: Any) -> None:
    text = json.dumps(tree).encode()
    if _depth(tree) <= 8:
        assert read_json(text) == tree


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[" * 9 + b"]" * 9, "deeper than 8"),
        (b"\xff", "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_json_is_read_as_strictly(text: bytes, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        read_json(text)
