"""PromQL, as far as boards and rules use it: parsed whole, and followed through with labels instead of values.

`Catalog.find` returns the series of an expression: selectors match real series, aggregations keep the labels
that they name, and the two sides of an operator must meet. An expression that would stay empty is an error. Grammar:
https://prometheus.io/docs/prometheus/latest/querying/basics/
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Labels = frozenset[tuple[str, str]]
"""One series: its labels, without its name."""

_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*|
    (?P<duration>\d+(?:ms|[smhdwy])(?:\d+(?:ms|[smhdwy]))*)|
    (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[Ii]nf\b|NaN\b)|
    (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|
    (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^(){}\[\],=<>:@]))""",
    re.VERBOSE,
)
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"or"}),
    frozenset({"and", "unless"}),
    frozenset({"==", "!=", "<=", ">=", "<", ">"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%"}),
    frozenset({"^"}),
)
_AGGREGATES = {"sum", "min", "max", "avg", "count", "stddev", "stdvar", "group", "topk", "bottomk", "quantile"}
_KEEPERS = {"topk", "bottomk"}  # aggregations that choose series instead of making new ones
_RANGED = {
    *("rate", "irate", "increase", "delta", "idelta", "deriv", "changes", "resets", "predict_linear"),
    *("avg_over_time", "min_over_time", "max_over_time", "sum_over_time", "count_over_time", "last_over_time"),
    *("quantile_over_time", "present_over_time", "absent_over_time"),
}
_INSTANT = {"abs", "ceil", "floor", "round", "clamp", "clamp_min", "clamp_max", "sort", "histogram_quantile"}
_SCALARS = {"time", "scalar", "vector", "absent"}


class PromqlError(Exception):
    """The expression is wrong, or would find nothing."""


@dataclass(frozen=True)
class Number:
    """A scalar."""


@dataclass(frozen=True)
class Text:
    """A string."""


@dataclass(frozen=True)
class Selector:
    """`name{matchers}[range]`."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]  # label, operator, value
    is_range: bool


@dataclass(frozen=True)
class Call:
    """A function."""

    function: str
    arguments: tuple["Node", ...]


@dataclass(frozen=True)
class Aggregate:
    """`sum by (labels) (…)`."""

    operator: str
    arguments: tuple["Node", ...]
    grouping: Literal["by", "without"]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Binary:
    """Two sides, and how their series meet."""

    operator: str
    left: "Node"
    right: "Node"
    matching: Literal["on", "ignoring"]
    labels: tuple[str, ...]
    group: Literal["left", "right"] | None
    copied: tuple[str, ...]  # labels that the side of one gives to the side of many


@dataclass(frozen=True)
class Subquery:
    """`(…)[range:step]`."""

    inner: "Node"


Node = Number | Text | Selector | Call | Aggregate | Binary | Subquery


def parse(text: str) -> Node:
    """Errors: PromqlError."""
    parser = _Parser(_tokens(text))
    node = parser.binary(0)
    if parser.kind:
        raise PromqlError(f"not expected: {parser.word!r}")
    return node


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise PromqlError(f"not PromQL: {text[at : at + 20]!r}")
        if match.lastgroup is not None:
            found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("", "")]
        self._at = 0

    @property
    def kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def word(self) -> str:
        return self._tokens[self._at][1]

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        left = self.binary(level + 1)
        while self.word in _LEVELS[level] and self.kind in ("sign", "name"):
            operator = self._next()
            if self.word == "bool":
                self._next()
            matching: Literal["on", "ignoring"] = "ignoring"
            labels: tuple[str, ...] = ()
            group: Literal["left", "right"] | None = None
            copied: tuple[str, ...] = ()
            if self.word in ("on", "ignoring"):
                matching = "on" if self._next() == "on" else "ignoring"
                labels = self._names()
                if self.word in ("group_left", "group_right"):
                    group = "left" if self._next() == "group_left" else "right"
                    copied = self._names() if self.word == "(" else ()
            right = self.binary(level if operator == "^" else level + 1)
            left = Binary(operator, left, right, matching, labels, group, copied)
        return left

    def _unary(self) -> Node:
        if self.word in ("-", "+") and self.kind == "sign":
            self._next()
            return self._unary()
        return self._suffixed(self._primary())

    def _suffixed(self, node: Node) -> Node:
        while True:
            if self.word == "[":
                self._next()
                self._expect_kind("duration")
                if self.word == ":":
                    self._next()
                    if self.kind == "duration":
                        self._next()
                    node = Subquery(node)
                elif isinstance(node, Selector) and not node.is_range:
                    node = Selector(node.name, node.matchers, is_range=True)
                else:
                    raise PromqlError("a range of something that is no selector")
                self._expect("]")
            elif self.word == "offset":
                self._next()
                self._expect_kind("duration")
            elif self.word == "@":
                self._next()
                self._expect_kind("number")
            else:
                return node

    def _primary(self) -> Node:
        kind, word = self.kind, self._next()
        if kind == "number":
            return Number()
        if kind == "string":
            return Text()
        if word == "(":
            inner = self.binary(0)
            self._expect(")")
            return inner
        if word == "{":
            raise PromqlError("a selector without a name")
        if kind != "name":
            raise PromqlError(f"not expected: {word!r}")
        if word in _AGGREGATES:
            return self._aggregate(word)
        if self.word == "(":
            return self._call(word)
        return Selector(word, self._matchers() if self.word == "{" else (), is_range=False)

    def _aggregate(self, operator: str) -> Node:
        grouping: Literal["by", "without"] = "by"
        labels: tuple[str, ...] = ()
        if self.word in ("by", "without"):
            grouping, labels = ("by" if self._next() == "by" else "without"), self._names()
        arguments = self._arguments()
        if self.word in ("by", "without"):
            grouping, labels = ("by" if self._next() == "by" else "without"), self._names()
        wanted = 2 if operator in ("topk", "bottomk", "quantile") else 1
        if len(arguments) != wanted:
            raise PromqlError(f"{operator} takes {wanted} arguments")
        return Aggregate(operator, arguments, grouping, labels)

    def _call(self, function: str) -> Node:
        if function not in _RANGED | _INSTANT | _SCALARS:
            raise PromqlError(f"unknown function {function}")
        arguments = self._arguments()
        ranges = [one for one in arguments if isinstance(one, Subquery) or (isinstance(one, Selector) and one.is_range)]
        if (len(ranges) == 1) != (function in _RANGED):
            raise PromqlError(f"{function} {'wants' if function in _RANGED else 'takes no'} range")
        return Call(function, arguments)

    def _arguments(self) -> tuple[Node, ...]:
        self._expect("(")
        found: list[Node] = []
        while self.word != ")":
            found.append(self.binary(0))
            if self.word != ")":
                self._expect(",")
        self._expect(")")
        return tuple(found)

    def _names(self) -> tuple[str, ...]:
        self._expect("(")
        found: list[str] = []
        while self.word != ")":
            found.append(self._expect_kind("name"))
            if self.word != ")":
                self._expect(",")
        self._expect(")")
        return tuple(found)

    def _matchers(self) -> tuple[tuple[str, str, str], ...]:
        self._expect("{")
        found: list[tuple[str, str, str]] = []
        while self.word != "}":
            label, operator = self._expect_kind("name"), self._next()
            if operator not in ("=", "!=", "=~", "!~"):
                raise PromqlError(f"no matcher: {operator!r}")
            found.append((label, operator, self._expect_kind("string")[1:-1]))
            if self.word != "}":
                self._expect(",")
        self._expect("}")
        return tuple(found)

    def _next(self) -> str:
        word = self.word
        if not self.kind:
            raise PromqlError("ends too early")
        self._at += 1
        return word

    def _expect(self, word: str) -> None:
        if self._next() != word:
            raise PromqlError(f"{word!r} expected before {self.word!r}")

    def _expect_kind(self, kind: str) -> str:
        if self.kind != kind:
            raise PromqlError(f"a {kind} expected instead of {self.word!r}")
        return self._next()


class Catalog:
    """The series that exist, by name."""

    def __init__(self, series: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        self._series: dict[str, set[Labels]] = {}
        for name, labels in series:
            self.add(name, [frozenset(labels.items())])

    @property
    def names(self) -> set[str]:
        """Return the names of all series."""
        return set(self._series)

    def add(self, name: str, series: Iterable[Labels]) -> None:
        """Add the series of a recording rule."""
        self._series.setdefault(name, set()).update(series)

    def find(self, expression: str) -> set[Labels] | None:
        """The labels of the series that the expression would have; None of a scalar. Errors: PromqlError."""
        return self._follow(parse(expression))

    def _follow(self, node: Node) -> set[Labels] | None:
        match node:
            case Number() | Text():
                return None
            case Selector():
                return self._select(node)
            case Subquery():
                return self._follow(node.inner)
            case Aggregate():
                return self._aggregate(node)
            case Call():
                return self._call(node)
            case Binary():
                return self._meet(node)

    def _select(self, node: Selector) -> set[Labels]:
        found = self._series.get(node.name)
        if not found:
            raise PromqlError(f"no series {node.name}")
        known = _names(found)
        for label, operator, value in node.matchers:
            if label not in known:
                raise PromqlError(f"{node.name} has no label {label}, only {', '.join(sorted(known))}")
            found = {one for one in found if _matches(dict(one).get(label, ""), operator, value)}
            if not found:
                raise PromqlError(f'no series of {node.name} has {label}{operator}"{value}"')
        return found

    def _call(self, node: Call) -> set[Labels] | None:
        found = [self._follow(argument) for argument in node.arguments]
        if node.function in ("time", "scalar"):
            return None
        vectors = [one for one in found if one is not None]
        if node.function in ("vector", "absent", "absent_over_time"):
            return {frozenset()}
        if len(vectors) != 1:
            raise PromqlError(f"{node.function} wants one vector")
        if node.function == "histogram_quantile":
            if "le" not in _names(vectors[0]):
                raise PromqlError("histogram_quantile wants buckets: the label le is gone")
            return _without(vectors[0], {"le"})
        return vectors[0]

    def _aggregate(self, node: Aggregate) -> set[Labels]:
        inner = self._follow(node.arguments[-1])
        if inner is None:
            raise PromqlError(f"{node.operator} of a scalar")
        missing = set(node.labels) - _names(inner)
        if missing:
            raise PromqlError(f"{node.operator} {node.grouping} ({', '.join(sorted(missing))}): there is no such label")
        if node.operator in _KEEPERS:
            return inner
        return _only(inner, set(node.labels)) if node.grouping == "by" else _without(inner, set(node.labels))

    def _meet(self, node: Binary) -> set[Labels] | None:
        left, right = self._follow(node.left), self._follow(node.right)
        if left is None or right is None:
            return right if left is None else left
        missing = set(node.labels) - (_names(left) & _names(right) if node.matching == "on" else _names(left | right))
        if missing:
            raise PromqlError(f"{node.operator} {node.matching} ({', '.join(sorted(missing))}): there is no such label")

        def key(labels: Labels) -> Labels:
            return frozenset(pair for pair in labels if (pair[0] in node.labels) == (node.matching == "on"))

        if node.operator == "or":
            return left | right
        if node.operator == "unless":
            return left
        shared = {key(one) for one in left} & {key(one) for one in right}
        if not shared:
            sides = f"{_show(left)}, {_show(right)}"
            raise PromqlError(f"the two sides of {node.operator} have no labels in common: {sides}")
        if node.operator == "and":
            return {one for one in left if key(one) in shared}
        many, few = (right, left) if node.group == "right" else (left, right)
        sides = (few,) if node.group else (few, many)
        if any(len({key(one) for one in side}) < len(side) for side in sides):
            raise PromqlError(f"{node.operator}: several series of one side meet the same one")
        if node.group is None:
            comparing = node.operator in _LEVELS[2]
            return {one if comparing else key(one) for one in left if key(one) in shared}
        gifts = {key(one): _only({one}, set(node.copied)) for one in few}
        return {frozenset({*one, *next(iter(gifts[key(one)]))}) for one in many if key(one) in shared}


def _matches(value: str, operator: str, wanted: str) -> bool:
    if operator in ("=", "!="):
        return (value == wanted) == (operator == "=")
    return (re.fullmatch(wanted, value) is not None) == (operator == "=~")


def _names(series: Iterable[Labels]) -> set[str]:
    return {name for labels in series for name, _ in labels}


def _only(series: Iterable[Labels], names: set[str]) -> set[Labels]:
    return {frozenset(pair for pair in labels if pair[0] in names) for labels in series}


def _without(series: Iterable[Labels], names: set[str]) -> set[Labels]:
    return {frozenset(pair for pair in labels if pair[0] not in names) for labels in series}


def _show(series: set[Labels]) -> str:
    return str(sorted(dict(min(series, key=sorted))) if series else "nothing")
