"""One call of a function, written as JSON, read as it arrives."""

from collections.abc import Collection
from enum import Enum, auto

import msgspec

from tiercel.server.text.answer.json_value import ValueScanner

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")
_SPACE = " \t\r\n"


class CallState(Enum):
    """The progress of a call."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


class _Place(Enum):
    """The place in the object before the next character."""

    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallObject:
    """Reads `{"name": ..., "arguments": {...}}`, with the keys in any order and `parameters` as another name.

    With `name` given, the text is the arguments alone. `fresh` are the pieces of the arguments that have not been taken
    yet; there are none before the name is known. Where the object turns out to be no call does not depend on the cuts
    between the pieces of the text.
    """

    __slots__ = (
        *("_has_arguments", "_held", "_is_bare", "_key", "_names", "_place", "_raw", "_scanner", "_value"),
        *("fresh", "has_object", "name", "state"),
    )

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        self._names = names
        self._is_bare = name is not None
        self._raw: list[str] = []
        self._place = _Place.START if name is None else _Place.VALUE
        self._key = "" if name is None else _ARGUMENTS[0]
        self._scanner = ValueScanner()
        self._value: list[str] = []  # of the present key or value
        self._has_arguments = False
        self._held: list[str] = []  # pieces of the arguments before the name is known
        self.name = name
        self.fresh: list[str] = []
        self.has_object = False  # the arguments are over, and are a JSON object
        self.state = CallState.OPEN

    @property
    def raw(self) -> str:
        """The text that was taken; if the call is started, only the text behind its arguments and its name."""
        return "".join(self._raw)

    @property
    def is_in_arguments(self) -> bool:
        """True if the text that was taken ends within the arguments."""
        return self._place is _Place.VALUE and self._key in _ARGUMENTS and self._has_arguments

    @property
    def is_started(self) -> bool:
        """True when the name is known and the arguments have begun."""
        return self.name is not None and self._has_arguments

    def take_fresh(self) -> str:
        """Return the next text of the arguments."""
        fresh, self.fresh = "".join(self.fresh), []
        return fresh

    def feed(self, text: str) -> int:
        """Take text up to the end of the call. Return the number of characters taken, fewer if the call has ended."""
        position = start = 0
        while position < len(text) and self.state is CallState.OPEN:
            was_value = self._place is _Place.VALUE
            if self._place is _Place.VALUE:
                position = self._feed_value(text, position)
            elif self._place is _Place.KEY and (self._scanner.first or text[position] == '"'):
                position = self._feed_key(text, position)
            else:
                position += self._feed_mark(text[position])
            if was_value and self.is_started:
                self._raw.clear()
                start = position
        self._raw.append(text[start:position])
        return position

    def _feed_mark(self, mark: str) -> bool:
        """Return whether the mark belongs to the call."""
        if mark in _SPACE:
            return True
        match self._place, mark:
            case _Place.START, "{":
                self._place = _Place.KEY
            case _Place.COLON, ":":
                self._place, self._scanner = _Place.VALUE, ValueScanner()
            case _Place.COMMA_OR_END, ",":
                self._place, self._scanner = _Place.KEY, ValueScanner()
            case _Place.COMMA_OR_END, "}" if self.name is not None and self._has_arguments:
                self.state = CallState.DONE
            case _:
                self.state = CallState.BROKEN
        return self.state is not CallState.BROKEN

    def _feed_key(self, text: str, position: int) -> int:
        end = self._scanner.scan(text, position)
        self._value.append(text[position : len(text) if end is None else end])
        if end is None:
            return len(text)
        key = _decoded(self._take_value())
        is_known = key in (_NAME, *_ARGUMENTS, *_OTHERS)
        is_twice = (key == _NAME and self.name is not None) or (key in _ARGUMENTS and self._has_arguments)
        if not is_known or is_twice:
            self.state = CallState.BROKEN
        self._key, self._place = str(key), _Place.COLON
        return end

    def _feed_value(self, text: str, position: int) -> int:
        if not self._scanner.first:
            if text[position] in _SPACE:
                return position + 1
            if not self._may_begin(text[position]):
                self.state = CallState.BROKEN
                return position
        end = self._scanner.scan(text, position)
        stop = len(text) if end is None else end
        if self._scanner.is_bad:
            self.state, stop = CallState.BROKEN, self._scanner.bad_at
        self._value.append(text[position:stop])
        if self._key in _ARGUMENTS and self._scanner.first == "{":
            self._add_arguments(text[position:stop])
        if end is not None:
            self._end_value()
        return stop

    def _may_begin(self, mark: str) -> bool:
        if self._key == _NAME:
            return mark == '"'
        return mark in '{"' if self._key in _ARGUMENTS else True

    def _add_arguments(self, piece: str) -> None:
        self._has_arguments = True
        if piece:
            (self._held if self.name is None else self.fresh).append(piece)

    def _end_value(self) -> None:
        text = self._take_value()
        value = _decoded(text)
        self._place = _Place.COMMA_OR_END
        if self._key == _NAME:
            if not isinstance(value, str) or value not in self._names:
                self.state = CallState.BROKEN
                return
            self.name = value
            self.fresh, self._held = self._held, []
        elif self._key in _ARGUMENTS:
            if isinstance(value, str):  # a JSON object written as a string
                self.has_object = isinstance(_decoded(value), dict)
                if self.has_object:
                    self._add_arguments(value)
            else:
                self.has_object = isinstance(value, dict)
            if not self.has_object and not self.is_started:
                self.state = CallState.BROKEN
            elif self._is_bare:
                self.state = CallState.DONE
        elif value is _INVALID:
            self.state = CallState.BROKEN

    def _take_value(self) -> str:
        value, self._value = "".join(self._value), []
        return value


class _Invalid:
    """Not JSON."""


_INVALID = _Invalid()


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _INVALID
