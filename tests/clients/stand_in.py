"""A proxy that gives the placeholder ids of OpenAI's own tests a meaning.

Those tests ask a mock server for `response_id`, `completion_id`, `conv_123`, `file_id`, `batch_id` and `input_file_id`.
Before a request with one of these is passed on, a response, completion, conversation, file or batch is made on the
server, and its id takes the place of the placeholder. So does that of an object for `after=after`.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
_RESPONSE = re.compile(r"(?<=/responses/)(response_id|resp_677efb5139a88190b512bc3fef8e535d)(?=$|[/?])")
_CHAT = re.compile(r"(?<=/chat/completions/)completion_id(?=$|[/?])")
_CONVERSATION = re.compile(r"(?<=/conversations/)conv_123(?=$|[/?])")
_KEPT = ("content-type", "x-request-id", "openai-processing-ms", "retry-after")


class _Making:
    """Makes objects on the server behind the proxy."""

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model

    def file(self) -> str:
        data = (json.dumps(_LINE) + "\n").encode()
        return self._id(self._http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)}))

    def batch(self) -> str:
        body = {"input_file_id": self.file(), "endpoint": "/v1/completions", "completion_window": "24h"}
        return self._id(self._http.post("/v1/batches", json=body))

    def chat(self) -> str:
        # The client's type of a stored message, strictly taken, is a message of the assistant.
        body = {"model": self._model, "messages": [{"role": "assistant", "content": "Hello"}], "max_tokens": 1}
        return self._id(
            self._http.post("/v1/chat/completions", json={**body, "store": True, "metadata": {"foo": "string"}})
        )

    def conversation(self) -> str:
        items = [{"type": "message", "role": "user", "content": "Hello", "id": "msg_abc"}]
        return self._id(self._http.post("/v1/conversations", json={"items": items}))

    def response(self, *, is_unfinished: bool) -> str:
        body = {"model": self._model, "input": "Hello", "background": is_unfinished}
        return self._id(
            self._http.post("/v1/responses", json={**body, "max_output_tokens": 2000 if is_unfinished else 16})
        )

    @staticmethod
    def _id(answer: httpx.Response) -> str:
        return answer.raise_for_status().json()["id"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    http: httpx.Client
    making: _Making

    def do_GET(self) -> None:
        path = self.path
        if _RESPONSE.search(path):
            path = _RESPONSE.sub(self.making.response(is_unfinished=path.endswith("/cancel")), path)
        if _CHAT.search(path):
            made = self.making.chat()
            path = _CHAT.sub(made, path).replace("after=after", f"after={made}-0")
        elif "/chat/completions?" in path:
            path = path.replace("after=after", f"after={self.making.chat()}").replace("model=model&", "")
        if _CONVERSATION.search(path):
            path = _CONVERSATION.sub(self.making.conversation(), path)
        if "/files/file_id" in path:
            path = path.replace("file_id", self.making.file())
        if "/batches/batch_id" in path:
            path = path.replace("batch_id", self.making.batch())
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if b'"input_file_id":"input_file_id"' in body:
            body = body.replace(b'"input_file_id":"input_file_id"', f'"input_file_id":"{self.making.file()}"'.encode())
        headers = {name: self.headers[name] for name in ("content-type", "authorization") if name in self.headers}
        answer = self.http.request(self.command, path, content=body, headers=headers)
        self.send_response(answer.status_code)
        for name in _KEPT:
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def stand_in(http: httpx.Client, model: str) -> Iterator[str]:
    """Serve on a free port until the block ends; enter it with the address."""
    handler = type("Handler", (_Handler,), {"http": http, "making": _Making(http, model)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
