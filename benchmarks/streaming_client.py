"""A light client for benchmarks: streamed completions over plain sockets, as an open or a closed loop.

`tiercel bench serve` measures more and needs more CPU time, which the server lacks on a machine with two cores.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request: due at a time since the start of the load; a closed loop ignores that time."""

    at_s: float
    prompt: list[int] | str
    outputs: int  # output tokens; the end of a sequence is ignored
    key: str = ""  # the tenant's API key


@dataclass(slots=True)
class StreamedAnswer:
    """The answer to a request. Times are seconds since the start of the load."""

    request: TimedRequest
    due_s: float = 0.0
    first_s: float | None = None  # time of the first token
    end_s: float | None = None  # time at which the answer was complete
    status: int = 0
    service: str = ""  # the header `x-tiercel-service`
    timing: str = ""  # the header `server-timing`
    tokens: int = 0  # of the answer, as the server counts them at its end
    refusal: str = field(default="", repr=False)

    @property
    def ttft_s(self) -> float:
        """Seconds from the due time to the first token; infinite without one."""
        return float("inf") if self.first_s is None else self.first_s - self.due_s

    @property
    def is_complete(self) -> bool:
        """True if the stream ended without an error."""
        return self.status == 200 and self.end_s is not None and self.first_s is not None


def open_loop(url: str, requests: Sequence[TimedRequest], patience_s: float | None = None) -> list[StreamedAnswer]:
    """Send every request when it is due; return all answers in order of the requests.

    With a patience, requests that have not ended that long after the last due time are cancelled and incomplete.
    """
    return asyncio.run(_open_loop(url, requests, patience_s))


def closed_loop(
    url: str, requests: Sequence[TimedRequest], concurrency: int, seconds: float = float("inf")
) -> list[StreamedAnswer]:
    """Keep `concurrency` requests running, in order; each is due when the one before it has ended.

    No request is sent after `seconds`; returns the answers to the requests that were sent.
    """
    return asyncio.run(_closed_loop(url, requests, concurrency, seconds))


async def _open_loop(url: str, requests: Sequence[TimedRequest], patience_s: float | None) -> list[StreamedAnswer]:
    answers = [StreamedAnswer(request, request.at_s) for request in requests]
    tasks: list[asyncio.Task[None]] = []
    start_s = time.perf_counter()
    for answer in sorted(answers, key=lambda one: one.due_s):
        await asyncio.sleep(max(start_s + answer.due_s - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(_send(url, answer, start_s)))
    done, given_up = await asyncio.wait(tasks, timeout=patience_s)
    for task in given_up:
        task.cancel()
    for task in done:
        task.result()
    return answers


async def _closed_loop(
    url: str, requests: Sequence[TimedRequest], concurrency: int, seconds: float
) -> list[StreamedAnswer]:
    answers: list[StreamedAnswer] = []
    left: Iterator[TimedRequest] = iter(requests)
    start_s = time.perf_counter()

    async def work() -> None:
        for request in left:
            now_s = time.perf_counter() - start_s
            if now_s >= seconds:
                return
            answer = StreamedAnswer(request, now_s)
            answers.append(answer)
            await _send(url, answer, start_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return answers


async def _send(url: str, answer: StreamedAnswer, start_s: float) -> None:
    """Send one request and read its answer to the end. A broken connection leaves the answer incomplete."""
    request = answer.request
    host, _, port = url.removeprefix("http://").rpartition(":")
    fields = {"prompt": request.prompt, "max_tokens": request.outputs, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    if request.key:
        head += f"Authorization: Bearer {request.key}\r\n"
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answer.status = int(headers[0].split()[1])
        for header in headers[1:]:
            name, _, value = header.partition(":")
            if name.lower() == "x-tiercel-service":
                answer.service = value.strip()
            elif name.lower() == "server-timing":
                answer.timing = value.strip()
        tail = b""
        while piece := await reader.read(65536):
            if answer.status != 200:
                answer.refusal += piece.decode("utf-8", "replace")
                continue
            if answer.first_s is None and b"data: " in piece:
                answer.first_s = time.perf_counter() - start_s
            tail = (tail + piece)[-1024:]
        if answer.status != 200 or b"data: [DONE]" in tail:
            answer.end_s = time.perf_counter() - start_s
            usage = _USAGE.findall(tail)
            answer.tokens = int(usage[-1]) if usage else 0
        writer.close()
    except (OSError, asyncio.IncompleteReadError):
        return
