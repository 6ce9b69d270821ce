"""The end of a JSON value in a text that arrives in pieces."""

import re

MAX_DEPTH = 64

_BRACKETS = re.compile(r'["{}\[\]]|[^A-Za-z0-9 \t\r\n:,+.-]')  # or a character that JSON has in strings only
_STRING_MARKS = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_CLOSERS = {"{": "}", "[": "]"}


class ValueScanner:
    """Finds the end of a JSON value.

    Brackets must match and are at most MAX_DEPTH deep, and characters that JSON has in strings only are in strings;
    nothing else is checked. Each character is looked at once.
    """

    __slots__ = ("_closers", "_is_escaped", "_is_in_string", "_is_scalar", "bad_at", "first", "is_bad")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self._is_scalar = False
        self.first = ""  # the first character of the value; "" before it
        self.is_bad = False
        self.bad_at = 0  # position of the first character that cannot be, in the text that was scanned last

    def scan(self, text: str, start: int) -> int | None:
        """Return the position behind the value in `text`, or None if the value goes on behind it.

        `start` is the position of the next character of the value. Check `is_bad` if None is returned.
        """
        position = start
        if not self.first and position < len(text):
            self.first = text[position]
            self._is_scalar = self.first not in '"{['
        if self._is_scalar:
            end = _SCALAR_END.search(text, position)
            return None if end is None else end.start()
        while position < len(text):
            if self._is_in_string:
                position = self._scan_string(text, position)
            else:
                mark = _BRACKETS.search(text, position)
                if mark is None:
                    return None
                position = mark.end()
                self._take(mark.group())
            if self.is_bad:
                self.bad_at = position - 1
                return None
            if not self._closers and not self._is_in_string:
                return position
        return None

    def _scan_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        mark = _STRING_MARKS.search(text, position)
        if mark is None:
            return len(text)
        self._is_escaped = mark.group() == "\\"
        self._is_in_string = self._is_escaped
        return mark.end()

    def _take(self, mark: str) -> None:
        if mark == '"':
            self._is_in_string = True
        elif mark in _CLOSERS:
            self._closers.append(_CLOSERS[mark])
            self.is_bad = len(self._closers) > MAX_DEPTH
        elif mark not in "}]" or not self._closers or self._closers.pop() != mark:
            self.is_bad = True
