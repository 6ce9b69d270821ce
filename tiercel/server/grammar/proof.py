"""The proof that every answer which a compiled grammar lets begin can end.

The compiler follows a grammar token by token and looks no further, so it accepts rules that refer to themselves without
an alternative: answers begin with them and never end. Here the rules that it has compiled, in the form in which it
prints them, are proved as a whole, from JSON schemas and from grammars alike.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable

from msgspec import Struct

_RULES = "== Optimize ==>\nGrammar:\n"
_EMPTY_LEXEME = re.compile(r"^ +\[(\d+)\] .*\(ExprRef ∅\)", re.MULTILINE)
_COMPOSED = re.compile(r"^ +\[\d+\] .*(?: & |¬)", re.MULTILINE)
_PARAMETER = re.compile(r"::.*")
_EPSILON = "ϵ"
_START = "start"

Production = tuple[str, ...]


class Rules(Struct, frozen=True):
    """The rules of a compiled grammar.

    `by_name` has the productions of each rule. A symbol such as `[3]` is a lexeme; those in `empty` match no text.
    If `is_composed`, there are lexemes made with `&` or `~`, of which more may match no text.
    """

    by_name: dict[str, list[Production]]
    empty: frozenset[str] = frozenset()
    is_composed: bool = False


class DeadEnd(Struct, frozen=True):
    """An answer that cannot end. `rule` is "" if it has no name of the client's; `can_begin`: it gets a first token."""

    rule: str
    can_begin: bool


def read_rules(printed: str) -> Rules | None:
    """Read the rules that the compiler printed, with conditions on parameters taken as fulfilled; None without any."""
    at = printed.rfind(_RULES)
    if at < 0:
        return None
    by_name: defaultdict[str, list[Production]] = defaultdict(list)
    name = ""
    for line in printed[at + len(_RULES) :].split("\n"):
        if line.startswith("stats:"):
            break
        left, arrow, right = line.partition(" ⇦ ")
        if not arrow:
            continue  # `==>`: the grammar that is nested in a rule
        if left[:1] != " ":
            name = _PARAMETER.sub("", left.rstrip())
        symbols = right.split("  ", 1)[0].split()
        if not symbols or symbols[0].startswith(("Some(", "None")):
            continue  # the attributes of a lexeme
        if "::" in right:
            symbols = [_PARAMETER.sub("", one) for one in symbols]
        by_name[name].append(() if symbols == [_EPSILON] else tuple(symbols))
    lexemes = printed[: printed.find(_RULES)]
    empty = frozenset(f"[{number}]" for number in _EMPTY_LEXEME.findall(lexemes))
    return Rules(dict(by_name), empty, _COMPOSED.search(lexemes) is not None)


def dead_end(rules: Rules) -> DeadEnd | None:
    """Return an answer that could begin and not end, or that there is no answer at all; None if all answers can end.

    A production without an end is harmless where no token leads into it. Cost: linear in the symbols of the rules.
    """
    ending = _ending(rules)
    if not rules.empty and len(rules.by_name) == sum(name in ending for name in rules.by_name):
        return None
    begins = _consuming(rules)
    if _START not in ending:
        return DeadEnd(_named(_endless_below(rules, ending, _START)), _START in begins)
    for name in _reachable(rules):
        for production in rules.by_name.get(name, ()):
            if name in ending and (stuck := _stuck(production, ending, begins)) is not None:
                return DeadEnd(_named(_endless_below(rules, ending, stuck)), True)
    return None


def _is_lexeme(symbol: str) -> bool:
    return symbol[0] == "[" and symbol[-1] == "]"


def _ending(rules: Rules) -> set[str]:
    """Return the symbols that match a text of finite length: a least fixed point."""
    ending: set[str] = set()
    users: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    missing: dict[tuple[str, int], int] = {}
    ready: deque[str] = deque()
    for name, productions in rules.by_name.items():
        for number, production in enumerate(productions):
            needed = set(production)
            missing[name, number] = len(needed)
            for symbol in needed:
                users[symbol].append((name, number))
            if not needed:
                ready.append(name)
    ready.extend(symbol for symbol in users if _is_lexeme(symbol) and symbol not in rules.empty)
    while ready:
        symbol = ready.popleft()
        if symbol in ending:
            continue
        ending.add(symbol)
        for user in users[symbol]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user[0])
    return ending


def _nullable(rules: Rules) -> set[str]:
    only_rules = {
        name: [one for one in productions if not any(map(_is_lexeme, one))]
        for name, productions in rules.by_name.items()
    }
    return {symbol for symbol in _ending(Rules(only_rules)) if not _is_lexeme(symbol)}


def _consuming(rules: Rules) -> set[str]:
    """Return the symbols of which a token may be taken, whether or not they end then.

    A lexeme may. A rule may if a symbol of a production does: the first one, or one behind others that may be empty.
    """
    nullable = _nullable(rules)
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name, productions in rules.by_name.items():
        for production in productions:
            for symbol in production:
                users[symbol].append(name)
                if symbol not in nullable:
                    break
    found: set[str] = set()
    ready = deque(symbol for symbol in users if _is_lexeme(symbol) and symbol not in rules.empty)
    while ready:
        symbol = ready.popleft()
        if symbol not in found:
            found.add(symbol)
            ready.extend(users[symbol])
    return found


def _stuck(production: Production, ending: set[str], begins: set[str]) -> str | None:
    """Return the symbol without an end of a production that tokens lead into; None if there is none."""
    for place, symbol in enumerate(production):
        if symbol not in ending:
            is_entered = symbol in begins or any(one in begins for one in production[:place])
            return symbol if is_entered else None
    return None


def _reachable(rules: Rules) -> Iterable[str]:
    found = {_START}
    waiting = deque(found)
    while waiting:
        for production in rules.by_name.get(waiting.popleft(), ()):
            for symbol in production:
                if symbol not in found and not _is_lexeme(symbol):
                    found.add(symbol)
                    waiting.append(symbol)
    return found


def _endless_below(rules: Rules, ending: set[str], name: str) -> str:
    """Return a rule that refers to itself without an end, below one that has none; one with a name if there is one."""
    trail: dict[str, None] = {}
    while name not in trail and not _is_lexeme(name):
        trail[name] = None
        productions = rules.by_name.get(name)
        if not productions:
            return name
        name = next(symbol for symbol in productions[0] if symbol not in ending)
    if _is_lexeme(name):
        return next(reversed(trail), "")  # "": a lexeme without a rule of its own
    cycle = list(trail)[list(trail).index(name) :]
    return next((one for one in cycle if _named(one)), name)


def _named(rule: str) -> str:
    """Return the name that the client gave a rule; "" for names of the compiler."""
    if rule.startswith("json-schema:"):
        return rule.partition("#")[2] and f"#{rule.partition('#')[2]}"
    return "" if "#" in rule or rule in ("json_any", "star", "empty") else rule
