"""The memory of the HTTP process while clients send many large bodies that do not end."""

import http.client
import json
import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tests.server.harness import text_body
from tests.server.test_launch import started
from tiercel.values.units import MIB

CONNECTIONS = 40
LENGTH = 8 * MIB - 10
MAX_RSS_BYTES = 200 * 1000 * 1000


def peak_rss_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_forty_bodies_of_eight_megabytes_leave_the_process_small_and_responsive(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "0.001"}) as server, ExitStack() as stack:
        server.await_url()
        port = urlsplit(server.url).port
        assert port is not None
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {LENGTH}\r\n\r\n"
        ).encode()
        part = b'{"prompt":"' + b"a" * (LENGTH - 1000)
        answered = 0
        for _ in range(CONNECTIONS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            client.sendall(head + part)
            answered += _is_answered(port)
        time.sleep(0.5)
        answered += _is_answered(port)
        assert answered == CONNECTIONS + 1
        assert peak_rss_bytes(server.process.pid) < MAX_RSS_BYTES


def _is_answered(port: int) -> bool:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("POST", "/v1/completions", json.dumps(text_body(max_tokens=2)), {"content-type": "application/json"})
    status = client.getresponse().status
    client.close()
    return status == 200
