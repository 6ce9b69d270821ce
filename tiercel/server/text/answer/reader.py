"""The parsers of the answers to one request."""

from collections.abc import Collection

from tiercel.server.text.answer.call_parser import CallParser
from tiercel.server.text.answer.event import AnswerParser
from tiercel.server.text.answer.formats import FORMATS, CallFormat
from tiercel.server.text.answer.thoughts import END_THINK, THINK, ThoughtParser


class AnswerReader:
    """Makes the parsers of the choices of one request.

    `form` is None if calls are not looked for. `begin` must be called with the prompt before the first parser is made.
    """

    def __init__(
        self,
        form: CallFormat | None = None,
        names: Collection[str] = (),
        max_calls: int | None = None,
        *,
        has_thoughts: bool = False,
        starts_thinking: bool = False,
        shows_thoughts: bool = True,
    ) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._has_thoughts = has_thoughts
        self._starts_thinking = starts_thinking
        self._shows_thoughts = shows_thoughts
        self._is_thinking = starts_thinking

    def begin(self, prompt: str) -> None:
        """Take the prompt. If it ends within thoughts, so does the answer begin; if it ends them, there are none."""
        end = prompt.rstrip()
        self._is_thinking = end.endswith(THINK) or (self._starts_thinking and not end.endswith(END_THINK))
        if end.endswith(END_THINK):
            self._has_thoughts = False

    def drop_thoughts(self) -> None:
        """Expect no thoughts: the whole answer has a form that the client has given."""
        self._has_thoughts = False

    @property
    def form(self) -> CallFormat | None:
        """The format of the calls; None if calls are not looked for."""
        return self._form

    @property
    def is_plain(self) -> bool:
        """True if an answer has no parts: all of it is content."""
        return self._form is None and not self._has_thoughts

    @property
    def may_think(self) -> bool:
        """True if an answer may begin with thoughts."""
        return self._has_thoughts

    @property
    def is_thinking(self) -> bool:
        """True if an answer begins within thoughts."""
        return self._has_thoughts and self._is_thinking

    @property
    def marks(self) -> frozenset[str]:
        """The texts that parsers look for. Where they are special tokens, they are text all the same."""
        of_calls = self._form.marks if self._form is not None else frozenset[str]()
        return of_calls | ({THINK, END_THINK} if self._has_thoughts else frozenset[str]())

    def parser(self) -> AnswerParser | None:
        """Return the parser of one answer; None if all of it is content."""
        calls = None if self._form is None else CallParser(self._form, self._names, self._max_calls)
        if not self._has_thoughts:
            return calls
        return ThoughtParser(calls, is_thinking=self._is_thinking, shows_thoughts=self._shows_thoughts)


READ_MARKS = frozenset({THINK, END_THINK}).union(*(form.marks for form in FORMATS.values()))
"""The marks of all parsers."""

PLAIN = AnswerReader()
"""All of an answer is content."""
