"""Generations that go on without a connection, for responses with `background`."""

import asyncio
from collections.abc import Sequence

from msgspec import UNSET

from tiercel.server.api.begun import BegunAnswer
from tiercel.server.api.replies.response_shape import ResponseShape
from tiercel.server.api.replies.usage import UsageBody, usage_body
from tiercel.server.api.stream import to_refusal
from tiercel.server.client.choice_text import ChoiceDelta, GenerationError


class BackgroundRuns:
    """The responses that are generated in the background, by tenant and id.

    Their number has the limits of all requests: the queue, and the tenant's own limits. They end with this process.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self, tenant: str, begun: BegunAnswer, shape: ResponseShape) -> asyncio.Task[None]:
        """Go on with a generation that has been submitted, to its end."""
        place = (tenant, shape.body.id)
        task = self._tasks[place] = asyncio.get_running_loop().create_task(_run(begun, shape))
        task.add_done_callback(lambda _: self._tasks.pop(place, None))
        return task

    async def cancel(self, tenant: str, id: str) -> bool:
        """End a response now. Return whether it was running."""
        task = self._tasks.get((tenant, id))
        if task is None:
            return False
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not abort its generation
        task.cancel()
        await asyncio.wait([task])
        return True


async def _run(begun: BegunAnswer, shape: ResponseShape) -> None:
    """Generate a response and report its end. Whatever ends the task, the engine stops and the response is over."""
    with_details = begun.rules.with_details

    def take(deltas: Sequence[ChoiceDelta]) -> bool:
        shape.start()
        for delta in deltas:
            shape.chunks(delta, UNSET)
        return True

    def usage() -> UsageBody:
        return usage_body(begun.generation.usage(), with_details=with_details)

    try:
        with begun.room, begun.generation as generation:
            await generation.flow(take)
            await generation.settle()
            shape.end(usage())
    except GenerationError as exc:
        shape.failed(to_refusal(exc, begun.note))
    finally:
        shape.abandon()
