"""The output items of a response as they grow, and the events of their growth."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from tiercel.server.api.replies.chat import ChatToken
from tiercel.server.api.replies.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from tiercel.server.api.replies.responses import (
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: dict[Kind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class ItemWriter:
    """The items of one response. Items follow each other: one begins when another kind of output comes.

    `number` returns the number of the next event.
    """

    __slots__ = ("_call_id", "_id", "_kind", "_name", "_new_id", "_number", "_text", "items")

    def __init__(self, number: Callable[[], int], new_id: Callable[[str], str]) -> None:
        self._number = number
        self._new_id = new_id
        self._kind: Kind | None = None  # of the open item
        self._id = self._name = self._call_id = ""
        self._text = bytearray()  # of the open item; a text of many small strings would take several times as much
        self.items: list[OutputItem] = []  # that are complete

    def text(self, delta: str, logprobs: Sequence[ChatToken]) -> Iterator[ResponseEvent]:
        """Add text of the answer, and yield the events."""
        yield from self._open("message")
        self._text += delta.encode()
        if delta or logprobs:
            yield OutputTextDelta(
                sequence_number=self._number(),
                output_index=len(self.items),
                item_id=self._id,
                content_index=0,
                delta=delta,
                logprobs=list(logprobs),
            )

    def thoughts(self, delta: str) -> Iterator[ResponseEvent]:
        """Add thoughts, and yield the events."""
        yield from self._open("reasoning")
        self._text += delta.encode()
        yield ReasoningTextDelta(
            sequence_number=self._number(),
            output_index=len(self.items),
            item_id=self._id,
            content_index=0,
            delta=delta,
        )

    def call(self, name: str, call_id: str) -> Iterator[ResponseEvent]:
        """Begin a call, and yield the events."""
        yield from self.close("completed")
        self._name, self._call_id = name, call_id
        yield from self._open("function_call")

    def arguments(self, delta: str) -> Iterator[ResponseEvent]:
        """Add text to the arguments of the call that began last, and yield the events."""
        self._text += delta.encode()
        yield ArgumentsDelta(
            sequence_number=self._number(), output_index=len(self.items), item_id=self._id, delta=delta
        )

    def close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the open item, if there is one, and yield the events."""
        if self._kind is None:
            return
        item, text, index, id = self._item(status), self._text.decode(), len(self.items), self._id
        self.items.append(item)
        match item:
            case OutputMessage():
                yield OutputTextDone(
                    sequence_number=self._number(), output_index=index, item_id=id, content_index=0, text=text
                )
            case ReasoningItem():
                yield ReasoningTextDone(
                    sequence_number=self._number(), output_index=index, item_id=id, content_index=0, text=text
                )
            case FunctionCall():
                yield ArgumentsDone(
                    sequence_number=self._number(), output_index=index, item_id=id, name=self._name, arguments=text
                )
        if not isinstance(item, FunctionCall):
            yield ContentPartDone(
                sequence_number=self._number(),
                output_index=index,
                item_id=id,
                content_index=0,
                part=item.content[0],
            )
        self._kind = None
        self._text = bytearray()
        yield OutputItemDone(sequence_number=self._number(), output_index=index, item=item)

    def all_items(self) -> list[OutputItem]:
        """Return the items so far; an open one is incomplete."""
        return self.items if self._kind is None else [*self.items, self._item("incomplete")]

    def _open(self, kind: Kind) -> Iterator[ResponseEvent]:
        """Begin an item, unless one of this kind is open."""
        if self._kind == kind:
            return
        yield from self.close("completed")
        self._kind, self._id = kind, self._new_id(_PREFIXES[kind])
        index = len(self.items)
        yield OutputItemAdded(sequence_number=self._number(), output_index=index, item=self._item("in_progress"))
        if kind != "function_call":
            part = OutputText("") if kind == "message" else ReasoningText("")
            yield ContentPartAdded(
                sequence_number=self._number(), output_index=index, item_id=self._id, content_index=0, part=part
            )

    def _item(self, status: ItemStatus) -> OutputItem:
        """Return the open item. While it is in progress, it has no content."""
        text = self._text.decode()
        is_new = status == "in_progress"
        match self._kind:
            case "reasoning":
                return ReasoningItem(self._id, [] if is_new else [ReasoningText(text)], status)
            case "function_call":
                return FunctionCall(self._id, self._call_id, self._name, text, status)
            case _:
                return OutputMessage(self._id, [] if is_new else [OutputText(text)], status)
