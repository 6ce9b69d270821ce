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
    """The end of a call.

    A call that has begun stays a call. It is complete if its arguments are a JSON object; it is not if the answer ended
    within them, or if the model wrote something else.
    """

    index: int
    is_complete: bool = True


AnswerEvent = ContentPart | ThoughtPart | CallStart | CallArguments | CallEnd


class Ending(Struct, frozen=True):
    """The way in which the text of an answer ended.

    `is_cut`: something else than the model ended it: a limit, a deadline, a stop string. `following` is the text that
    would have come next; None if it is not known.
    """

    is_cut: bool
    following: str | None

    def hides(self, held: str, mark: str) -> bool:
        """Return whether the end of the text, which is the beginning of a mark, is not shown.

        It is not if it may have become the mark: the text of a cut answer is the beginning of that of the whole answer.
        """
        if self.following is None:
            return True
        return bool(self.following) and mark.startswith((held + self.following)[: len(mark)])


COMPLETE = Ending(is_cut=False, following="")
"""The model ended the answer."""
CUT = Ending(is_cut=True, following=None)
"""A limit ended the answer."""


class AnswerParser(Protocol):
    """Splits the text of one answer. The parts do not depend on how the text was cut into pieces."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next text; return the parts that are certain."""
        ...

    def finish(self, ending: Ending) -> list[AnswerEvent]:
        """Return the rest of what was held back, because no more text comes. Every call that has begun ends."""
        ...


def parts_of(parser: AnswerParser, text: str, ending: Ending | None) -> list[AnswerEvent]:
    """Return the parts of an answer that are certain with this text, and all of them if the answer ends here."""
    parts = parser.feed(text)
    return parts if ending is None else [*parts, *parser.finish(ending)]


class CallCount:
    """The calls of an answer, counted while it arrives."""

    __slots__ = ("_num_begun", "_num_complete")

    def __init__(self) -> None:
        self._num_begun = 0
        self._num_complete = 0

    def take(self, event: AnswerEvent) -> None:
        """Count the event."""
        match event:
            case CallStart():
                self._num_begun += 1
            case CallEnd(is_complete=True):
                self._num_complete += 1
            case _:
                pass

    @property
    def is_called(self) -> bool:
        """True if there are calls and all of them are complete: the client may run them."""
        return self._num_begun == self._num_complete > 0


class ParsedCall(Struct, frozen=True):
    """A call. Its arguments are a JSON object if it is complete, and what the model wrote otherwise."""

    name: str
    arguments: str


class ParsedAnswer(Struct, frozen=True):
    """The parts of a whole answer."""

    content: str
    thoughts: str
    calls: list[ParsedCall]
    is_called: bool = False  # see `CallCount`


def collect(events: Sequence[AnswerEvent]) -> ParsedAnswer:
    """Return the sum of the parts of an answer, as the client of a stream computes it: nothing is taken back."""
    content: list[str] = []
    thoughts: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    count = CallCount()
    for one in events:
        count.take(one)
        match one:
            case ContentPart(text):
                content.append(text)
            case ThoughtPart(text):
                thoughts.append(text)
            case CallStart(name=name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd():
                pass
    calls = [ParsedCall(name, "".join(texts)) for name, texts in zip(names, arguments, strict=True)]
    return ParsedAnswer("".join(content), "".join(thoughts), calls, count.is_called)


def held_prefix(text: str, marker: str) -> int:
    """Return the number of characters at the end of the text that may be the start of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
