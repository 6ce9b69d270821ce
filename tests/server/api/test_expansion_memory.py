"""Small requests that stand for much, against the real process: its memory, and the health of others meanwhile."""

import json
import re
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.test_launch import Started, started
from tiercel.values.units import KIB, MIB

MAX_GROWTH_BYTES = 64 * MIB
MAX_HEALTH_S, MAX_SLOWEST_S = 0.25, 2.0  # of nearly all, and of all on a machine with other work
TEXT = "a " * MIB  # 2 MiB
PARALLEL = 64


def _rss_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * KIB


@contextmanager
def _watched(server: Started) -> Iterator[None]:
    """Check what the block takes: the growth of the process, and the time of an answer about the health."""
    times, peak, is_over = list[float](), [0], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not is_over.wait(0.01):
                begin_s = time.perf_counter()
                assert http.get("/health").status_code == 200
                times.append(time.perf_counter() - begin_s)

    def look() -> None:
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], _rss_bytes(server.process.pid))

    before = _rss_bytes(server.process.pid)
    threads = [threading.Thread(target=one) for one in (ask, look)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.3)
        yield
        time.sleep(0.5)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert peak[0] - before < MAX_GROWTH_BYTES
    assert len(times) > 20
    assert statistics.quantiles(times, n=20)[-1] < MAX_HEALTH_S
    assert max(times) < MAX_SLOWEST_S


def _ask(server: Started, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/responses", json={"max_output_tokens": 8, "truncation": "auto", **body}, timeout=120
    )


def _item(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _store(server: Started, *texts: str, **more: object) -> str:
    answer = _ask(server, {"input": [_item(text) for text in (*texts, "hi")], **more})
    assert answer.status_code == 200, answer.text[:500]
    return answer.json()["id"]


def _all_at_once(server: Started, body: dict[str, Any], path: str = "/v1/responses") -> Counter[int]:
    """Send a body over many connections; return the statuses. Plain sockets, so that the client takes little time."""
    place = urlsplit(server.url)
    text = json.dumps({"max_output_tokens": 8, "truncation": "auto", **body})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()
    statuses: Counter[int] = Counter()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((place.hostname, place.port), 60)) for _ in range(PARALLEL)
        ]
        for client in clients:
            client.sendall(request)
        for client in clients:
            statuses[int(client.recv(16)[9:12])] += 1
            while client.recv(64 * KIB):
                pass
    return statuses


@pytest.mark.slow
def test_references_conversations_and_readers_leave_the_process_small_and_responsive(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "0.001"}) as server, ExitStack() as stack:
        server.await_url()
        id = _store(server, TEXT)
        listed = httpx.get(f"{server.url}/v1/responses/{id}/input_items?order=asc&limit=1").json()
        reference = {"type": "item_reference", "id": listed["data"][0]["id"]}
        last = id
        for _ in range(12):
            last = _store(server, TEXT, previous_response_id=last)
        _store(server, "warm")
        with _watched(server):
            refused = _ask(server, {"input": [reference] * 430})
            assert (refused.status_code, refused.json()["error"]["param"]) == (413, "input")
        for body in (
            {"input": [*[reference] * 3, _item("hi")]},
            {"input": "hi", "previous_response_id": last},
            {"input": "hi", "previous_response_id": last, "background": True},
            {"input": [*[reference] * 2, _item("hi")], "previous_response_id": last, "store": False},
        ):
            with _watched(server):
                statuses = _all_at_once(server, body)
            assert set(statuses) <= {200, 503}
            assert statuses[200]
        with _watched(server):
            body = {"input": "hi", "previous_response_id": last}
            statuses = _all_at_once(server, body, "/v1/responses/input_tokens")
        assert set(statuses) <= {200, 503}
        place = urlsplit(server.url)
        with _watched(server):
            for number in range(2 * PARALLEL):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
                client.connect((place.hostname, place.port))
                path = ("/input_items", "", "?stream=true&starting_after=0")[number % 3]
                client.sendall(f"GET /v1/responses/{last}{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(3)
            assert httpx.delete(f"{server.url}/v1/responses/{last}").status_code == 200
