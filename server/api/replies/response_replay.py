"""The events of a stored response that has ended, made anew."""

import itertools
from collections.abc import Callable, Iterator

import msgspec

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
from tiercel.server.api.replies.responses import FunctionCall, OutputMessage, OutputText, ReasoningItem, ResponseBody
from tiercel.server.http.sse import event

_decoder = msgspec.json.Decoder(ResponseBody)


def replayed(response: bytes, starting_after: int) -> bytes:
    """Return the events of a response as JSON whose numbers are above `starting_after`.

    Each item has one delta, so that the numbers are not those of the first stream. A cancelled response ends as an
    incomplete one does: there is no event for it.
    """
    numbers = itertools.count()
    events = _events(_decoder.decode(response), lambda: next(numbers))
    return b"".join(event(one, event_name(one)) for one in events if one.sequence_number > starting_after)


def _events(body: ResponseBody, number: Callable[[], int]) -> Iterator[ResponseEvent]:
    started = msgspec.structs.replace(
        body, status="in_progress", output=[], usage=None, completed_at=None, error=None, incomplete_details=None
    )
    yield ResponseCreated(sequence_number=number(), response=started)
    yield ResponseInProgress(sequence_number=number(), response=started)
    ids = iter([item.id for item in body.output])
    writer = ItemWriter(number, lambda _prefix: next(ids))
    for item in body.output:
        match item:
            case OutputMessage(content=[OutputText(text=text)]):
                yield from writer.text(text, [])
            case ReasoningItem(content=[thoughts]):
                yield from writer.thoughts(thoughts.text)
            case FunctionCall():
                yield from writer.call(item.name, item.call_id)
                yield from writer.arguments(item.arguments)
            case _:
                continue
        yield from writer.close(item.status)
    kind = {"completed": ResponseCompleted, "failed": ResponseFailed}.get(body.status, ResponseIncomplete)
    yield kind(sequence_number=number(), response=body)
