"""Small requests that stand for much: it is counted before it is decoded, decoded once, and never on the event loop."""

import asyncio
import contextlib
import datetime
import socket
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.api.test_responses import PATH, body, script
from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, until, with_server
from tiercel.server.api.response_input import MAX_CONVERSATION, ResponseInput
from tiercel.server.api.stored_items import Item, StoredItem, decode_item, encode_item
from tiercel.server.api.stored_response import StoredResponse, StoredTurn
from tiercel.server.http.watch import ClientGoneError
from tiercel.server.text.template_frames import RenderJob
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.text.tokenizer import TextCodec
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import AdmissionError, InvariantError
from tiercel.values.units import KIB, MIB


def _message(id: str, text: str, role: str = "user") -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": id, "role": role, "content": [{"type": kind, "text": text}]}


def _stored(id: str, text: str, role: str = "user") -> StoredItem:
    return encode_item(_message(id, text, role))


def _conversation(*turns: tuple[str, str]) -> StoredTurn:
    turn = None
    for number, (question, answer) in enumerate(turns):
        turn = StoredTurn(turn, [_stored(f"q{number}", question)], [_stored(f"a{number}", answer, "assistant")])
    assert turn is not None
    return turn


def _texts(input: ResponseInput) -> list[object]:
    return [message.content for message in input.messages()]


def _read(
    parent: StoredTurn | None, *items: Item | StoredItem, truncates: bool = False, limit_bytes: int = 8 * MIB
) -> ResponseInput:
    return ResponseInput(parent, items, None, truncates=truncates, limit_bytes=limit_bytes)


def test_an_item_that_is_referred_to_a_thousand_times_is_decoded_once_and_counted_a_thousand_times() -> None:
    item = _stored("m", "x" * 8000)
    input = _read(None, *[item] * 1000)
    assert input.expanded_bytes >= 1000 * 8000
    tracemalloc.start()
    messages = input.messages()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(messages) == 1000
    assert len({id(message.content) for message in messages}) == 1
    assert peak < 4 * MIB  # the objects; with a text for each of them it would be 8 MB more


def test_what_a_request_refers_to_has_the_limit_of_a_body() -> None:
    item = _stored("m", "x" * 1000)
    most = 50 * len(item.encoded)
    _read(None, *[item] * 50, limit_bytes=most)
    with pytest.raises(AdmissionError) as refused:
        _read(None, *[item] * 51, limit_bytes=most)
    assert (refused.value.status, refused.value.code, refused.value.param) == (413, "request_too_large", "input")
    assert str(most) in refused.value.message


def test_a_conversation_has_the_limit_of_a_body_and_its_references_count() -> None:
    parent = _conversation(("one", "1" * 1000), ("two", "2" * 1000))
    _read(parent, limit_bytes=parent.item_bytes)
    for limit_bytes, items in ((parent.item_bytes - 1, ()), (parent.item_bytes + 5, (_stored("r", "x"),))):
        with pytest.raises(AdmissionError) as refused:
            _read(parent, *items, limit_bytes=limit_bytes)
        assert (refused.value.status, refused.value.param) == (413, "previous_response_id")


def test_truncation_reads_the_latest_turns_alone() -> None:
    opening = StoredTurn(None, [_stored("s", "Be short.", "system")])
    turn = opening
    for number in range(2000):
        turn = StoredTurn(
            turn, [_stored(f"q{number}", f"question {number}")], [_stored(f"a{number}", "b", "assistant")]
        )
    input = _read(turn, _message("m", "now"), truncates=True, limit_bytes=1000)
    texts = _texts(input)
    assert texts[0] == "Be short."
    assert texts[1] in {f"question {number}" for number in range(1990, 2000)}
    assert texts[-3:] == ["question 1999", "b", "now"]
    assert input.expanded_bytes < 40 * KIB


def test_turns_that_cannot_fit_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def decode(item: StoredItem) -> Item:
        decoded.append(item.id)
        return decode_item(item)

    monkeypatch.setattr("tiercel.server.api.response_input.decode_item", decode)
    opening = StoredTurn(None, [_stored("s", "Be short.", "system")])
    turn = opening
    for number in range(20):
        turn = StoredTurn(turn, [_stored(f"q{number}", "x" * 1000)], [_stored(f"a{number}", "y", "assistant")])

    def texts(*items: Item | StoredItem, parent: StoredTurn | None = turn, most: int = 3100) -> list[int]:
        decoded.clear()
        input = ResponseInput(
            parent, items, None, truncates=True, limit_bytes=8 * MIB, may_fit=lambda letters: letters <= most
        )
        messages = input.messages()
        assert input.expanded_bytes < 8 * most + 20 * KIB, "what is left out is not counted"
        return [len(str(message.content)) for message in messages]

    assert texts(_message("m", "now")) == [9, 1000, 1, 1000, 1, 1000, 1, 3]
    assert decoded == ["s", "q17", "a17", "q18", "a18", "q19", "a19"]
    assert texts(_message("m", "now"), most=5) == [9, 3], "the last turn stays"
    assert decoded == ["s"]
    assert texts(*[_stored("r", "z" * 4000)] * 3, _message("m", "now"), parent=None) == [3]
    assert texts(_message("m", "w" * 9000), _message("n", "now"), parent=None) == [9000, 3], "what is sent is checked"
    assert not decoded


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_decoded(
    model_folder: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Running) -> None:
        asked = [{"role": "user", "content": text} for text in ("a " * 200_000, "hi")]
        first = (await server.http.post(PATH, json=body(asked, truncation="auto"))).json()
        monkeypatch.setattr("tiercel.server.api.response_input.decode_item", None)
        refused = await server.http.post(PATH, json=body("go on", previous_response_id=first["id"]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")

    with_server(server_settings(model_folder), test, script(codec, "yes"))


def test_truncation_keeps_the_turn_that_a_result_belongs_to() -> None:
    call: Item = {"type": "function_call", "id": "c", "call_id": "c1", "name": "f", "arguments": "{}"}
    result: Item = {"type": "function_call_output", "id": "o", "call_id": "c1", "output": "5"}
    turn = StoredTurn(_conversation(("old", "x" * 5000)), [_stored("q", "new")], [encode_item(call)])
    assert _texts(_read(turn, result, truncates=True, limit_bytes=1000)) == ["new", None, "5"]
    with pytest.raises(AdmissionError) as refused:
        _read(turn, result, truncates=True, limit_bytes=100)
    assert (refused.value.status, refused.value.param) == (413, "previous_response_id")
    assert _texts(_read(turn, _message("m", "other"), truncates=True, limit_bytes=100)) == ["other"]


def test_a_conversation_of_very_many_items_is_refused_or_truncated_without_being_read() -> None:
    turn = _conversation(("first", "1"))
    item = _stored("q", "x")
    for _ in range(MAX_CONVERSATION // 1000 + 1):
        turn = StoredTurn(turn, [item] * 1000)
    with pytest.raises(AdmissionError) as refused:
        _read(turn)
    assert (refused.value.status, refused.value.param) == (400, "previous_response_id")
    assert str(MAX_CONVERSATION) in refused.value.message
    assert len(_read(turn, _message("m", "now"), truncates=True).messages()) == 2048


def test_thoughts_of_many_items_are_joined_once() -> None:
    thought: Item = {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "ab"}],
    }
    (message,) = _read(None, *[encode_item(thought)] * 2000).messages()
    assert message.reasoning_content == "ab" * 2000


def test_an_item_is_never_decoded_on_the_event_loop() -> None:
    async def decode() -> None:
        decode_item(_stored("m", "x"))

    with pytest.raises(InvariantError):
        asyncio.run(decode())


def test_decoding_ends_when_nobody_waits_for_it() -> None:
    input = _read(_conversation(("one", "1")))
    input.abandon()
    with pytest.raises(ClientGoneError):
        input.messages()


_MAY_FIT = 32_768
"""A context into which 200,000 letters may fit, as far as their number tells."""


class _Gated:
    """A template whose renderings wait while its gate is closed."""

    def __init__(
        self, source: str, specials: Mapping[str, str], tool_source: str | None, gate: threading.Event
    ) -> None:
        self._renderer = TemplateRenderer(source, specials, tool_source, today=datetime.datetime.now)
        self._gate = gate

    @property
    def variables(self) -> frozenset[str]:
        return self._renderer.variables

    @property
    def literals(self) -> frozenset[str]:
        return self._renderer.literals

    def render(self, job: RenderJob) -> str:
        assert self._gate.wait(20)
        return self._renderer.render(job)

    def close(self) -> None:
        self._renderer.close()


def _with_gate(
    settings: ServerSettings, test: Callable[[Running, threading.Event], Awaitable[None]], script: Script
) -> None:
    gate = threading.Event()
    gate.set()

    async def run() -> None:
        def gated(source: str, specials: Mapping[str, str], tool_source: str | None) -> _Gated:
            return _Gated(source, specials, tool_source, gate)

        async with running(settings, script, open_template=gated) as server:
            try:
                await test(server, gate)
            finally:
                gate.set()

    asyncio.run(run())


async def _store(server: Running, *texts: str) -> dict[str, Any]:
    items = [{"role": "user", "content": text} for text in (*texts, "hi")]
    answer = await server.http.post(PATH, json=body(items, truncation="auto", max_output_tokens=9))
    assert answer.status_code == 200, answer.text
    listed = (await server.http.get(f"{PATH}/{answer.json()['id']}/input_items", params={"order": "asc"})).json()
    return {"id": answer.json()["id"], "items": [item["id"] for item in listed["data"]]}


def test_what_a_request_stands_for_is_held_in_the_budget_of_bodies_and_given_back(
    model_folder: Path, codec: TextCodec
) -> None:
    async def test(server: Running, gate: threading.Event) -> None:
        stored = await _store(server, "x" * 200_000)
        bodies = server.context.bodies
        asked = {
            "reference": body(
                [{"type": "item_reference", "id": stored["items"][0]}, {"role": "user", "content": "hi"}]
            ),
            "conversation": body("hi", previous_response_id=stored["id"]),
        }
        for request in asked.values():
            for path, more in ((PATH, {}), (f"{PATH}/input_tokens", {}), (PATH, {"background": True})):
                gate.clear()
                asking = asyncio.create_task(
                    server.http.post(path, json={**request, **more, "truncation": "auto", "max_output_tokens": 9})
                )
                await until(lambda: bodies.held_bytes > 200_000)
                full = await server.http.post(PATH, json={**request, "truncation": "auto"})
                assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
                gate.set()
                assert (await asking).status_code == 200
                await until(lambda: bodies.held_bytes == 0)

    settings = replace(server_settings(model_folder), max_pending_body_bytes=300_000)
    _with_gate(settings, test, script(codec, max_model_len=_MAY_FIT))


def test_a_client_that_leaves_and_a_deletion_while_items_are_decoded_leave_nothing(
    model_folder: Path, codec: TextCodec
) -> None:
    async def test(server: Running, gate: threading.Event) -> None:
        stored, store, bodies = await _store(server, "x" * 200_000), server.context.store, server.context.bodies
        gate.clear()
        request = body("hi", previous_response_id=stored["id"], truncation="auto")
        leaving = asyncio.create_task(server.http.post(PATH, json=request))
        await until(lambda: bodies.held_bytes > 200_000)
        assert (await server.http.delete(f"{PATH}/{stored['id']}")).status_code == 200
        assert store.num_bytes > 200_000  # it is in use
        leaving.cancel()
        await until(lambda: bodies.held_bytes == 0)
        await until(lambda: store.num_bytes == 0)
        gate.set()

    _with_gate(server_settings(model_folder), test, script(codec, max_model_len=_MAY_FIT))


def test_the_stored_items_of_many_requests_are_counted_once(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        stored = await _store(server, "x" * 100_000)
        before = server.context.store.num_bytes
        references = [{"type": "item_reference", "id": stored["items"][0]}] * 20
        ids: list[str] = []
        for _ in range(3):
            answer = await server.http.post(
                PATH,
                json=body([*references, {"role": "user", "content": "hi"}], truncation="auto", max_output_tokens=9),
            )
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
        assert server.context.store.num_bytes - before < 20_000
        refused = await server.http.post(PATH, json=body([*references * 5]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "input")
        listed = await server.http.get(f"{PATH}/{ids[-1]}/input_items", params={"order": "asc"})
        assert [item["id"] for item in listed.json()["data"]][:20] == [stored["items"][0]] * 20
        server.context.store.check_integrity()

    with_server(replace(server_settings(model_folder), max_body_bytes=4 * MIB), test, script(codec))


async def _connect(server: Running, path: str) -> socket.socket:
    """Ask for a path over a connection whose buffers in the kernel are small, and read nothing."""
    for listener in server.server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * KIB)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * KIB)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


def _unsent(server: Running) -> list[int]:
    return [one.transport.get_write_buffer_size() for one in server.server.server_state.connections]


def test_readers_that_do_not_read_hold_a_piece_each_and_the_stored_bytes_once(
    model_folder: Path, codec: TextCodec
) -> None:
    async def test(server: Running) -> None:
        stored, store = await _store(server, "x" * MIB), server.context.store
        size = store.num_bytes
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(await _connect(server, f"{PATH}/{stored['id']}/input_items"))
            await until(lambda: sum(size > 0 for size in _unsent(server)) == 10)
            assert max(_unsent(server)) <= 2 * 64 * KIB
            assert store.num_bytes == size
            assert (await server.http.delete(f"{PATH}/{stored['id']}")).status_code == 200
            assert store.item("default", stored["items"][0]) is None
            assert MIB < store.num_bytes <= size  # counted while they are sent
        await until(lambda: store.num_bytes == 0)

    with_server(server_settings(model_folder), test, script(codec))


def test_a_stream_that_is_made_anew_is_counted_and_gives_way(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer, store = (await server.http.post(PATH, json=body())).json(), server.context.store
        entry = store.get("default", StoredResponse, answer["id"])
        assert entry is not None
        before = entry.before.replace(b'"instructions":null', b'"instructions":"%b"' % (b"x" * 200_000))
        store.put("default", StoredResponse(entry.id, before, entry.after, entry.turn, is_over=True))
        bodies, path = server.context.bodies, f"{PATH}/{entry.id}?stream=true"
        with await _connect(server, path):
            await until(lambda: bodies.held_bytes > 400_000)
            small = await server.http.post(PATH, json=body("hi"))
            assert small.status_code == 200
            whole = await server.http.post(PATH, json=body("y" * 900_000))  # the larger of the two gives way
            assert whole.json()["error"]["code"] == "context_length_exceeded"
            await until(lambda: bodies.held_bytes == 0)
        text = (await server.http.get(path)).text
        assert text.count("x" * 200_000) == 3
        after = (await server.http.get(f"{path}&starting_after=6")).text
        assert text.endswith(after)
        assert after.count("event: ") == text.count("event: ") - 7
        await until(lambda: bodies.held_bytes == 0)

    with_server(replace(server_settings(model_folder), max_pending_body_bytes=2_000_000), test, script(codec))


def test_instructions_count_until_their_answer_is_sent(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answers = server.context.answers
        asking = asyncio.create_task(server.http.post(PATH, json=body(instructions="word " * 40, stream=True)))
        await until(lambda: bool(server.engine.running))
        assert answers.held_bytes >= 3 * 200
        assert (await asking).status_code == 200
        await until(lambda: answers.held_bytes == 0)
        room = answers.reserve_bytes(4 * MIB - 100)
        full = await server.http.post(PATH, json=body(instructions="word " * 40, stream=True))
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        room.release()

    settings = replace(server_settings(model_folder), max_answer_bytes=MIB)
    with_server(settings, test, script(codec, "Hello there, world!", step_s=0.02))
