"""One request to the server and the record of it."""

import asyncio
import ssl
from collections.abc import Mapping

import httpx
import msgspec
from msgspec import Struct

from tiercel.loadtest.client.answer import Answer
from tiercel.loadtest.client.assignment import Assignment, Source
from tiercel.loadtest.client.connection import ArrivingBody
from tiercel.loadtest.client.http1 import BODY, SENT_S, Http1Transport
from tiercel.loadtest.load.conversation import Turn
from tiercel.loadtest.results.record import ClientRecord
from tiercel.values.clock import Clock

_CONNECT_S = 30.0


class RequestSpec(Struct, frozen=True, kw_only=True):
    """One request to send."""

    source: Source
    index: int
    turn: Turn
    number: int  # position of the turn in its conversation
    is_only: bool  # True if the conversation has no other turn
    history: tuple[tuple[str, str], ...]  # the questions and answers before this turn
    due_s: float  # seconds since the start of the run


class Sent(Struct, frozen=True):
    """The record of a request and the text of its answer."""

    record: ClientRecord
    text: str
    is_counted: bool  # True if the server reported the number of tokens


class RequestSender:
    """Sends the requests of one assignment. Use with `async with`."""

    def __init__(self, assignment: Assignment, clock: Clock) -> None:
        self.start_s = 0.0
        self.chunks = 0
        self._assignment = assignment
        self._clock = clock
        self._transport = Http1Transport(clock, connect_s=_CONNECT_S, verify=tls_context(verify=assignment.verify))
        self._client = httpx.AsyncClient(transport=self._transport, timeout=None, follow_redirects=False)  # noqa: S113 - `asyncio.timeout` below
        self._encoder = msgspec.json.Encoder()

    async def __aenter__(self) -> "RequestSender":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._client.aclose()

    async def send(self, spec: RequestSpec) -> Sent:
        """Send a request and wait for the end of its answer. A failure is noted in the record, not raised."""
        request = self._request(spec)
        answer = Answer(is_stream=self._assignment.is_stream)
        status: int | None = None
        began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(self._assignment.timeout_s):
                response = await self._client.send(request, stream=True)
                status = response.status_code
                await self._receive(response, answer)
        except TimeoutError:
            answer.fail(f"the answer did not end within {self._assignment.timeout_s:g} s")
        except httpx.HTTPError as exc:
            answer.fail(f"{type(exc).__name__}: {exc}".rstrip(": "))
        except asyncio.CancelledError:
            answer.fail("stopped by the user")
        return self._record(spec, answer, status, request.extensions.get(SENT_S, began_s))

    async def _receive(self, response: httpx.Response, answer: Answer) -> None:
        body = response.extensions[BODY]
        assert isinstance(body, ArrivingBody)
        try:
            body.listen(answer.take if response.status_code == 200 else answer.take_refusal)
            await body.finished()
        finally:
            await response.aclose()
        if response.status_code == 200:
            answer.finish()
        else:
            answer.refuse(response.status_code)

    def _request(self, spec: RequestSpec) -> httpx.Request:
        fields: dict[str, object] = {
            **self._assignment.body,
            "max_tokens": spec.turn.output_tokens,
            **_prompt_fields(spec, is_chat=self._assignment.is_chat),
            **spec.source.extra_body,
        }
        body = self._encoder.encode({name: value for name, value in fields.items() if value is not None})
        headers: Mapping[str, str] = {
            **spec.source.headers,
            "content-type": "application/json",
            "x-request-id": f"{self._assignment.request_id_prefix}{spec.index}-{spec.number}",
        }
        return httpx.Request("POST", self._assignment.url, headers=headers, content=body)

    def _record(self, spec: RequestSpec, answer: Answer, status: int | None, sent_s: float) -> Sent:
        start_s = self.start_s
        usage = answer.usage
        counted = usage.completion_tokens if usage is not None else None
        details = usage.prompt_tokens_details if usage is not None else None
        chunks_s = tuple([round(at_s - start_s, 6) for at_s in answer.chunks_s])
        last_s = answer.last_s if answer.last_s is not None and answer.error is None else self._clock.now_s()
        self.chunks += len(chunks_s)
        record = ClientRecord(
            index=spec.index,
            tenant=spec.source.tenant,
            due_s=round(spec.due_s, 6),
            sent_s=round(sent_s - start_s, 6),
            first_s=chunks_s[0] if chunks_s else None,
            end_s=round(last_s - start_s, 6),
            chunks_s=chunks_s,
            input_tokens=(usage.prompt_tokens if usage is not None else 0) or spec.turn.input_tokens,
            output_tokens=len(chunks_s) if counted is None else counted,
            wanted_tokens=spec.turn.output_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
            error=answer.error,
            status=status,
            conversation=None if spec.is_only else spec.index,
            turn=spec.number,
            text=answer.text if self._assignment.keep_text else "",
        )
        return Sent(record, answer.text, counted is not None or answer.error is not None)


def _prompt_fields(spec: RequestSpec, *, is_chat: bool) -> dict[str, object]:
    if not is_chat:
        before = "".join(f"{question}{answer}" for question, answer in spec.history)
        return {"prompt": before + spec.turn.prompt}
    messages: list[dict[str, str]] = []
    for question, answer in spec.history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*messages, {"role": "user", "content": spec.turn.prompt}]}


def tls_context(*, verify: bool) -> ssl.SSLContext:
    """Return a context with the certificates of the machine; without `verify` it accepts every certificate."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
