"""The thoughts before an answer, between `<think>` and `</think>`."""

from enum import Enum, auto

from tiercel.server.text.answer.event import (
    AnswerEvent,
    AnswerParser,
    ContentPart,
    Ending,
    ThoughtPart,
    held_prefix,
)
from tiercel.server.text.answer.held_text import HeldText

THINK, END_THINK = "<think>", "</think>"


class _Place(Enum):
    """The kind of the next text."""

    START = auto()
    THOUGHTS = auto()
    GAP = auto()  # the line ends between the thoughts and the answer
    ANSWER = auto()


class ThoughtParser(HeldText):
    """Splits an answer into thoughts and the rest, which is given to another parser.

    Thoughts begin with `<think>` at the start of the answer, or at once with `is_thinking`, because the prompt ends
    with that mark. Line ends beside the marks are dropped. Thoughts that do not end are thoughts up to the end. If the
    text is cut within a mark, the beginning of the mark is dropped.
    """

    def __init__(self, rest: AnswerParser | None, *, is_thinking: bool, shows_thoughts: bool = True) -> None:
        super().__init__()
        self._rest = rest
        self._shows_thoughts = shows_thoughts
        self._place = _Place.THOUGHTS if is_thinking else _Place.START
        self._is_blank = True  # no thought has been shown

    def finish(self, ending: Ending) -> list[AnswerEvent]:
        """Return the rest of what was held back, because no more text comes."""
        events = super().finish(ending)
        return events if self._rest is None else events + self._rest.finish(ending)

    def _advance(self) -> bool:
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.THOUGHTS:
                return self._think()
            case _Place.GAP:
                self._text = self._text.lstrip("\n")
                if not self._text:
                    return False
                self._place = _Place.ANSWER
                return True
            case _Place.ANSWER:
                text, self._text = self._text, ""
                if text:
                    self._events += [ContentPart(text)] if self._rest is None else self._rest.feed(text)
                return False

    def _start(self) -> bool:
        rest = self._text.lstrip()
        if not self._is_end and THINK.startswith(rest):  # also if nothing but white space has come
            if rest == THINK:
                self._text, self._place = "", _Place.THOUGHTS
            return False
        if self._is_end and THINK.startswith(rest) and self._ending.hides(rest, THINK):
            self._text = ""
        has_thoughts = rest.startswith(THINK)
        self._text = rest[len(THINK) :] if has_thoughts else self._text
        self._place = _Place.THOUGHTS if has_thoughts else _Place.ANSWER
        return True

    def _think(self) -> bool:
        text = self._text.lstrip("\n") if self._is_blank else self._text
        end = text.find(END_THINK)
        if end >= 0:
            self._show(text[:end].rstrip("\n"))
            self._text, self._place = text[end + len(END_THINK) :], _Place.GAP
            return True
        held = held_prefix(text, END_THINK)
        if self._is_end and not self._ending.hides(text[len(text) - held :], END_THINK):
            sure = text
        else:
            sure = text[: len(text) - held].rstrip("\n")
        self._show(sure)
        self._text = "" if self._is_end else text[len(sure) :]
        return False

    def _show(self, text: str) -> None:
        if text:
            self._is_blank = False
            if self._shows_thoughts:
                self._events.append(ThoughtPart(text))
