"""The pages of the repository as its readers see them: the commands in their blocks, and the text around."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MORE_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md", "tiercel/embedded/README.md")
PAGES = (*MORE_PAGES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HERE = re.compile(r"<<'?(\w+)'?")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page, with the lines that it continues over."""

    page: str
    text: str


@cache
def page_text(page: str) -> str:
    """Return the text of a page of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of every block."""
    return _BLOCK.findall(page_text(page))


def prose(page: str) -> str:
    """Return a page without its blocks."""
    return _BLOCK.sub("", page_text(page))


def commands() -> list[Command]:
    """Return every command of every page, in order."""
    return [
        Command(page, text)
        for page in PAGES
        for language, block in blocks(page)
        if language == "sh"
        for text in _split(block)
    ]


def _split(block: str) -> Iterator[str]:
    """Yield the commands of a block: a line, with those that a backslash, a quote or a here-document adds to it."""
    pending: list[str] = []
    for line in block.splitlines():
        pending.append(line)
        text = "\n".join(pending)
        here = _HERE.search(text)
        is_open = text.endswith("\\") or text.count("'") % 2 == 1
        if here is not None:
            is_open = pending[-1] != here[1]
        if not is_open:
            pending = []
            if text.strip() and not text.startswith("#"):
                yield re.sub(r"\s+# .*$", "", text) if here is None else text
    assert not pending, f"a command that does not end: {pending}"
