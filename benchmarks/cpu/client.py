"""The client of the workloads: one streaming request to any server with the OpenAI API.

`tiercel bench serve` sends requests at planned times; here a request waits for what the answers to others show.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from benchmarks.cpu.timings import AnswerTimes
from tiercel.loadtest.client.answer import Answer
from tiercel.loadtest.client.connection import ArrivingBody
from tiercel.loadtest.client.http1 import BODY, SENT_S, Http1Transport
from tiercel.loadtest.client.sender import tls_context
from tiercel.values.clock import MonotonicClock

_CONNECT_S = 30.0
_TIMEOUT_S = 600.0


class StreamingClient:
    """Sends streaming completions to one server."""

    def __init__(self, url: str, model: str, http: httpx.AsyncClient) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._http = http

    async def ask(
        self, prompt: str, prompt_tokens: int, wanted: int, on_event: Callable[[int], None] | None = None
    ) -> AnswerTimes:
        """Send a greedy request that ignores the end of sequence, and return its times.

        `on_event` is called with the number of chunks so far. Failures are noted in the result. If the task is
        cancelled, the connection is closed and the result is marked as cut.
        """
        found = AnswerTimes(prompt_tokens, wanted)
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(is_stream=True)
        request = self._http.build_request("POST", self._url, json=body)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._receive(request, answer, found, on_event)
        except asyncio.CancelledError:
            found.is_cut = True
        except TimeoutError:
            answer.fail(f"no complete answer within {_TIMEOUT_S:g} s")
        except httpx.HTTPError as exc:
            answer.fail(f"{type(exc).__name__}: {exc}")
        found.sent_s = request.extensions.get(SENT_S, 0.0)
        found.end_s = time.monotonic()
        found.texts_s = answer.chunks_s
        found.error = None if found.is_cut else answer.error
        if answer.usage is not None:
            found.counted_prompt, found.counted_output = answer.usage.prompt_tokens, answer.usage.completion_tokens
        return found

    async def _receive(
        self, request: httpx.Request, answer: Answer, found: AnswerTimes, on_event: Callable[[int], None] | None
    ) -> None:
        response = await self._http.send(request, stream=True)
        body = response.extensions[BODY]
        assert isinstance(body, ArrivingBody)

        def take(at_s: float, piece: bytes) -> None:
            answer.take(at_s, piece)
            if answer.last_s == at_s:  # the piece completed an event with a choice
                found.events_s.append(at_s)
                if on_event is not None:
                    on_event(len(found.events_s))

        try:
            body.listen(take if response.status_code == 200 else answer.take_refusal)
            await body.finished()
        finally:
            await response.aclose()
        if response.status_code == 200:
            answer.finish()
        else:
            answer.refuse(response.status_code)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[StreamingClient]:
    """Yield a client for the first model of a server."""
    transport = Http1Transport(MonotonicClock(), connect_s=_CONNECT_S, verify=tls_context(verify=True))
    async with httpx.AsyncClient(transport=transport, timeout=None) as http:
        models = await http.get(f"{url}/v1/models")
        yield StreamingClient(url, models.json()["data"][0]["id"], http)
