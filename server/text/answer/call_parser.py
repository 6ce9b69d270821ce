"""Calls of functions in the text of an answer, in any of the formats of `formats`."""

from collections.abc import Collection
from enum import Enum, auto

from tiercel.server.text.answer.call_object import CallObject, CallState
from tiercel.server.text.answer.event import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    ContentPart,
    held_prefix,
)
from tiercel.server.text.answer.formats import CallFormat
from tiercel.server.text.answer.held_text import HeldText

_MAX_HEAD = 512  # letters between the opening mark and the arguments, in formats that write the name there


class _Place(Enum):
    """The kind of the next text."""

    START = auto()  # the start of the answer, where a format may have calls without a mark
    TEXT = auto()
    OPEN = auto()  # behind an opening mark
    HEAD = auto()  # a name, up to the arguments
    CALL = auto()
    BETWEEN = auto()  # behind a call of a list
    CLOSE = auto()  # behind a call that is in no list, or behind a list


class CallParser(HeldText):
    """Splits text into content and calls.

    A call of a function that is not one of `names`, and anything that is not exactly a call, is content. White space
    beside calls is dropped. A call that is unfinished at the end is content. Calls behind the first `max_calls` are
    dropped.
    """

    def __init__(self, form: CallFormat, names: Collection[str], max_calls: int | None = None) -> None:
        super().__init__()
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._place = _Place.START if form.starts_bare else _Place.TEXT
        self._lead: str = ""  # taken since the opening mark: given back if no call follows
        self._is_blank = True  # nothing but white space since the start or the last call
        self._is_list = False
        self._call: CallObject | None = None
        self._num_started = 0
        self._num_ended = 0

    def _advance(self) -> bool:
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.TEXT:
                return self._scan_text()
            case _Place.OPEN:
                return self._open()
            case _Place.HEAD:
                return self._read_head()
            case _Place.CALL:
                return self._read_call()
            case _Place.BETWEEN:
                return self._read_between()
            case _Place.CLOSE:
                return self._close()

    def _start(self) -> bool:
        rest = self._text.lstrip()
        if not rest and not self._is_end:
            return False
        is_call = rest.startswith("{") or (self._form.has_lists and rest.startswith("["))
        self._place = _Place.OPEN if is_call else _Place.TEXT
        return True

    def _scan_text(self) -> bool:
        text, mark = self._text, self._form.opening
        place = text.find(mark) if mark else -1
        if place >= 0:
            before = text[:place]
            is_dropped = self._is_blank and not before.strip()
            if not is_dropped:
                self._show(before)
            self._lead = (before if is_dropped else "") + mark
            self._text = text[place + len(mark) :]
            self._place = _Place.OPEN
            return True
        sure = len(text) if self._is_end or not mark else len(text) - held_prefix(text, mark)
        if self._is_blank and not text[:sure].strip():
            if self._is_end:
                if not self._num_ended:
                    self._show(text)
                self._text = ""
            return False
        self._show(text[:sure])
        self._text = text[sure:]
        return False

    def _open(self) -> bool:
        self._skip_space()
        if not self._text:
            return self._give_back() if self._is_end else False
        mark = self._text[0]
        if mark == "{":
            self._call, self._place = CallObject(self._names), _Place.CALL
        elif mark == "[" and self._form.has_lists and not self._is_list:
            self._lead, self._text, self._is_list = self._lead + mark, self._text[1:], True
        elif self._form.has_heads and not self._is_list:
            self._place = _Place.HEAD
        else:
            return self._give_back()
        return True

    def _read_head(self) -> bool:
        end = self._text.find("{")
        if end < 0 and len(self._text) <= _MAX_HEAD and not self._is_end:
            return False
        head = self._text[: max(end, 0)]
        name = head.partition("[")[0].strip()
        if end > _MAX_HEAD or name not in self._names:
            return self._give_back()
        self._lead, self._text = self._lead + head, self._text[end:]
        self._call, self._place = CallObject(self._names, name), _Place.CALL
        return True

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None  # in this place there is one
        was_started = call.is_started
        self._text = self._text[call.feed(self._text) :]
        if call.state is CallState.BROKEN or (call.state is CallState.OPEN and self._is_end):
            return self._break(call, was_started=was_started)
        is_shown = self._max_calls is None or self._num_ended < self._max_calls
        if is_shown and call.is_started and call.name is not None:
            if not was_started:
                self._events.append(CallStart(self._num_started, call.name))
                self._num_started += 1
            fresh = call.take_fresh()
            if fresh:
                self._events.append(CallArguments(self._num_started - 1, fresh))
        if call.state is CallState.OPEN:
            return False
        if is_shown:
            self._events.append(CallEnd(self._num_started - 1))
        self._num_ended += 1
        self._call, self._lead = None, ""
        self._place = _Place.BETWEEN if self._is_list else _Place.CLOSE
        return True

    def _read_between(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        mark = self._text[0]
        if mark not in ",]":
            return self._give_back()
        self._text = self._text[1:]
        if mark == ",":
            self._lead, self._place = self._lead + mark, _Place.OPEN
        else:
            self._lead, self._is_list, self._place = "", False, _Place.CLOSE
        return True

    def _close(self) -> bool:
        self._skip_space()
        closing, separator = self._form.closing, self._form.separator
        if not self._text:
            return False
        if closing and self._text.startswith(closing):
            self._text, self._lead = self._text[len(closing) :], ""
        elif closing and closing.startswith(self._text) and not self._is_end:
            return False
        elif separator and self._text.startswith(separator):
            self._text, self._lead = self._text[len(separator) :], self._lead + separator
            self._place = _Place.OPEN
            return True
        else:
            self._text, self._lead = self._lead + self._text, ""
        self._place, self._is_blank = _Place.TEXT, True
        return True

    def _break(self, call: CallObject, *, was_started: bool) -> bool:
        """Give all text of a call back as content."""
        raw = self._lead + call.raw
        is_shown = self._max_calls is None or self._num_ended < self._max_calls
        if was_started and is_shown:
            self._is_blank = False
            self._events.append(CallBroken(self._num_started - 1, raw))
        else:
            self._show(raw)
        self._lead, self._call, self._is_list, self._place = "", None, False, _Place.TEXT
        return True

    def _give_back(self) -> bool:
        """Give the opening mark back as content: no call follows."""
        self._show(self._lead)
        self._lead, self._is_list, self._place = "", False, _Place.TEXT
        return True

    def _skip_space(self) -> None:
        rest = self._text.lstrip()
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _show(self, text: str) -> None:
        self._is_blank = False
        if text:
            self._events.append(ContentPart(text))
