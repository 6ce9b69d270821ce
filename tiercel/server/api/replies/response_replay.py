"""The events of a stored response that has ended, made anew."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.replies.response_events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    event_name,
)
from tiercel.server.api.replies.response_items import ItemWriter
from tiercel.server.api.replies.responses import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ResponseBody,
)
from tiercel.server.http.sse import event, line_safe

_head_decoder = msgspec.json.Decoder(ResponseBody)
_item_decoder: msgspec.json.Decoder[OutputItem] = msgspec.json.Decoder(OutputItem)


def replayed(head: bytes, output: Sequence[bytes], starting_after: int) -> Iterator[bytes]:
    """Yield, piece by piece, the events of a response whose numbers are above `starting_after`.

    `head` is the JSON of the response without its output, `output` that of its items.
    Each item has one delta, so that the numbers are not those of the first stream. A cancelled response ends as an
    incomplete one does: there is no event for it.
    """
    numbers = itertools.count()
    body = _head_decoder.decode(head)
    started = replace(body, status="in_progress", usage=None, completed_at=None, error=None, incomplete_details=None)
    for kind in (ResponseCreated, ResponseInProgress):
        if (number := next(numbers)) > starting_after:
            yield _event(kind(sequence_number=number, response=started))
    ids: list[str] = []
    writer = ItemWriter(lambda: next(numbers), lambda _prefix: ids[-1])
    for encoded in output:
        item = _item_decoder.decode(encoded)
        ids.append(item.id)
        for one in _item_events(writer, item):
            if one.sequence_number > starting_after:
                yield _event(one)
    last = {"completed": ResponseCompleted, "failed": ResponseFailed}.get(body.status, ResponseIncomplete)
    if (number := next(numbers)) > starting_after:
        frame = _event(last(sequence_number=number, response=replace(body, output=hole(list[OutputItem]))))
        before, after = frame.split(HOLE)
        yield before + b"["
        for index, encoded in enumerate(output):
            yield b"," if index else b""
            yield line_safe(encoded)
        yield b"]" + after


def _event(one: ResponseEvent) -> bytes:
    return event(one, event_name(one))


def _item_events(writer: ItemWriter, item: OutputItem) -> Iterator[ResponseEvent]:
    match item:
        case OutputMessage(content=[OutputText(text=text)]):
            yield from writer.text(text, [])
        case ReasoningItem(content=[thoughts]):
            yield from writer.thoughts(thoughts.text)
        case FunctionCall():
            yield from writer.call(item.name, item.call_id)
            yield from writer.arguments(item.arguments)
        case _:
            return
    yield from writer.close(item.status)
