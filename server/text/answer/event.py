"""The parts of an answer, in the order in which they arrive."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class ContentPart(Struct, frozen=True):
    """Text for the user."""

    text: str


class ThoughtPart(Struct, frozen=True):
    """Text that the model wrote before its answer."""

    text: str


class CallStart(Struct, frozen=True):
    """The beginning of a call: its function is known, and its arguments have begun."""

    index: int
    name: str


class CallArguments(Struct, frozen=True):
    """The next piece of the arguments of a call, as the model wrote it."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """The end of a call: its arguments are a JSON object."""

    index: int


class CallBroken(Struct, frozen=True):
    """A call that had started turns out to be malformed or unfinished: all of its text is content."""

    index: int
    text: str


AnswerEvent = ContentPart | ThoughtPart | CallStart | CallArguments | CallEnd | CallBroken


class AnswerParser(Protocol):
    """Splits the text of one answer. The parts do not depend on how the text was cut into pieces."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next text; return the parts that are certain."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back, because the answer is complete."""
        ...


class ParsedCall(Struct, frozen=True):
    """A complete call."""

    name: str
    arguments: str  # a JSON object


class ParsedAnswer(Struct, frozen=True):
    """The parts of a whole answer."""

    content: str
    thoughts: str
    calls: list[ParsedCall]


def collect(events: Sequence[AnswerEvent]) -> ParsedAnswer:
    """Return the parts of a whole answer. The text of broken calls is content."""
    content: list[str] = []
    thoughts: list[str] = []
    name_by_call: dict[int, str] = {}
    arguments_by_call: dict[int, list[str]] = {}
    for one in events:
        match one:
            case ContentPart(text):
                content.append(text)
            case ThoughtPart(text):
                thoughts.append(text)
            case CallStart(index, name):
                name_by_call[index] = name
                arguments_by_call[index] = []
            case CallArguments(index, text):
                arguments_by_call[index].append(text)
            case CallEnd():
                pass
            case CallBroken(index, text):
                del name_by_call[index]
                content.append(text)
    calls = [ParsedCall(name, "".join(arguments_by_call[index])) for index, name in name_by_call.items()]
    return ParsedAnswer("".join(content), "".join(thoughts), calls)


def held_prefix(text: str, marker: str) -> int:
    """Return the number of characters at the end of the text that may be the start of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
