"""Count what makes code of the package hard to read: python -m tools.house. Exit code 1 if a count is over its limit.

A fragment is a comment behind code that completes the name before it and is no sentence: it begins with a word that
leads on, such as `of` or `whose` (`FRAGMENTS`).
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "tiercel"
LIMITS = {
    "starred tuples": 0,
    "fmt: skip": 10,
    "calls with more than four positional arguments": 0,
    "methods named take, tell, hear or note_*": 5,
    "classes named *Book": 3,
    "comments that are fragments": 50,
}
FRAGMENTS = re.compile(
    r"#\s*(of|whose|whom|that|which|where|when|while|from|for|in|by|with|without|as|since|until|behind|and|or|not|before|"
    r"after|at|on|to|into|per|than|if|because|also|so|only)\b"
)
_VAGUE = re.compile(r"(take|tell|hear|note_\w+)$")


def findings(source: str) -> Iterator[tuple[str, int]]:
    """Yield the kind and the line of everything that counts in a file."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Starred(value=ast.Tuple()):
                yield "starred tuples", node.lineno
            case ast.Call(args=args) if len(args) > 4:
                yield "calls with more than four positional arguments", node.lineno
            case ast.ClassDef(name=name, body=body):
                if name.endswith("Book"):
                    yield "classes named *Book", node.lineno
                for one in body:
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and _VAGUE.match(one.name):
                        yield "methods named take, tell, hear or note_*", one.lineno
            case _:
                pass
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[str, int]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if "fmt: skip" in token.string:
            yield "fmt: skip", token.start[0]
        is_behind_code = bool(token.line[: token.start[1]].strip())
        if is_behind_code and FRAGMENTS.match(token.string):
            yield "comments that are fragments", token.start[0]


def main() -> int:
    """Print the counts, with `--list` every place too, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="KIND", help="print the places of a kind, by the beginning of its name")
    wanted = parser.parse_args().list
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for kind, line in findings(path.read_text(encoding="utf-8")):
            places[kind].append(f"{path.relative_to(PACKAGE.parent)}:{line}")
    for kind, limit in LIMITS.items():
        print(f"{len(places[kind]):5} of {limit:3}  {kind}")
        if wanted is not None and kind.startswith(wanted):
            print("\n".join(f"             {place}" for place in places[kind]))
    return int(any(len(places[kind]) > limit for kind, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
