"""The command `tiercel chat` with a scripted server."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

CHAT = [sys.executable, "-c", "import sys; from tiercel.cli.main import main; sys.exit(main())", "chat"]


class ScriptedServer(ThreadingHTTPServer):
    """A server that records requests and sends the answers set by the test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.events: list[str] = [piece("Hel"), piece("lo"), "[DONE]"]
        self.status = 200
        self.may_end = threading.Event()  # before the last event
        self.may_end.set()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        if self.server.status != 200:
            self._reply(self.server.status, json.dumps({"error": {"message": "the queue is full"}}))
            return
        self.send_response(200)
        self.end_headers()
        for event in self.server.events:
            if event is self.server.events[-1]:
                self.server.may_end.wait()
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()

    def _reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def piece(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.may_end.set()
    server.shutdown()
    thread.join()
    server.server_close()


def chat(server: ScriptedServer, questions: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    address = () if "--url" in flags else ("--url", server.url)
    return subprocess.run(
        [*CHAT, *address, *flags], input=questions, capture_output=True, text=True, check=False, timeout=60
    )


def test_piped_lines_are_turns_of_one_conversation_and_the_output_is_the_answers(server: ScriptedServer) -> None:
    ran = chat(server, "one\n\ntwo\n", "--system", "Be short.", "--temperature", "0", "--max-tokens", "9")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "Hello\nHello\n", "")
    first, second = server.requests
    assert (first["model"], first["stream"], first["temperature"], first["max_tokens"]) == ("first", True, 0.0, 9)
    assert [message["content"] for message in first["messages"]] == ["Be short.", "one"]
    assert [message["content"] for message in second["messages"]] == ["Be short.", "one", "Hello", "two"]


def test_model_and_key_are_sent_as_given(server: ScriptedServer) -> None:
    assert chat(server, "hi\n", "--model", "second", "--api-key", "secret").returncode == 0
    assert (server.requests[0]["model"], server.keys) == ("second", ["Bearer secret"])


def test_an_address_may_end_in_v1(server: ScriptedServer) -> None:
    assert chat(server, "hi\n", "--url", f"{server.url}/v1/").returncode == 0


def test_an_error_of_the_server_is_one_line_and_exit_code_1(server: ScriptedServer) -> None:
    server.status = 503
    ran = chat(server, "hi\n")
    assert (ran.returncode, ran.stderr) == (1, "tiercel: error: 503: the queue is full\n")


def test_an_error_in_the_middle_of_a_stream_is_reported(server: ScriptedServer) -> None:
    server.events = [piece("Hel"), json.dumps({"error": {"message": "the engine died"}}), "[DONE]"]
    ran = chat(server, "hi\n")
    assert ran.returncode == 1
    assert ran.stderr.endswith("tiercel: error: the engine died\n")


@pytest.mark.parametrize("event", ["{", "[]", "{}", '{"choices": [{}]}', '{"choices": [{"delta": null}]}'])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_a_stream_of_another_kind_is_one_line_and_exit_code_1(server: ScriptedServer, event: str) -> None:
    server.events = [event]
    ran = chat(server, "hi\n")
    assert ran.returncode == 1
    assert ran.stderr == "tiercel: error: the server sent an event that does not follow the OpenAI API\n"


def test_a_server_that_is_not_there_is_one_line_and_exit_code_1(server: ScriptedServer) -> None:
    ran = chat(server, "hi\n", "--url", "http://127.0.0.1:1")
    assert ran.returncode == 1
    assert ran.stderr.startswith("tiercel: error: cannot reach http://127.0.0.1:1: is `tiercel serve` running there?")
    assert ran.stderr.count("\n") == 1


def test_an_answer_cannot_send_commands_to_the_terminal(server: ScriptedServer) -> None:
    server.events = [piece("a\x1b[2Jb\x07c\td\u00e9")]
    assert chat(server, "hi\n").stdout == "a\ufffd[2Jb\ufffdc\td\u00e9\n"


class Terminal:
    """A person at a terminal: types, and waits for words that have not been read yet."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def wait_for(self, words: bytes, within_s: float = 240.0) -> None:
        deadline = time.monotonic() + within_s
        while words not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {words!r} after {self._unread!r}"
            self._unread += os.read(self._descriptor, 4096)
        self._unread = self._unread.partition(words)[2]


@pytest.fixture
def at_terminal(server: ScriptedServer) -> Iterator[tuple[Terminal, "subprocess.Popen[bytes]"]]:
    """The chat as it runs in a terminal of its own."""
    ours, theirs = os.openpty()
    take_it = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "  # so that Ctrl-C is a signal
    command = [*CHAT[:2], take_it + CHAT[2], *CHAT[3:], "--url", server.url]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        yield Terminal(ours), process
        process.kill()
    os.close(ours)


def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(
    server: ScriptedServer, at_terminal: tuple[Terminal, "subprocess.Popen[bytes]"]
) -> None:
    terminal, process = at_terminal
    server.may_end.clear()
    terminal.wait_for(b"> ")
    terminal.type(b"one\n")
    terminal.wait_for(b"Hello")
    terminal.type(b"\x03")
    terminal.wait_for(b"(stopped)")
    terminal.wait_for(b"> ")
    server.may_end.set()
    terminal.type(b"two\n")
    terminal.wait_for(b"Hello")
    terminal.wait_for(b"> ")
    terminal.type(b"\x04")
    assert process.wait(timeout=240) == 0
    assert [message["content"] for message in server.requests[1]["messages"]] == ["one", "Hello", "two"]
