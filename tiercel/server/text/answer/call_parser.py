"""Calls of functions in the text of an answer, in any of the formats of `formats`."""

from collections.abc import Collection
from enum import Enum, auto

from tiercel.server.text.answer.call_object import CallObject, CallState
from tiercel.server.text.answer.event import (
    CallArguments,
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
    RUBBISH = auto()  # behind the place where arguments turned out to be no JSON
    BETWEEN = auto()  # behind a call of a list
    CLOSE = auto()  # behind a call that is in no list, or behind a list


class CallParser(HeldText):
    """Splits text into content and calls.

    Anything that is no call of one of `names` is content. White space beside calls is dropped, and so are calls behind
    the first `max_calls`. A call begins when its function is known and its arguments have begun; from there on it stays
    a call, so that nothing of a stream is taken back.

    If the text is cut, what may still have become a call is not content: a call whose function is known has begun,
    and the rest is dropped. So is the rest of an answer that ends by itself behind a call and what announces the next
    one: the comma of a list, or the separator.
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
        self._is_announced = False  # by what follows a call, not by an opening mark
        self._call: CallObject | None = None
        self._num_begun = 0
        self._has_begun = False  # the present call
        self._is_shown = False  # it is not dropped
        self._swallows_closing = False  # a closing mark that follows is that of a call

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
            case _Place.RUBBISH:
                return self._read_rubbish()
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
        text, mark = self._text, self._next_mark()
        place = text.find(mark) if mark else -1
        if place >= 0:
            before = text[:place]
            is_dropped = self._is_blank and not before.strip()
            if not is_dropped:
                self._show(before)
            self._text = text[place + len(mark) :]
            if mark == self._form.opening:
                self._lead, self._place = (before if is_dropped else "") + mark, _Place.OPEN
                self._is_announced = False
            self._swallows_closing = False
            return True
        sure = self._sure_letters(text)
        if self._is_blank and not text[:sure].strip():
            if self._is_end:
                if not self._num_begun and self._ending.following is not None:
                    self._show(text[:sure])
                self._text = ""
            return False
        self._show(text[:sure])
        self._text = "" if self._is_end else text[sure:]
        return False

    def _next_mark(self) -> str:
        """Return the mark that comes first in the text; the opening one if there is none."""
        opening, closing = self._form.opening, self._form.closing
        if not (closing and self._swallows_closing):
            return opening
        places = [(place, mark) for mark in (opening, closing) if (place := self._text.find(mark)) >= 0]
        return min(places)[1] if places else opening

    def _sure_letters(self, text: str) -> int:
        """Return the number of characters before those that may become a mark."""
        marks = [self._form.opening, self._form.closing if self._swallows_closing else ""]
        held = {mark: held_prefix(text, mark) for mark in marks if mark}
        if self._is_end:
            held = {mark: n for mark, n in held.items() if self._ending.hides(text[len(text) - n :], mark)}
        return len(text) - max(held.values(), default=0)

    def _open(self) -> bool:
        self._skip_space()
        if not self._text:
            return self._end_early() if self._is_end else False
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
        if end < 0 and len(self._text) <= _MAX_HEAD:
            return self._end_early(self._name_in(self._text)) if self._is_end else False
        head = self._text[: max(end, 0)]
        name = head.partition("[")[0].strip()
        if end > _MAX_HEAD or name not in self._names:
            return self._give_back()
        self._lead, self._text = self._lead + head, self._text[end:]
        self._call, self._place = CallObject(self._names, name), _Place.CALL
        return True

    def _name_in(self, head: str) -> str | None:
        """Return the name of a function before an unfinished mark; None if it may be that of another function."""
        name, mark, _ = head.partition("[")
        return name.strip() if mark and name.strip() in self._names else None

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None  # in this place there is one
        self._text = self._text[call.feed(self._text) :]
        if call.is_started:
            self._begin(call.name or "")
            self._add_arguments(call.take_fresh())
        if call.state is CallState.OPEN:
            if not self._is_end:
                return False
            if not self._has_begun:
                return self._end_early(call.name)
        if call.state is CallState.BROKEN:
            if not self._has_begun:
                return self._give_back()
            if call.is_in_arguments:
                self._place = _Place.RUBBISH
                return True
            self._text, self._swallows_closing = call.raw + self._text, True
        is_list = self._is_list and call.state is CallState.DONE
        self._end(is_complete=call.has_object)
        self._is_list = is_list
        if call.state is CallState.DONE:
            self._place = _Place.BETWEEN if is_list else _Place.CLOSE
        return True

    def _read_rubbish(self) -> bool:
        """Add what the model wrote up to the next mark to the arguments that it wrote in no JSON."""
        self._swallows_closing = True
        mark = self._next_mark()
        place = self._text.find(mark) if mark else -1
        sure = place if place >= 0 else self._sure_letters(self._text)
        self._add_arguments(self._text[:sure])
        self._text = self._text[sure:] if place >= 0 or not self._is_end else ""
        if place < 0 and not self._is_end:
            return False
        self._end(is_complete=False)
        return True

    def _begin(self, name: str) -> None:
        """Begin the present call, unless it has."""
        if not self._has_begun:
            self._has_begun = True
            self._is_shown = self._max_calls is None or self._num_begun < self._max_calls
            self._num_begun += 1
            if self._is_shown:
                self._events.append(CallStart(self._num_begun - 1, name))

    def _add_arguments(self, text: str) -> None:
        if text and self._is_shown:
            self._events.append(CallArguments(self._num_begun - 1, text))

    def _end(self, *, is_complete: bool) -> None:
        """End the present call, which has begun. Text follows."""
        if self._is_shown:
            self._events.append(CallEnd(self._num_begun - 1, is_complete))
        self._call, self._has_begun, self._lead, self._is_list = None, False, "", False
        self._place, self._is_blank = _Place.TEXT, True

    def _read_between(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        mark = self._text[0]
        if mark not in ",]":
            return self._give_back()
        self._text = self._text[1:]
        if mark == ",":
            self._lead, self._place, self._is_announced = self._lead + mark, _Place.OPEN, True
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
        elif closing and closing.startswith(self._text) and self._ending.hides(self._text, closing):
            self._text, self._lead = "", ""
        elif separator and self._text.startswith(separator):
            self._text, self._lead = self._text[len(separator) :], self._lead + separator
            self._place, self._is_announced = _Place.OPEN, True
            return True
        else:
            self._text, self._lead, self._swallows_closing = self._lead + self._text, "", True
        self._place, self._is_blank = _Place.TEXT, True
        return True

    def _give_back(self) -> bool:
        """Give what was taken since the opening mark back as content: no call follows."""
        self._show(self._lead + ("" if self._call is None else self._call.raw))
        self._call, self._lead, self._is_list, self._place = None, "", False, _Place.TEXT
        return True

    def _end_early(self, name: str | None = None) -> bool:
        """End the text within a call whose arguments have not begun: `name` is that of its function, if it is known.

        If the model ended the answer here, the text is no call, and content unless another call has announced it.
        """
        if not self._ending.is_cut:
            if not self._is_announced:
                return self._give_back()
            name = None
        self._text = ""
        if name is not None:
            self._begin(name)
            self._end(is_complete=False)
        self._call, self._lead, self._is_list, self._place = None, "", False, _Place.TEXT
        self._is_blank = True
        return True

    def _skip_space(self) -> None:
        rest = self._text.lstrip()
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _show(self, text: str) -> None:
        self._is_blank = False
        if text:
            self._events.append(ContentPart(text))
