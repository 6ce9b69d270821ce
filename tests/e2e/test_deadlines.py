"""Requests whose time is up, at the real engine: in the queue, while tokens come, and swapped out."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, daemon

pytestmark = pytest.mark.slow  # tests/server/api/test_deadlines.py has the same with a simulated engine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = {TEXT: {"prompt": "Once"}, CHAT: {"messages": [{"role": "user", "content": "Hello!"}]}}
MOST_S = 30.0  # a timeout after which even a busy machine has computed a token

Json = dict[str, Any]  # Any: a JSON document


def endless(route: str = TEXT, **fields: object) -> Json:
    """The body of a request that ends only at the context of the model."""
    return {**PROMPTS[route], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, **fields}


def ended(running: Daemon, route: str, **fields: object) -> httpx.Response:
    """Return the answer of an endless request that its deadline ended after its first token."""
    timeout_s = 0.4
    while timeout_s < MOST_S:
        answer = running.http.post(route, json=endless(route, timeout=timeout_s, **fields))
        if answer.status_code == 200:
            return answer
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        timeout_s *= 2
    raise AssertionError("no token")


@contextmanager
def occupied(running: Daemon) -> Iterator[list[str]]:
    """Keep an endless stream running; yield its lines, which are complete at the end."""
    heard: list[str] = []

    def read() -> None:
        body = endless(stream=True, max_tokens=2500)
        with httpx.stream("POST", f"{running.url}{TEXT}", json=body, timeout=60) as answer:
            heard.extend(answer.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    while running.metric("vllm:num_requests_running") < 1:
        time.sleep(0.01)
    yield heard
    reader.join(60)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that computes one sequence at a time."""
    with daemon(tmp_path_factory.mktemp("narrow"), "--max-num-seqs", "1") as running:
        yield running


@pytest.mark.parametrize("route", [TEXT, CHAT])
def test_a_whole_answer_keeps_the_text_that_it_has_at_its_deadline(served: Daemon, route: str) -> None:
    body = ended(served, route).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["timeout"]
    assert 0 < body["usage"]["completion_tokens"] < 4000
    served.assert_nothing_held()


@pytest.mark.parametrize("route", [TEXT, CHAT])
def test_a_stream_ends_at_its_deadline(served: Daemon, route: str) -> None:
    text = ended(served, route, stream=True).text
    assert text.count('"finish_reason":"timeout"') == 1
    assert text.endswith("data: [DONE]\n\n")
    served.assert_nothing_held()


def test_choices_of_several_prompts_end_at_one_deadline(served: Daemon) -> None:
    body = ended(served, TEXT, prompt=["Once", "Twice"], n=3).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["timeout"] * 6
    served.assert_nothing_held()


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_in_the_queue_is_504_and_the_running_stream_goes_on(narrow: Daemon, stream: bool) -> None:
    before = narrow.metric("tiercel_timeouts_total")
    with occupied(narrow) as heard:
        answer = narrow.http.post(TEXT, json=endless(stream=stream, timeout=0.05))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert heard[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"length"' in "".join(heard)
    assert narrow.metric("tiercel_timeouts_total") == before + 1
    narrow.assert_nothing_held()


def test_clients_that_leave_at_their_deadlines_leave_nothing_behind(served: Daemon) -> None:
    def ask(number: int) -> None:
        timeout_s = 0.3 + 0.01 * number
        body = endless(timeout=timeout_s, stream=number % 2 == 0)
        with suppress(httpx.TimeoutException):
            httpx.post(f"{served.url}{TEXT}", json=body, timeout=0.35)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(ask, range(10)))
    served.assert_nothing_held()


def test_swapped_out_sequences_end_at_their_deadline_and_free_their_blocks(tmp_path: Path) -> None:
    """Six sequences in a pool for about two: at their common deadline most of them are swapped out."""
    flags = ("--cpu-device-pool", "--num-gpu-blocks-override", "40", "--max-model-len", "480", "--kv-host-size", "64M")
    with daemon(tmp_path, *flags, "--preemption-mode", "swap") as small:
        wish = endless(prompt=[[number] * 40 for number in range(40, 46)], max_tokens=400)
        ends: set[str] = set()
        timeout_s, preempted = 0.4, 0.0
        while not ("timeout" in ends and small.metric("vllm:num_preemptions_total") > preempted):
            assert timeout_s < MOST_S
            preempted = small.metric("vllm:num_preemptions_total")
            answer = small.http.post(TEXT, json={**wish, "timeout": timeout_s})
            ends = {choice["finish_reason"] for choice in answer.json().get("choices", ())}
            small.assert_nothing_held()
            timeout_s *= 1.3
        again = small.complete("Once", timeout=MOST_S)
        assert again.json()["choices"][0]["finish_reason"] in ("stop", "length")
        small.assert_nothing_held()
