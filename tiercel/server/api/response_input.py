"""The conversation that a request of the responses API stands for: counted when the request is read, decoded later."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from tiercel.server.api.expansion import check_expansion
from tiercel.server.api.response_items import chat_messages
from tiercel.server.api.schemas.chat import MessageFields, placed
from tiercel.server.api.schemas.fields import MAX_MESSAGES, Fields, read_fields
from tiercel.server.api.schemas.unsupported import refuse_unsupported_in_messages
from tiercel.server.api.stored_items import Item, StoredItem, decode_item, encode_item
from tiercel.server.api.stored_response import MAX_CONVERSATION, StoredTurn
from tiercel.server.http.watch import ClientGoneError
from tiercel.values.errors import AdmissionError

_MAX_LETTER_BYTES = 4
_MESSAGE_BYTES = 2048  # of a message as an object, beside its texts


class _MessageList(Fields):
    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES)]


class ResponseInput:
    """The items before and in a request. Stored ones are decoded by a worker, one after the other and each once.

    `limit_bytes` is that of a body: what the request refers to may be as large as what it could send. With `truncates`
    the oldest turns that do not fit are left out, those beyond this limit and those that cannot fit into the context as
    `may_fit` judges a number of characters; they are neither counted nor decoded.
    """

    def __init__(
        self,
        parent: StoredTurn | None,
        items: Sequence[Item | StoredItem],
        instructions: str | None,
        *,
        truncates: bool,
        limit_bytes: int,
        may_fit: Callable[[int], bool] = lambda _letters: True,
        earlier_field: str = "previous_response_id",
    ) -> None:
        """`earlier_field` refers to `parent`.

        Errors: AdmissionError (413, or 400 for too many items) naming the field and the limit.
        """
        self._items = items
        self._instructions = instructions
        self._truncates = truncates
        self._earlier_field = earlier_field
        self._is_abandoned = False
        referred = [item for item in items if isinstance(item, StoredItem)]
        referred_bytes = _num_bytes(referred)
        check_expansion("input", "the stored items that it refers to", referred_bytes, limit_bytes)
        earlier: list[StoredItem] = []
        if parent is not None:
            needs_question = not any(map(_opens_turn, items))
            before = _Earlier(parent, earlier_field, limit_bytes)
            earlier = before.items(limit_bytes - referred_bytes, truncates=truncates, needs_question=needs_question)
        self._entries: list[Item | StoredItem] = [*earlier, *items]
        self._num_before = len(earlier)
        if truncates:
            self._entries, num_dropped = _possible(self._entries, may_fit)
            self._num_before = max(0, self._num_before - num_dropped)
        self._own_encoded: list[StoredItem] | None = None

    @property
    def expanded_bytes(self) -> int:
        """The memory of the stored items as messages, those several times that are there several times."""
        stored = [entry for entry in self._entries if isinstance(entry, StoredItem)]
        return sum(item.decoded_bytes for item in stored) + _MESSAGE_BYTES * len(stored)

    @property
    def head_bytes(self) -> int:
        """The memory of the instructions, which the response repeats."""
        return _MAX_LETTER_BYTES * len(self._instructions or "")

    def abandon(self) -> None:
        """Make `messages` end with the item that it is reading: nobody waits for it any more."""
        self._is_abandoned = True

    @property
    def least_letters(self) -> int:
        """The characters of the stored items' texts, or fewer. Cost: an addition for each item."""
        return sum(map(_num_letters, self._entries))

    def messages(self) -> list[MessageFields]:
        """Return the messages of the conversation. For workers. Errors: AdmissionError (400); ClientGoneError."""
        messages = chat_messages(self._decoded(), self._instructions, self._num_before, self._earlier_field)
        if self._truncates and len(messages) > MAX_MESSAGES:
            messages = _without_oldest(messages, MAX_MESSAGES)
        if not messages:  # neither input nor anything else: templates need a message
            messages = [{"role": "user", "content": "", "place": "input"}]
        places = [str(message.pop("place")) for message in messages]
        body: dict[str, object] = {"messages": messages}
        refuse_unsupported_in_messages(body)
        return placed(read_fields(_MessageList, body).messages, places)

    def encode(self) -> None:
        """Encode the items of the request for the store. For workers."""
        self._own_encoded = [item if isinstance(item, StoredItem) else encode_item(item) for item in self._items]

    @property
    def encoded(self) -> Sequence[StoredItem]:
        """The items of the request as they are stored, after `encode`."""
        assert self._own_encoded is not None
        return self._own_encoded

    def _decoded(self) -> Iterator[Item]:
        uses = Counter(entry for entry in self._entries if isinstance(entry, StoredItem))
        known: dict[StoredItem, Item] = {}  # those that come again
        for entry in self._entries:
            if not isinstance(entry, StoredItem):
                yield entry
                continue
            if self._is_abandoned:
                raise ClientGoneError
            item = known.get(entry)
            if item is None:
                item = decode_item(entry)
            if uses[entry] > 1:
                known[entry] = item
            yield item


class _Earlier:
    """The conversation before a request, which `field` refers to."""

    def __init__(self, parent: StoredTurn, field: str, limit_bytes: int) -> None:
        self._parent = parent
        self._field = field
        self._limit_bytes = limit_bytes  # of all that the request refers to

    def items(self, room_bytes: int, *, truncates: bool, needs_question: bool) -> list[StoredItem]:
        """Return the stored items before a request, in order. Errors: AdmissionError (413 or 400)."""
        parent = self._parent
        if parent.item_bytes <= room_bytes and parent.length <= MAX_CONVERSATION:
            return [item for turn in reversed(list(parent.backwards())) for item in (*turn.input, *turn.output)]
        if truncates:
            return self._latest(room_bytes, needs_question=needs_question)
        if parent.length > MAX_CONVERSATION:
            raise self._too_many()
        used = self._limit_bytes - room_bytes
        meaning = "its conversation" if not used else "its conversation and the stored items that input refers to"
        self._check(meaning, parent.item_bytes + used)
        raise AssertionError("the conversation fits")

    def _latest(self, room_bytes: int, *, needs_question: bool) -> list[StoredItem]:
        """Return the items before the first turn, and those of as many of the latest turns as fit.

        With `needs_question` the last turn must be there, because the request goes on in it.
        """
        opening = self._opening()
        places = MAX_CONVERSATION - len(opening)
        room_bytes -= _num_bytes(opening)
        self._check("the beginning of its conversation", self._limit_bytes - room_bytes)
        latest: list[StoredItem] = []  # the last one first
        pending: list[StoredItem] = []  # of a turn whose beginning has not been reached
        for item in _backwards(self._parent):
            pending.append(item)
            room_bytes -= len(item.encoded)
            places -= 1
            if room_bytes < 0 or places < 0:
                break
            if item.opens_turn:
                latest += pending
                pending = []
        if needs_question and not latest:
            self._check("the last turn of its conversation", self._limit_bytes - room_bytes)
            raise self._too_many()
        return [*opening, *reversed(latest)]

    def _opening(self) -> list[StoredItem]:
        """Return the items before the first turn. Errors: AdmissionError (400) if they are too many."""
        first = self._parent.first_asked
        beginning = self._parent if first is None else first
        if beginning.length > MAX_CONVERSATION:
            raise self._too_many()
        opening: list[StoredItem] = []
        for turn in reversed(list(beginning.backwards())):
            for item in (*turn.input, *turn.output):
                if item.opens_turn:
                    return opening
                opening.append(item)
        return opening

    def _check(self, meaning: str, num_bytes: int) -> None:
        check_expansion(self._field, meaning, num_bytes, self._limit_bytes)

    def _too_many(self) -> AdmissionError:
        return AdmissionError(
            400,
            f"{self._field}: its conversation has more than {MAX_CONVERSATION} items. Please set truncation to auto, or"
            " send the latest part of the conversation as input.",
            param=self._field,
        )


def _possible(entries: list[Item | StoredItem], may_fit: Callable[[int], bool]) -> tuple[list[Item | StoredItem], int]:
    """Return the items without the oldest turns that cannot fit, and how many items that leaves out.

    Items before the first turn, the last turn, and what the request itself has sent stay.
    """
    starts = [index for index, entry in enumerate(entries) if _opens_turn(entry)]
    letters = sum(map(_num_letters, entries))
    keeps_from = starts[0] if starts else 0
    for begin, end in pairwise(starts):
        turn = entries[begin:end]
        if may_fit(letters) or not all(isinstance(entry, StoredItem) for entry in turn):
            break
        letters -= sum(map(_num_letters, turn))
        keeps_from = end
    if not starts or keeps_from == starts[0]:
        return entries, 0
    return [*entries[: starts[0]], *entries[keeps_from:]], keeps_from - starts[0]


def _num_letters(item: Item | StoredItem) -> int:
    return item.num_letters if isinstance(item, StoredItem) else 0


def _backwards(parent: StoredTurn) -> Iterator[StoredItem]:
    for turn in parent.backwards():
        yield from reversed((*turn.input, *turn.output))


def _without_oldest(messages: list[dict[str, object]], most: int) -> list[dict[str, object]]:
    """Return at most so many messages: those before the first turn, and the latest turns."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"] or [0]
    opening = starts[0]
    start = next((one for one in starts if opening + len(messages) - one <= most), starts[-1])
    return [*messages[:opening], *messages[start:]]


def _opens_turn(item: Item | StoredItem) -> bool:
    if isinstance(item, StoredItem):
        return item.opens_turn
    return item["type"] == "message" and item["role"] == "user"


def _num_bytes(items: Iterable[StoredItem]) -> int:
    return sum(len(item.encoded) for item in items)
