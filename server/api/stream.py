"""The answer of a generation: a stream of events, or a whole body."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.errors import AdmissionError
from tiercel.server.api.replies.chat import ChatChunk, ChatReply
from tiercel.server.api.replies.completion import TextChunk, TextReply
from tiercel.server.api.replies.usage import UsageBody, usage_body
from tiercel.server.engine.choice_text import ChoiceDelta, GenerationError, SequenceFailedError
from tiercel.server.engine.generation import Generation, StreamEndedError
from tiercel.server.http.failure import encode_fault, engine_failed
from tiercel.server.http.sse import DONE, KEEP_ALIVE, MEDIA_TYPE, event
from tiercel.server.http.watch import SlowReaderError, run_watched

_HEADERS = (
    (b"content-type", MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_SEND_S = 60.0  # a client that receives nothing for this time is a slow reader


class ReplyShape(Protocol):
    """Turns deltas into the chunks and bodies of one API."""

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType) -> Sequence[ChatChunk] | Sequence[TextChunk]: ...

    def usage_chunk(self, usage: UsageBody) -> ChatChunk | TextChunk: ...

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ChatReply | TextReply: ...


class StreamRules(Struct, frozen=True, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage: bool = False
    with_details: bool = True
    keep_alive_s: float = 0.0  # 0 = off


FailureNote = Callable[[GenerationError], str]
"""Logs a failed generation and returns the error id for the client."""


class EventStream(Response):
    """A response that sends events as the generation proceeds, and aborts it if the client leaves or stops reading.

    Nothing is sent before the first tokens, so that an early failure still gets its own status.
    """

    def __init__(self, generation: Generation, shape: ReplyShape, rules: StreamRules, note: FailureNote) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._generation = generation
        self._shape = shape
        self._rules = rules
        self._note = note
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation as generation:
            await run_watched(self._run(generation, send), receive, generation.mailbox.overflow)

    async def _run(self, generation: Generation, send: Send) -> None:
        try:
            while not generation.is_done:
                deltas = await self._next(generation, send)
                await self._write(send, b"".join(self._events(generation, deltas)))
        except GenerationError as exc:
            error = to_refusal(exc, self._note)
            if not self._has_started:
                raise error from exc
            await self._write(send, b"data: " + encode_fault(error) + b"\n\n" + DONE, is_last=True)
            return
        tail = DONE
        if self._rules.include_usage:
            await generation.settle()
            tail = event(self._shape.usage_chunk(self._usage(generation))) + DONE
        await self._write(send, tail, is_last=True)

    async def _next(self, generation: Generation, send: Send) -> list[ChoiceDelta]:
        """Return the next deltas. Keep-alive comments are sent while waiting."""
        if self._rules.keep_alive_s <= 0:
            return await generation.next_deltas()
        while True:
            try:
                async with asyncio.timeout(self._rules.keep_alive_s):
                    return await generation.next_deltas()
            except TimeoutError:
                await self._write(send, KEEP_ALIVE)

    def _events(self, generation: Generation, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        usage = self._usage(generation) if self._rules.continuous_usage else UNSET
        return [event(chunk) for delta in deltas for chunk in self._shape.chunks(delta, usage)]

    def _usage(self, generation: Generation) -> UsageBody:
        return usage_body(generation.usage(), with_details=self._rules.with_details)

    async def _write(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not body and not is_last:
            return
        try:
            with self._generation.mailbox.sending():
                async with asyncio.timeout(_SEND_S):
                    await self._send(send, body, is_last=is_last)
        except TimeoutError as exc:
            raise SlowReaderError from exc

    async def _send(self, send: Send, body: bytes, *, is_last: bool) -> None:
        if not self._has_started:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            self._has_started = True
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def whole_reply(
    generation: Generation, shape: ReplyShape, rules: StreamRules, note: FailureNote, receive: Receive
) -> Response:
    """Wait for the end of the generation; return the whole answer. Errors: AdmissionError, ClientGoneError."""
    with generation:
        return await run_watched(_collect(generation, shape, rules, note), receive)


async def _collect(generation: Generation, shape: ReplyShape, rules: StreamRules, note: FailureNote) -> Response:
    parts: list[list[ChoiceDelta]] = [[] for _ in range(generation.num_choices)]
    try:
        while not generation.is_done:
            for delta in await generation.next_deltas():
                parts[delta.choice].append(delta)
    except GenerationError as exc:
        raise to_refusal(exc, note) from exc
    await generation.settle()
    usage = usage_body(generation.usage(), with_details=rules.with_details)
    body = shape.reply([_joined(deltas) for deltas in parts], usage)
    return Response(msgspec.json.encode(body), media_type="application/json")


def _joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    last = deltas[-1]
    return ChoiceDelta(
        choice=last.choice,
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        num_outputs=last.num_outputs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def to_refusal(error: GenerationError, note: FailureNote) -> AdmissionError:
    """Return the refusal for a generation that failed."""
    error_id = note(error)
    match error:
        case StreamEndedError(end=end):
            return AdmissionError(503, end.message, code=end.code, kind="server_error", retry_after_s=5)
        case SequenceFailedError():
            return engine_failed(error_id)
        case _:
            raise error
