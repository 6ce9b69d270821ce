"""An OpenAI server whose answers are programmed by prompts: `first=100 gap=50 tokens=8 fail=close` (milliseconds).

Run as a process; it prints its port. GET /log returns the times at which it sent every answer, so that a test can
compare the client's figures with them, independent of other load on the machine. The program of a prompt overrides the
defaults of the command line."""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

_METRICS = """\
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{model_name="stub"}} {preemptions}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="stub"}} {running}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} 3
vllm:time_to_first_token_seconds_sum 1.5
"""


class Stub:
    """Sends the answers and logs the requests."""

    def __init__(self, defaults: Mapping[str, str], features: frozenset[str]) -> None:
        self.defaults = dict(defaults)
        self.features = features
        self.log: list[dict[str, Any]] = []
        self.running = 0
        self.stalled_until = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if not await self._answer(writer, method, path, headers, json.loads(body) if body else {}):
                    break
        writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: Mapping[str, str], body: dict[str, Any]
    ) -> bool:
        match path.partition("?")[0]:
            case "/v1/models":
                _send_json(writer, 200, {"data": [{"id": "stub"}]})
            case "/version":
                _send_json(writer, 200, {"version": "stub-1"})
            case "/metrics" if "metrics" in self.features:
                text = _METRICS.format(preemptions=len(self.log), running=self.running)
                _send(writer, 200, "text/plain", text.encode())
            case "/tokenize" if "tokenize" in self.features:
                _send_json(writer, 200, {"count": len(body["prompt"].split())})
            case "/log":
                _send_json(writer, 200, self.log)
            case "/v1/completions" | "/v1/chat/completions" if method == "POST":
                return await self._generate(writer, path, headers, body)
            case _:
                _send_json(writer, 404, {"error": {"message": f"no {path} here"}})
        await writer.drain()
        return True

    def _program(self, prompt: str) -> dict[str, str]:
        output = dict(word.split("=", 1) for word in prompt.split() if "=" in word)
        return {**self.defaults, **output}

    async def _generate(
        self, writer: asyncio.StreamWriter, path: str, headers: Mapping[str, str], body: dict[str, Any]
    ) -> bool:
        came_s = time.monotonic()
        is_chat = "chat" in path
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        program = self._program(prompt)
        fail = program.get("fail", "")
        tokens = min(int(program.get("tokens", "1000000")), body["max_tokens"])
        entry: dict[str, Any] = {
            "id": headers.get("x-request-id", ""), "came_s": came_s, "sent_s": [], "key": headers.get("authorization"),
            "body": body, "program": program,
        }  # fmt: skip
        if fail == "refuse":
            _send_json(writer, 503, {"error": {"message": "too busy"}})
            await writer.drain()
            return True
        if "stall" in program:
            self.stalled_until = max(self.stalled_until, came_s + float(program["stall"]) / 1000)
        if body["max_tokens"] > 1:
            self.log.append(entry)
        self.running += 1
        try:
            await self._speak(writer, came_s, tokens, entry, is_chat=is_chat, is_stream=body.get("stream", False))
        finally:
            self.running -= 1
        return fail != "close"

    async def _speak(
        self,
        writer: asyncio.StreamWriter,
        came_s: float,
        tokens: int,
        entry: dict[str, Any],
        *,
        is_chat: bool,
        is_stream: bool,
    ) -> None:
        program = entry["program"]
        first_s, gap_s = float(program.get("first", "0")) / 1000, float(program.get("gap", "0")) / 1000
        each = int(program.get("each", "1"))  # tokens per chunk
        usage = {
            "prompt_tokens": len(str(entry["body"].get("prompt", "")).split()) or 7,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": int(program.get("cached", "0"))},
        }
        if not is_stream:
            await _sleep_until(came_s + first_s + gap_s * (tokens - 1))
            entry["sent_s"].append(time.monotonic())
            choice = {"message": {"content": "a" * tokens}} if is_chat else {"text": "a" * tokens}
            _send_json(writer, 200, {"choices": [{**choice, "finish_reason": "length"}], "usage": usage})
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(0, tokens, each):
            await _sleep_until(came_s + first_s + gap_s * (number // each))
            await _sleep_until(self.stalled_until)
            if program.get("fail") and number >= tokens // 2:
                await _break_off(writer, program["fail"])
                return
            text = " a" * min(each, tokens - number)
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            entry["sent_s"].append(time.monotonic())
            _send_event(writer, {"choices": [{"index": 0, **choice, "finish_reason": None}]})
        last = {"delta": {}} if is_chat else {"text": ""}
        _send_event(writer, {"choices": [{"index": 0, **last, "finish_reason": "length"}]})
        if "usage" in self.features:
            _send_event(writer, {"choices": [], "usage": usage})
        _send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _break_off(writer: asyncio.StreamWriter, fail: str) -> None:
    if fail == "event":
        _send_event(writer, {"error": {"message": "the engine died", "code": 500}})
    if fail in ("event", "silent"):
        writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _sleep_until(at_s: float) -> None:
    wait_s = at_s - time.monotonic()
    if wait_s > 0:
        await asyncio.sleep(wait_s)


def _send(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _send_json(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    _send(writer, status, "application/json", json.dumps(value).encode())


def _send_event(writer: asyncio.StreamWriter, value: object) -> None:
    _send_chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _send_chunk(writer: asyncio.StreamWriter, text: bytes) -> None:
    writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--default", default="first=100 gap=50", help="program of prompts that have none")
    parser.add_argument("--features", default="metrics,tokenize,usage")
    arguments = parser.parse_args()
    stub = Stub(
        dict(word.split("=", 1) for word in arguments.default.split()), frozenset(arguments.features.split(","))
    )
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
