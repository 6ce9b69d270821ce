"""The answer of a generation: a stream of events, or a whole body."""

import asyncio
from collections.abc import Callable

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.api.delta_encoder import DeltaEncoder, ReplyShape
from tiercel.server.api.hold import Hold
from tiercel.server.api.replies.usage import UsageBody, usage_body
from tiercel.server.client.choice_text import ChoiceDelta, GenerationError, SequenceFailedError
from tiercel.server.client.collector import StreamEnd
from tiercel.server.client.generation import Generation, StreamEndedError, TokenText
from tiercel.server.http.body_writer import BodyWriter, body_writer
from tiercel.server.http.failure import engine_failed, request_failed
from tiercel.server.http.patience import PATIENCE_S, PatientSender
from tiercel.server.http.sse import MEDIA_TYPE, EventFrame
from tiercel.server.http.watch import run_watched
from tiercel.values.errors import AdmissionError

_HEADERS = (
    (b"content-type", MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class StreamRules(Struct, frozen=True, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False  # at the end; every other event has usage null
    continuous_usage: bool = False
    with_details: bool = True
    keep_alive_s: float = 0.0  # longest silence; 0 = any
    with_tokens: bool = False  # events have the ids of their tokens
    patience_s: float = PATIENCE_S


FailureNote = Callable[[GenerationError], str]
"""Logs a failed generation and returns the error id for the client."""


class _Flow:
    """Writes the events of one stream while reports are handled."""

    __slots__ = ("_encoder", "_generation", "_read_usage", "_writer")

    def __init__(
        self,
        generation: Generation,
        writer: BodyWriter,
        encoder: DeltaEncoder,
        read_usage: Callable[[], UsageBody | UnsetType | None],
    ) -> None:
        self._generation = generation
        self._writer = writer
        self._encoder = encoder
        self._read_usage = read_usage

    def take(self, deltas: list[ChoiceDelta]) -> bool:
        """Write the events of some deltas. Return whether the client keeps up."""
        body = self._encoder.encode(deltas, self._read_usage())
        if body:
            self._writer.write(body)
        mailbox = self._generation.mailbox
        if mailbox.sink is None:
            mailbox.sink = self._sink()
        return not self._writer.is_full

    def _sink(self) -> Callable[[int], bool] | None:
        frame = self._encoder.frame(0)
        text = None if frame is None else self._generation.token_text()
        return None if frame is None or text is None else _TokenSink(text, frame, self._writer).take


class _TokenSink:
    """Writes the events of single tokens, for a stream whose events differ in their text only."""

    __slots__ = ("_frame", "_text", "_writer")

    def __init__(self, text: TokenText, frame: EventFrame, writer: BodyWriter) -> None:
        self._text = text
        self._frame = frame
        self._writer = writer

    def take(self, token: int) -> bool:
        """Write the event of a token, if its text is complete. Return False and do nothing if the client is slow."""
        writer = self._writer
        if writer.is_full:
            return False
        text = self._text.advance(token)
        if text:
            writer.write(self._frame.event(text))
        return True


def _no_usage() -> UnsetType:
    return UNSET


def _null_usage() -> None:
    return None


class EventStream(Response):
    """A response that sends events as the generation proceeds, and aborts it if the client leaves or stops reading.

    Nothing is sent before the first tokens, so that an early failure still gets its own status. From then on, the
    events of a step are written while its report is handled. If the client does not keep up, or the server has no
    `BodyWriter`, a task reads the mailbox in portions and waits for each `send`.

    At most 256 KiB wait for a slow client, and the events of one step: encoded in the connection (HIGH_WATER_BYTES) and
    in one portion, and as tokens in the mailbox (MAX_UNREAD_BYTES). Buffers of the kernel are not counted. The
    request ends if the mailbox is full, or if the client takes nothing for `patience_s`.
    """

    def __init__(
        self, generation: Generation, shape: ReplyShape, rules: StreamRules, note: FailureNote, room: Hold
    ) -> None:
        """`room`: the memory of what the answer repeats of the prompt; released at its end."""
        super().__init__(media_type=MEDIA_TYPE)
        self._generation = generation
        self._encoder = DeltaEncoder(shape, has_frames=not (rules.continuous_usage or rules.with_tokens))
        self._room = room
        self._shape = shape
        self._rules = rules
        self._note = note
        self._has_started = False
        self._is_open = False  # the first deltas are out
        self._writer: BodyWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = body_writer(scope)
        with self._room, self._generation as generation:
            await run_watched(self._run(generation, send), receive, generation.mailbox.overflow)

    async def _run(self, generation: Generation, send: Send) -> None:
        try:
            while not generation.is_done:
                deltas = await self._next(generation, send)
                opening = b"" if self._is_open else self._shape.opening(self._usage(generation))
                self._is_open = True
                await self._write(send, opening + self._encoder.encode(deltas, self._usage_reader(generation)()))
                if self._writer is not None and self._has_started:
                    await self._flow(generation, self._writer, send)
        except GenerationError as exc:
            error = to_refusal(exc, self._note)
            if not self._has_started:
                raise error from exc
            await self._write(send, self._shape.failure(error), is_last=True)
            return
        usage = None
        if self._rules.include_usage:
            await generation.settle()
            usage = self._usage(generation)
        await self._write(send, self._shape.closing(usage), is_last=True)

    async def _next(self, generation: Generation, send: Send) -> list[ChoiceDelta]:
        """Return the next deltas. The silence is ended now and then while waiting."""
        if self._rules.keep_alive_s <= 0:
            return await generation.next_deltas()
        while True:
            try:
                async with asyncio.timeout(self._rules.keep_alive_s):
                    return await generation.next_deltas()
            except TimeoutError:
                await self._write(send, self._shape.keep_alive)

    async def _flow(self, generation: Generation, writer: BodyWriter, send: Send) -> None:
        """Write events as the reports arrive, until the generation ends or the client does not keep up.

        Nothing here happens per token: the writer knows when it last sent something.
        """
        now_s, keep_alive_s = asyncio.get_running_loop().time, self._rules.keep_alive_s
        flow = _Flow(generation, writer, self._encoder, self._usage_reader(generation))
        writer.sent_s = now_s()
        while not (writer.is_full or generation.is_done):
            try:
                async with asyncio.timeout_at(writer.sent_s + keep_alive_s if keep_alive_s > 0 else None):
                    await generation.flow(flow.take)
            except TimeoutError:
                if now_s() >= writer.sent_s + keep_alive_s:
                    await self._write(send, self._shape.keep_alive)
                    writer.sent_s = now_s()

    def _usage_reader(self, generation: Generation) -> Callable[[], UsageBody | UnsetType | None]:
        """Return what reads the usage for the next event."""
        if self._rules.continuous_usage:
            return lambda: self._usage(generation)
        return _null_usage if self._rules.include_usage else _no_usage

    def _usage(self, generation: Generation) -> UsageBody:
        return usage_body(generation.usage(), with_details=self._rules.with_details)

    async def _write(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not body and not is_last:
            return
        if self._writer is not None:
            self._writer.flush()
        writer = self._writer
        unsent_bytes = None if writer is None else lambda: writer.unsent_bytes
        with self._generation.mailbox.sending():
            await self._send(PatientSender(send, unsent_bytes, self._rules.patience_s), body, is_last=is_last)

    async def _send(self, send: PatientSender, body: bytes, *, is_last: bool) -> None:
        if not self._has_started:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            self._has_started = True
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def ended_early(end: StreamEnd) -> AdmissionError:
    """Return the refusal for a request that ended before its first token."""
    return AdmissionError(end.status, end.message, code=end.code, kind="server_error", retry_after_s=end.retry_after_s)


def to_refusal(error: GenerationError, note: FailureNote) -> AdmissionError:
    """Return the refusal for a generation that failed."""
    error_id = note(error)
    match error:
        case StreamEndedError(end=end):
            return ended_early(end)
        case SequenceFailedError() if error.is_of_request:
            return request_failed(error.reason)
        case SequenceFailedError():
            return engine_failed(error_id)
        case _:
            raise error
