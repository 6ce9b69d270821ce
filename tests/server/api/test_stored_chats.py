"""/v1/chat/completions with `store`: what is stored, its lists, its changes, its limits."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, until, with_server
from tiercel.server.api.chat_session import ChatKeeper
from tiercel.server.api.generation_config import SamplingDefaults
from tiercel.server.api.object_store import ObjectStore, StoreLimits
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.stored_chat import StoredChat
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.clock import ManualClock

PATH = "/v1/chat/completions"


def script(codec: TextCodec, text: str = "Hello there", **more: Any) -> Script:
    (end,) = codec.encode("</s>", add_special_tokens=False)
    return Script(reply=(*codec.encode(text, add_special_tokens=False), end), end_token=end, **more)


async def _create(server: Running, content: str = "hello", **more: object) -> dict[str, Any]:
    answer = await server.http.post(PATH, json=chat_body(content, store=True, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _stream(server: Running, **more: object) -> str:
    """Read a whole stream, and return the id of its completion."""
    answer = await server.http.post(PATH, json=chat_body("hello", store=True, stream=True, **more))
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(lines[0].removeprefix("data: "))["id"]


async def _ids(server: Running, **query: str | int) -> list[str]:
    return [one["id"] for one in (await server.http.get(PATH, params=query)).json()["data"]]


def test_a_stored_completion_is_the_answer_with_the_fields_of_its_request(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = await _create(server, metadata={"a": "b"}, n=2, seed=5, temperature=0.5, user="me", logprobs=True)
        found = (await server.http.get(f"{PATH}/{made['id']}")).json()
        assert [choice.pop("logprobs") for choice in found["choices"]] == [None, None]
        for choice in made["choices"]:
            assert choice.pop("logprobs")["content"]
        shared = ("id", "object", "created", "model", "choices", "usage", "system_fingerprint")
        assert {name: found[name] for name in shared} == {name: made[name] for name in shared}
        assert (found["metadata"], found["seed"], found["temperature"]) == ({"a": "b"}, 5, 0.5)
        assert (found["input_user"], found["tools"], found["top_p"]) == ("me", None, 1.0)
        listed = (await server.http.get(PATH)).json()
        assert {**listed, "data": []} == {
            "object": "list", "data": [], "first_id": made["id"], "last_id": made["id"], "has_more": False
        }  # fmt: skip
        assert [{**one, "choices": []} for one in listed["data"]] == [{**found, "choices": []}]
        server.context.store.check_integrity()

    with_server(server_settings(model_folder), test, script(codec))


def test_a_stream_is_stored_as_the_whole_answer_would_be(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        whole = await _create(server, n=2)
        for more in ({}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True, "logprobs": True}):
            id = await _stream(server, n=2, **more)
            found = (await server.http.get(f"{PATH}/{id}")).json()
            assert (found["choices"], found["usage"]) == (whole["choices"], whole["usage"])

    with_server(server_settings(model_folder), test, script(codec))


def test_the_messages_of_a_completion_are_listed_in_pages(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]
        talk = [
            {"role": "system", "content": "Be short.", "unknown": "x" * 5000},
            {"role": "user", "content": parts, "name": "anna"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Really?"},
        ]
        made = await server.http.post(PATH, json={"model": MODEL, "messages": talk, "store": True})
        path = f"{PATH}/{made.json()['id']}/messages"
        answer = await server.http.get(path, params={"limit": 2})
        page = answer.json()
        assert len(answer.content) < 600  # of the other messages, and of unknown fields, nothing is read
        assert [one["content"] for one in page["data"]] == ["Be short.", None]
        assert page["data"][1]["content_parts"] == parts
        assert (page["data"][1]["name"], page["has_more"]) == ("anna", True)
        rest = (await server.http.get(path, params={"after": page["last_id"]})).json()
        assert ([one["content"] for one in rest["data"]], rest["has_more"]) == (["Yes.", "Really?"], False)
        assert (await server.http.get(path, params={"limit": 0})).json() == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": True
        }  # fmt: skip
        assert (await server.http.get(path, params={"order": "desc"})).json()["data"][0]["content"] == "Really?"

    with_server(server_settings(model_folder), test, script(codec))


def test_calls_of_stored_messages_have_their_arguments_as_text(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok", "tool_calls": [call]}]
        made = await server.http.post(PATH, json={"model": MODEL, "messages": talk, "store": True})
        assert made.status_code == 200, made.text
        page = (await server.http.get(f"{PATH}/{made.json()['id']}/messages")).json()
        assert page["data"][1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": '{"x":1}'}}]

    with_server(server_settings(model_folder), test, script(codec))


def test_lists_are_filtered_and_paged_in_the_order_of_creation(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        one = (await _create(server, metadata={"kind": "a b", "n": "1"}))["id"]
        two = (await _create(server, model="alias", metadata={"kind": "c"}))["id"]
        three = (await _create(server, metadata={"kind": "a b"}))["id"]
        await server.http.get(f"{PATH}/{one}")  # a use, which does not change the order
        await server.http.post(f"{PATH}/{one}", json={"metadata": {"kind": "a b", "n": "2"}})
        assert await _ids(server) == [one, two, three]
        assert await _ids(server, order="desc", limit=2) == [three, two]
        assert await _ids(server, after=two) == [three]
        assert await _ids(server, model="alias") == [two]
        assert await _ids(server, **{"metadata[kind]": "a b"}) == [one, three]
        assert await _ids(server, **{"metadata[kind]": "a b", "metadata[n]": "2"}) == [one]
        assert await _ids(server, **{"metadata[none]": ""}) == []
        for wrong in ("limit=101", "order=up", "after=x", "metadata[]=x", "metadata[a]=" + "x" * 513, "limit=-1"):
            refused = await server.http.get(f"{PATH}?{wrong}")
            param = wrong.partition("=")[0].partition("[")[0]
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        many = "&".join(f"metadata[{number}]=x" for number in range(17))
        assert (await server.http.get(f"{PATH}?{many}")).status_code == 400

    with_server(server_settings(model_folder), test, script(codec))


def test_metadata_is_replaced_and_a_deleted_completion_is_gone(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = await _create(server, metadata={"a": "b"})
        path = f"{PATH}/{made['id']}"
        before = (await server.http.get(path)).json()
        changed = await server.http.post(path, json={"metadata": {"c": "d"}})
        assert changed.json() == {**before, "metadata": {"c": "d"}}
        assert (await server.http.post(path, json={"metadata": None})).json()["metadata"] == {}
        for wrong in ({}, {"metadata": {"a": 1}}, {"metadata": {"a": "x" * 513}}, {"metadata": "x"}):
            refused = await server.http.post(path, json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
        gone = {"id": made["id"], "object": "chat.completion.deleted", "deleted": True}
        assert (await server.http.delete(path)).json() == gone
        for method, place in (("GET", path), ("POST", path), ("DELETE", path), ("GET", f"{path}/messages")):
            answer = await server.http.request(method, place, json={"metadata": {}} if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "chat_completion_not_found")
        assert server.context.store.num_bytes == 0

    with_server(server_settings(model_folder), test, script(codec))


def test_a_completion_belongs_to_its_tenant_alone(model_folder: Path, codec: TextCodec, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: one}, {name: b, key: two}]\n")
    file.chmod(0o600)

    async def test(server: Running) -> None:
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        made = (await server.http.post(PATH, json=chat_body(store=True), headers=one)).json()
        path = f"{PATH}/{made['id']}"
        for method, place in (("GET", path), ("POST", path), ("DELETE", path), ("GET", f"{path}/messages")):
            more: dict[str, Any] = {"json": {"metadata": {}}} if method == "POST" else {}
            assert (await server.http.request(method, place, headers=two, **more)).status_code == 404
            assert (await server.http.request(method, place, **more)).status_code == 401
        assert (await server.http.get(PATH, headers=two)).json()["data"] == []
        assert len((await server.http.get(PATH, headers=one)).json()["data"]) == 1
        reference = {"input": [{"type": "item_reference", "id": f"{made['id']}-0"}]}
        assert (await server.http.post("/v1/responses", json=reference, headers=one)).status_code == 404

    with_server(server_settings(model_folder), test, script(codec), tenants_config=str(file))


def test_without_store_nothing_is_stored(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        for more in ({}, {"store": False}, {"store": None, "metadata": {"a": "b"}}):
            answer = await server.http.post(PATH, json={**chat_body(), **more})
            assert answer.status_code == 200
        assert server.context.store.num_objects == 0
        response = (await server.http.post("/v1/responses", json={"input": "hi"})).json()
        assert (await server.http.get(f"{PATH}/{response['id']}")).status_code == 404
        assert await _ids(server) == []

    with_server(server_settings(model_folder), test, script(codec))


def test_a_server_that_stores_nothing_says_so(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(PATH, json=chat_body(store=True))
        assert answer.status_code == 200
        assert "store" in answer.headers["x-tiercel-ignored-fields"]
        assert await _ids(server) == []

    with_server(server_settings(model_folder), test, script(codec), stored_responses=0)


def test_what_fails_or_is_left_is_not_stored(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        failed = await server.http.post(PATH, json=chat_body("Q", store=True, max_tokens=5))
        assert failed.status_code == 500
        async with (
            httpx.AsyncClient(base_url=server.url) as http,
            http.stream("POST", PATH, json=chat_body("left", store=True, stream=True)) as answer,
        ):
            id = json.loads((await anext(answer.aiter_lines())).removeprefix("data: "))["id"]
            assert server.context.store.num_objects == 1
            for method in ("GET", "DELETE"):  # in progress, clients do not see it
                assert (await server.http.request(method, f"{PATH}/{id}")).status_code == 404
            assert await _ids(server) == []
        await until(lambda: server.engine.live == 0)
        await until(lambda: server.context.store.num_objects == 0)
        assert server.context.store.num_bytes == 0

    (token,) = codec.encode("Q", add_special_tokens=False)
    with_server(server_settings(model_folder), test, Script(step_s=0.02, fail_prompt_with=token))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_limits_of_the_store_hold(model_folder: Path, codec: TextCodec, *, is_streamed: bool) -> None:
    async def test(server: Running) -> None:
        store = server.context.store
        make = _stream if is_streamed else _create
        for _ in range(5):
            await make(server)
        assert len(await _ids(server)) == 3
        message = {"role": "user", "content": "hi", "refusal": "x" * 1_100_000}
        big = {"model": MODEL, "messages": [message], "store": True, "max_tokens": 5}
        answer = await server.http.post(PATH, json={**big, "stream": is_streamed})
        assert answer.status_code == 200  # answered; too large to be stored
        assert store.num_bytes <= 2**20
        assert len(await _ids(server)) == 0  # the others gave way to it
        store.check_integrity()

    settings = replace(server_settings(model_folder), stored_responses=3, stored_response_tenant_bytes=2**20)
    with_server(settings, test, script(codec))


def test_the_stored_messages_are_counted_before_they_are_encoded() -> None:
    limits = StoreLimits(tenant_objects=9, tenant_bytes=10**9, total_bytes=10**9, lifetime_s=60.0)
    store = ObjectStore(lambda: limits, ManualClock(), lambda _reason, _count: None)
    parts = [{"type": "text", "text": "y" * 10_000}] * 5
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "z" * 30_000}}
    messages = [
        *[{"role": "user", "content": "ü" * 100_000, "name": "a"}] * 2,
        {"role": "user", "content": parts, "refusal": "x" * 50_000},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "x" * 20_000},
        *[{"role": "user", "content": ""}] * 100,
    ]
    body = {"messages": messages, "store": True}
    fields, head = (
        read_fields(ChatFields, body),
        ReplyHead(id="c1", created=0, model="m", with_logprobs=False, with_details=False, role="assistant"),
    )
    keeper = ChatKeeper(store, "a", head, fields, body, "request", SamplingDefaults())
    counted = keeper.expanded_bytes
    keeper.encode()
    keeper.begin()
    chat = store.get("a", StoredChat, "c1")
    assert chat is not None
    assert 500_000 < sum(map(len, chat.messages)) <= counted < 1_500_000


def test_a_page_that_is_read_stays_counted_when_it_is_deleted(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made, store = await _create(server), server.context.store
        chat = store.get("default", StoredChat, made["id"])
        assert chat is not None
        with store.read("default", [chat]):
            await server.http.delete(f"{PATH}/{made['id']}")
            assert (store.num_objects, store.num_bytes) == (0, chat.num_bytes)
        assert store.num_bytes == 0

    with_server(server_settings(model_folder), test, script(codec))
