"""Text of an answer that a parser has not taken, because the next piece may change its meaning."""

from abc import ABC, abstractmethod

from tiercel.server.text.answer.event import COMPLETE, AnswerEvent, Ending


class HeldText(ABC):
    """The base of the parsers of answers: it keeps text until a parser takes it.

    A parser implements `_advance`, which takes text from `_text` and adds the parts of the answer to `_events`.
    """

    def __init__(self) -> None:
        self._text: str = ""  # that has not been taken
        self._is_end = False  # no more text comes
        self._ending = COMPLETE  # then
        self._events: list[AnswerEvent] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next text; return the parts that are certain."""
        self._text += text
        while self._advance():
            pass
        events, self._events = self._events, []
        return events

    def finish(self, ending: Ending) -> list[AnswerEvent]:
        """Return the rest of what was held back, because no more text comes."""
        self._is_end, self._ending = True, ending
        return self.feed("")

    @abstractmethod
    def _advance(self) -> bool:
        """Take some text. Return False if more text is needed."""
