"""The client of `tiercel run-batch`: sends the lines of a file to a server and writes the answers to another file."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from tiercel.server.batch.input import input_lines
from tiercel.server.batch.line import (
    BATCH_ENDPOINTS,
    BatchLine,
    LineAnswer,
    LineError,
    LineFault,
    LineResponse,
    answer_of,
    one_line,
    read_line,
    stream_refusal,
    unanswered,
    wants_stream,
)
from tiercel.values.units import MIB

_MAX_LINE_BYTES = 64 * MIB
_RETRY_STATUSES = (429, 503)  # a limit or an overload of the server
_UNKNOWN_RETRY_S = 2.0
_MAX_RETRY_S = 60.0
_LOST_ATTEMPTS = 5  # to send a line over connections that break
_LOST_PAUSE_S = 1.0
_PROGRESS_S = 2.0


class BatchClient:
    """Answers the lines of one file, a bounded number at a time. An error of a line does not stop the others."""

    def __init__(self, http: httpx.AsyncClient, output: Path, concurrency: int, has_ended: Callable[[], bool]) -> None:
        """`has_ended` returns whether the server is known to have ended, so that no line is tried again."""
        self.num_answered = 0  # with status 200
        self.num_failed = 0
        self._http = http
        self._output = output
        self._concurrency = concurrency
        self._has_ended = has_ended

    async def run(self, source: Path) -> None:
        """Answer every line of `source`, in the order in which answers arrive. Errors: OSError."""
        with self._output.open("wb") as out:
            lines, custom_ids = input_lines(source, _MAX_LINE_BYTES), set[str]()
            progress = asyncio.create_task(self._show_progress())

            async def work() -> None:
                for number, text in lines:  # the workers share the iterator
                    self._write(out.write, await self._answer(number, text, custom_ids))

            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self._concurrency):
                        tasks.create_task(work())
            finally:
                progress.cancel()
                out.flush()
                os.fsync(out.fileno())
        self._print_progress()

    def _write(self, write: Callable[[bytes], object], answer: LineAnswer) -> None:
        write(answer.encode())
        if answer.is_success:
            self.num_answered += 1
        else:
            self.num_failed += 1

    async def _answer(self, number: int, text: bytes, custom_ids: set[str]) -> LineAnswer:
        try:
            if len(text) > _MAX_LINE_BYTES:
                raise LineError("line_too_long", f"The line is longer than {_MAX_LINE_BYTES} bytes.")
            line = read_line(text, BATCH_ENDPOINTS)
            if line.custom_id in custom_ids:
                raise LineError("duplicate_custom_id", "custom_id: another line has the same.", "custom_id")
        except LineError as exc:
            fault = LineFault(exc.code, f"line {number}: {exc.message}")
            return LineAnswer(f"batch_req_{secrets.token_hex(16)}", _custom_id(text), None, fault)
        custom_ids.add(line.custom_id)
        request_id = f"run-batch-{secrets.token_hex(8)}-{number}"
        return stream_refusal(line, request_id) if wants_stream(line) else await self._ask(line, request_id)

    async def _ask(self, line: BatchLine, request_id: str) -> LineAnswer:
        """Return the answer of the server. A line that the server refuses for its load is asked again."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        num_lost = 0
        while True:
            try:
                answer = await self._http.post(line.url, content=bytes(line.body), headers=headers)
            except httpx.HTTPError as exc:
                num_lost += 1
                if num_lost >= _LOST_ATTEMPTS or self._has_ended():
                    return unanswered(line, "connection_error", f"The server cannot be reached: {type(exc).__name__}.")
                await asyncio.sleep(_LOST_PAUSE_S)
                continue
            if answer.status_code in _RETRY_STATUSES and not self._has_ended():
                await asyncio.sleep(_retry_s(answer.headers.get("retry-after")))
                continue
            body = answer.content
            try:
                json.loads(body)
            except ValueError:
                body = json.dumps({"error": {"message": answer.text[:1000], "type": "invalid_answer"}}).encode()
            return answer_of(line, LineResponse(answer.status_code, request_id, one_line(body)))

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            self._print_progress()

    def _print_progress(self) -> None:
        print(f"run-batch: {self.num_answered} lines answered, {self.num_failed} failed", file=sys.stderr, flush=True)


def _custom_id(text: bytes) -> str | None:
    """Return the custom_id of a line that is wrong elsewhere; None if it has none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found: object = value.get("custom_id") if isinstance(value, dict) else None  # pyright: ignore
    return found if isinstance(found, str) else None


def _retry_s(text: str | None) -> float:
    try:
        seconds = float(text or _UNKNOWN_RETRY_S)
    except ValueError:
        seconds = _UNKNOWN_RETRY_S
    return min(max(seconds, 0.1), _MAX_RETRY_S)
