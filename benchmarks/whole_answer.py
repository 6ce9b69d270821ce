"""A client for benchmarks that compare answers: it keeps the whole text, the usage and how the request ended."""

import asyncio
import contextlib
import enum
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Outcome(enum.Enum):
    """How a request ended. `OPEN` is the state before the end: a request that keeps it has no outcome."""

    OPEN = "open"
    ANSWERED = "answered"  # in full, with a finish reason
    REFUSED = "refused"  # status 4xx
    FAILED = "failed"  # status 5xx, or an error event in the stream
    BROKEN = "broken"  # the connection ended before the answer
    SILENT = "silent"  # no answer within the patience
    LEFT = "left"  # the client closed the connection


class Usage(NamedTuple):
    """The tokens of a request as the server counts them."""

    prompt: int
    completion: int
    cached: int


@dataclass(slots=True)
class WholeAnswer:
    """A request and its answer. Times are those of `time.monotonic`."""

    path: str
    body: Mapping[str, object]
    key: str = ""  # the API key of its tenant
    request_id: str = ""
    outcome: Outcome = Outcome.OPEN
    sent_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    text: str = ""
    finish: str | None = None
    usage: Usage | None = None
    error: str = ""
    piece_times_s: list[float] = field(default_factory=list[float])  # of the events that carried text, or token ids

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first text of a stream; None without one."""
        return self.piece_times_s[0] - self.sent_s if self.piece_times_s else None

    @property
    def said(self) -> tuple[str, str | None, int, int]:
        """The parts of an answer that depend on the request alone: text, finish reason, prompt and output tokens."""
        prompt, completion = (self.usage.prompt, self.usage.completion) if self.usage else (0, 0)
        return self.text, self.finish, prompt, completion


async def ask(url: str, answer: WholeAnswer, *, leave_after: int | None = None, patience_s: float = 120.0) -> None:
    """Send the request of `answer` on a connection of its own and fill in how it ended. Never raises for the server.

    `leave_after`: close the connection after this many events; 0 = as soon as the request is sent.
    """
    answer.sent_s = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            await _converse(url, answer, leave_after)
    except TimeoutError:
        answer.outcome = Outcome.SILENT
    except (OSError, asyncio.IncompleteReadError, ValueError) as exc:
        answer.outcome, answer.error = Outcome.BROKEN, f"{type(exc).__name__}: {exc}"
    answer.end_s = time.monotonic()


async def fetch(url: str, path: str, patience_s: float = 10.0) -> tuple[int, bytes]:
    """Return the status and the body of a GET. Errors: OSError, TimeoutError."""
    async with asyncio.timeout(patience_s), _sent(url, "GET", path, {}, b"") as reader:
        status, headers = await _read_head(reader)
        return status, b"".join([piece async for piece in _pieces(reader, headers)])


async def post(url: str, path: str, body: Mapping[str, object], key: str = "") -> tuple[int, Any]:  # Any: JSON
    """Return the status and the JSON of a POST without streaming. Errors: OSError, ValueError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    async with _sent(url, "POST", path, headers, json.dumps(body).encode()) as reader:
        status, replied = await _read_head(reader)
        return status, json.loads(b"".join([piece async for piece in _pieces(reader, replied)]))


async def _converse(url: str, answer: WholeAnswer, leave_after: int | None) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": answer.request_id}
    if answer.key:
        headers["Authorization"] = f"Bearer {answer.key}"
    raw = answer.body.get("raw")  # a body that is no JSON
    content = raw.encode() if isinstance(raw, str) else json.dumps(answer.body).encode()
    async with _sent(url, "POST", answer.path, headers, content) as reader:
        if leave_after == 0:
            answer.outcome = Outcome.LEFT
            return
        answer.status, replied = await _read_head(reader)
        pieces = _pieces(reader, replied)
        if replied.get("content-type", "").startswith("text/event-stream"):
            await _read_stream(pieces, answer, leave_after)
        else:
            _take_whole(b"".join([piece async for piece in pieces]), answer)


async def _read_stream(pieces: AsyncIterator[bytes], answer: WholeAnswer, leave_after: int | None) -> None:
    buffer, events = b"", 0
    async for piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue  # a comment, or the blank line after an event
            if line == b"data: [DONE]":
                if answer.outcome is Outcome.OPEN:
                    answer.outcome = Outcome.ANSWERED if answer.finish is not None else Outcome.BROKEN
                return
            _take_event(json.loads(line[6:]), answer)
            events += 1
            if leave_after is not None and events >= leave_after:
                answer.outcome = Outcome.LEFT
                return
    if answer.outcome is Outcome.OPEN:
        answer.outcome, answer.error = Outcome.BROKEN, "the stream ended without [DONE]"


def _take_event(event: dict[str, Any], answer: WholeAnswer) -> None:  # Any: JSON
    if "error" in event:
        answer.outcome, answer.error = Outcome.FAILED, _error_text(event["error"])
        return
    for choice in event.get("choices", ()):
        piece = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
        if piece or choice.get("token_ids"):
            answer.text += piece or ""
            answer.piece_times_s.append(time.monotonic())
        answer.finish = choice.get("finish_reason") or answer.finish
    if event.get("usage"):
        answer.usage = _usage(event["usage"])


def _take_whole(content: bytes, answer: WholeAnswer) -> None:
    if answer.status != 200:
        answer.outcome = Outcome.REFUSED if 400 <= answer.status < 500 else Outcome.FAILED
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer.error = _error_text(json.loads(content)["error"])
        return
    reply = json.loads(content)
    choice = reply["choices"][0]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer.finish = choice["finish_reason"]
    answer.usage = _usage(reply["usage"])
    answer.outcome = Outcome.ANSWERED


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens", 0))


def _error_text(error: dict[str, Any]) -> str:
    return f"{error.get('code')}: {error.get('message')}"


@contextlib.asynccontextmanager
async def _sent(
    url: str, method: str, path: str, headers: Mapping[str, str], content: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request; the block reads the response. The connection is closed at its end."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(content)}"] if method == "POST" else []
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        await writer.drain()
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, with names in lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    parts = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in parts}


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the body. Errors: IncompleteReadError if the connection ends before the body does."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    else:
        yield await reader.readexactly(int(headers["content-length"]))
