"""/v1/conversations, and responses that are created in them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, until, with_server
from tiercel.server.api.object_store import ObjectStore, StoreLimits
from tiercel.server.api.stored_conversation import StoredConversation
from tiercel.server.api.stored_items import StoredItem, encode_item
from tiercel.server.api.stored_response import MAX_CONVERSATION, StoredTurn
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.clock import ManualClock
from tiercel.values.errors import AdmissionError
from tiercel.values.request import unpack_tokens

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
MIB = 2**20


def script(codec: TextCodec, text: str = "Hello there", **more: Any) -> Script:
    (end,) = codec.encode("</s>", add_special_tokens=False)
    return Script(reply=(*codec.encode(text, add_special_tokens=False), end), end_token=end, **more)


def message(text: str, role: str = "user", **more: object) -> dict[str, object]:
    return {"type": "message", "role": role, "content": text, **more}


async def _post(server: Running, path: str, status: int = 200, **body: object) -> dict[str, Any]:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def _get(server: Running, path: str, **query: str | int) -> dict[str, Any]:
    return (await server.http.get(path, params=query)).json()


async def _texts(server: Running, path: str) -> list[str]:
    """Return the texts of a conversation, the oldest first."""
    page = await _get(server, f"{path}/items", order="asc", limit=100)
    return [item["content"][0]["text"] for item in page["data"]]


def _prompt(server: Running, codec: TextCodec, index: int = -1) -> str:
    return codec.decode(list(unpack_tokens(server.engine.submitted[index].prompt)))


def test_a_conversation_is_created_changed_and_deleted(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = await _post(server, PATH, metadata={"a": "b"}, items=[message("one"), message("two", "assistant")])
        assert made["id"].startswith("conv_")
        assert {**made, "id": "", "created_at": 0} == {
            "id": "", "object": "conversation", "created_at": 0, "metadata": {"a": "b"}
        }  # fmt: skip
        path = f"{PATH}/{made['id']}"
        assert await _get(server, path) == made
        assert await _texts(server, path) == ["one", "two"]
        assert (await _post(server, path, metadata={"c": "d"})) == {**made, "metadata": {"c": "d"}}
        assert (await _post(server, path, metadata=None))["metadata"] == {}
        assert await _texts(server, path) == ["one", "two"]
        gone = (await server.http.delete(path)).json()
        assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        for method, place in (
            *[("GET", path), ("DELETE", path), ("GET", f"{path}/items"), ("GET", f"{path}/items/x")],
            *[("POST", path), ("POST", f"{path}/items"), ("DELETE", f"{path}/items/x")],
        ):
            more: dict[str, Any] = {"json": {"metadata": {}, "items": []}} if method == "POST" else {}
            answer = await server.http.request(method, place, **more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "conversation_not_found")
        assert server.context.store.num_bytes == 0

    with_server(server_settings(model_folder), test, script(codec))


def test_items_are_added_listed_retrieved_and_removed(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        path = f"{PATH}/{(await _post(server, PATH))['id']}/items"
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        added = await _post(server, path, items=[message("one"), message("x" * 5000), call])
        one, two, three = (item["id"] for item in added["data"])
        assert (added["object"], added["has_more"]) == ("list", False)
        assert (added["first_id"], added["last_id"]) == (one, three)
        own = await _post(server, path, items=[message("four", id="msg_own")])
        assert own["data"][0]["id"] == "msg_own"
        listed = await server.http.get(path, params={"limit": 1})
        assert len(listed.content) < 500  # of the others nothing is read
        assert (listed.json()["data"], listed.json()["has_more"]) == (own["data"], True)
        page = await _get(server, path, order="asc", after=one)
        assert [item["id"] for item in page["data"]] == [two, three, "msg_own"]
        assert await _get(server, f"{path}/{three}") == added["data"][2]
        conversation = (await server.http.delete(f"{path}/{two}")).json()
        assert conversation["object"] == "conversation"
        for method in ("GET", "DELETE"):
            missing = await server.http.request(method, f"{path}/{two}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "item_not_found")
        assert [item["id"] for item in (await _get(server, path))["data"]] == ["msg_own", three, one]
        server.context.store.check_integrity()
        for wrong, place in (
            ({"items": [message("x")] * 21}, PATH),
            ({"items": "text"}, PATH),
            ({"items": [message("x")] * 21}, path),
            ({"items": "text"}, path),
            ({"items": [{"type": "image"}]}, path),
            ({"items": [message("x", id=5)]}, path),
            ({}, path),
        ):
            refused = await server.http.post(place, json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items"), refused.text
        for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}):
            assert (await server.http.get(path, params=query)).status_code == 400

    with_server(server_settings(model_folder), test, script(codec))


def test_responses_read_their_conversation_and_add_their_turns(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = await _post(server, PATH, items=[message("Be short.", "system"), message("before")])
        path = f"{PATH}/{made['id']}"
        first = await _post(server, RESPONSES, input="one", conversation=made["id"])
        assert (first["conversation"], first["previous_response_id"]) == ({"id": made["id"]}, None)
        assert await _texts(server, path) == ["Be short.", "before", "one", "Hello there"]
        await _post(server, RESPONSES, input="two", conversation={"id": made["id"]}, store=False)
        assert [word in _prompt(server, codec) for word in ("Be short.", "before", "one", "two")] == [True] * 4
        stream = await server.http.post(
            RESPONSES, json={"input": "three", "conversation": made["id"], "stream": True, "store": False}
        )
        assert '"conversation":{"id":"' in stream.text
        assert (await _texts(server, path))[4:] == ["two", "Hello there", "three", "Hello there"]
        assert server.context.store.num_objects == 2  # the conversation, and the first response
        later = await _post(server, RESPONSES, conversation=made["id"])  # without input: what is there already
        assert len(await _texts(server, path)) == 9
        tokens = await _post(server, f"{RESPONSES}/input_tokens", conversation=made["id"], input="x")
        assert tokens["input_tokens"] > later["usage"]["input_tokens"]
        assert len(await _texts(server, path)) == 9
        # a response goes on from its own turn, whatever has been added to the conversation since
        await _post(server, RESPONSES, input="aside", previous_response_id=first["id"])
        assert ("before" in _prompt(server, codec), "two" in _prompt(server, codec)) == (True, False)
        assert "conversation" not in await _post(server, RESPONSES, input="alone")
        server.context.store.check_integrity()

    with_server(server_settings(model_folder), test, replace_length(script(codec)))


def replace_length(one: Script) -> Script:
    return Script(reply=one.reply, end_token=one.end_token, max_model_len=4096, blocks_total=4096)


def test_what_does_not_fit_a_conversation_is_refused_by_name(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = (await _post(server, PATH))["id"]
        for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
            both = await _post(server, path, 400, input="x", conversation=made, previous_response_id="resp_1")
            assert (both["error"]["param"], both["error"]["code"]) == ("conversation", "mutually_exclusive_parameters")
        for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
            for unknown in ("conv_x", {"id": "conv_x"}, ""):
                missing = await _post(server, path, 404, input="x", conversation=unknown)
                assert missing["error"]["code"] == "conversation_not_found"
            wrong = await _post(server, path, 400, input="x", conversation={"name": "x"})
            assert wrong["error"]["param"] == "conversation"
        assert (await _post(server, RESPONSES, 400, input=[]))["error"]["param"] == "input"

    with_server(server_settings(model_folder), test, script(codec))


def test_a_response_without_input_reads_the_instructions_alone(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _post(server, RESPONSES, instructions="Write a poem.")
        assert answer["status"] == "completed"
        assert "Write a poem." in _prompt(server, codec)
        nothing = await _post(server, RESPONSES)
        assert nothing["output"][0]["content"][0]["text"] == "Hello there"
        page = await _get(server, f"{RESPONSES}/{nothing['id']}/input_items")
        assert page["data"] == []
        count = await _post(server, f"{RESPONSES}/input_tokens")
        assert count["input_tokens"] == nothing["usage"]["input_tokens"]

    with_server(server_settings(model_folder), test, script(codec))


def test_a_conversation_belongs_to_its_tenant_alone(model_folder: Path, codec: TextCodec, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: one}, {name: b, key: two}]\n")
    file.chmod(0o600)

    async def test(server: Running) -> None:
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        made = (await server.http.post(PATH, json={"items": [message("x", id="msg_x")]}, headers=one)).json()
        path = f"{PATH}/{made['id']}"
        for method, place in (
            *[("GET", path), ("DELETE", path), ("GET", f"{path}/items"), ("GET", f"{path}/items/msg_x")],
            *[("POST", path), ("POST", f"{path}/items"), ("DELETE", f"{path}/items/msg_x")],
        ):
            more: dict[str, Any] = {"json": {"metadata": {}, "items": []}} if method == "POST" else {}
            assert (await server.http.request(method, place, headers=two, **more)).status_code == 404
            assert (await server.http.request(method, place, **more)).status_code == 401
        asked = {"input": "x", "conversation": made["id"]}
        assert (await server.http.post(RESPONSES, json=asked, headers=two)).status_code == 404
        reference = {"items": [{"type": "item_reference", "id": "msg_x"}]}
        assert (await server.http.post(PATH, json=reference, headers=two)).status_code == 404
        assert (await server.http.post(PATH, json=reference, headers=one)).status_code == 200

    with_server(server_settings(model_folder), test, script(codec), tenants_config=str(file))


def test_a_turn_that_fails_or_is_left_is_not_added(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = await _post(server, PATH)
        asked = {"conversation": made["id"], "store": False}
        assert (await server.http.post(RESPONSES, json={"input": "Q", **asked})).status_code == 500
        leaving = asyncio.create_task(server.http.post(RESPONSES, json={"input": "a", **asked}))
        await until(lambda: server.engine.live == 1)
        assert server.context.store.num_objects == 2
        leaving.cancel()
        await until(lambda: server.context.store.num_objects == 1)
        later = asyncio.create_task(
            server.http.post(RESPONSES, json={"input": "b", "max_output_tokens": 9, "conversation": made["id"]})
        )
        await until(lambda: server.engine.live == 1)
        await _post(server, f"{PATH}/{made['id']}/items", items=[message("meanwhile")])
        assert (await later).json()["status"] == "incomplete"
        assert (await _texts(server, f"{PATH}/{made['id']}"))[:2] == ["meanwhile", "b"]
        gone = asyncio.create_task(
            server.http.post(RESPONSES, json={"input": "c", "max_output_tokens": 9, "conversation": made["id"]})
        )
        await until(lambda: server.engine.live == 1)
        await server.http.delete(f"{PATH}/{made['id']}")
        assert (await gone).status_code == 200
        server.context.store.check_integrity()

    (token,) = codec.encode("Q", add_special_tokens=False)
    with_server(server_settings(model_folder), test, Script(step_s=0.01, fail_prompt_with=token))


def test_the_limits_of_the_store_hold(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        store = server.context.store
        made = await _post(server, PATH, items=[message("x" * 600_000)])
        path = f"{PATH}/{made['id']}/items"
        refused = await _post(server, path, 413, items=[message("y" * 600_000)])
        assert (refused["error"]["param"], refused["error"]["code"]) == ("items", "request_too_large")
        assert len((await _get(server, path))["data"]) == 1  # nothing is lost by a refusal
        assert (await _post(server, PATH, 413, items=[message("y" * 1_100_000)]))["error"]["param"] == "items"
        other = (await _post(server, PATH, items=[message("y" * 600_000)]))["id"]
        assert store.num_bytes <= MIB
        assert (await server.http.get(path)).status_code == 404  # the least recently used one gave way
        assert (await server.http.get(f"{PATH}/{other}")).status_code == 200
        for _ in range(3):
            await _post(server, PATH)
        assert store.num_objects == 3
        store.check_integrity()

    settings = replace(server_settings(model_folder), stored_responses=3, stored_response_tenant_bytes=MIB)
    with_server(settings, test, script(codec))


def test_a_server_that_stores_nothing_has_no_conversations(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        assert (await _post(server, PATH, 403))["error"]["code"] == "storage_disabled"

    with_server(server_settings(model_folder), test, script(codec), stored_responses=0)


def test_what_a_conversation_stands_for_has_the_limit_of_a_body(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        made = (await _post(server, PATH))["id"]
        for _ in range(2):
            await _post(server, f"{PATH}/{made}/items", items=[message("x" * 50_000)])
        asked = {"input": "hi", "conversation": made, "max_output_tokens": 3}
        with server.context.bodies.hold("other") as other:
            other.grow(400_000)
            busy = await server.http.post(RESPONSES, json=asked)
            assert (busy.status_code, busy.json()["error"]["code"]) == (503, "overloaded")
            alone = await server.http.post(RESPONSES, json={**asked, "conversation": None})
            assert alone.status_code == 200
        await _post(server, f"{PATH}/{made}/items", items=[message("x" * 50_000)])
        for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
            refused = await _post(server, path, 413, input="hi", conversation=made)
            assert (refused["error"]["param"], refused["error"]["code"]) == ("conversation", "request_too_large")

    settings = replace(server_settings(model_folder), max_body_bytes=120_000, max_pending_body_bytes=480_000)
    with_server(settings, test, script(codec))


def _item(id: str) -> StoredItem:
    return encode_item({"type": "message", "id": id, "role": "user", "content": []})


def _store() -> ObjectStore:
    limits = StoreLimits(tenant_objects=9, tenant_bytes=10**9, total_bytes=10**9, lifetime_s=60.0)
    return ObjectStore(lambda: limits, ManualClock(), lambda _reason, _count: None)


def test_an_item_is_removed_wherever_it_is_and_the_turns_before_stay_shared() -> None:
    turn: StoredTurn | None = None
    for number in range(6):
        turn = StoredTurn(turn, [_item(f"q{number}")], [_item(f"a{number}")])
    store, made = _store(), StoredConversation("c", 0, {}, turn)
    store.put("a", made)
    before = store.num_bytes
    store.put("a", StoredConversation("d", 0, {}, turn).without_item("a3"))
    changed = store.get("a", StoredConversation, "d")
    assert changed is not None
    assert [item.id for item in changed.items()] == ["q0", "a0", "q1", "a1", "q2", "a2", "q3", "q4", "a4", "q5", "a5"]
    assert store.num_bytes - before < 2500  # three turns and an entry; no item
    assert made.without_item("none").turn is turn
    store.check_integrity()
    only = StoredConversation("e", 0, {}, StoredTurn(None, [_item("x"), _item("x")]))
    assert only.without_item("x").turn is None


def test_a_conversation_has_a_limit_of_items() -> None:
    store, items = _store(), [_item("x")] * (MAX_CONVERSATION - 1)
    full = StoredConversation("c", 0, {}, StoredTurn(None, items))
    full.check(store, "items")
    with pytest.raises(AdmissionError, match=f"at most {MAX_CONVERSATION} items") as refused:
        full.check(store, "conversation", more_items=2)
    assert (refused.value.status, refused.value.param) == (400, "conversation")
    assert json.loads(items[0].encoded)["id"] == "x"
