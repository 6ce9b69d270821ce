"""/v1/responses: whole answers, conversations, the store, and refusals."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, server_settings, until, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.request import unpack_tokens

PATH = "/v1/responses"


def script(codec: TextCodec, text: str = "Hello there", **more: Any) -> Script:
    (end,) = codec.encode("</s>", add_special_tokens=False)
    return Script(reply=(*codec.encode(text, add_special_tokens=False), end), end_token=end, **more)


def body(input: object = "hello", **more: object) -> dict[str, object]:
    return {"model": MODEL, "input": input, **more}


async def _create(server: Running, input: object = "hello", **more: object) -> dict[str, Any]:
    answer = await server.http.post(PATH, json=body(input, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def _prompt(server: Running, codec: TextCodec, index: int = -1) -> str:
    return codec.decode(list(unpack_tokens(server.engine.submitted[index].prompt)))


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


def test_a_whole_response_has_every_field(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _create(
            server, instructions="Be short.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50, user="me"
        )
        assert answer["id"].startswith("resp_")
        assert len(answer["id"]) == len("resp_") + 48
        (item,) = answer["output"]
        assert item["id"].startswith("msg_")
        text = {"type": "output_text", "text": "Hello there", "annotations": [], "logprobs": []}
        assert {**item, "id": ""} == {
            "type": "message", "id": "", "role": "assistant", "status": "completed", "content": [text]
        }  # fmt: skip
        assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
        assert (answer["instructions"], answer["metadata"], answer["user"]) == ("Be short.", {"a": "b"}, "me")
        assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 1.0, 50)
        assert answer["text"] == {"format": {"type": "text"}}
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] == 3
        assert server.engine.submitted[0].params.max_tokens == 50
        assert "system\nBe short.<|im_end|>\n<|im_start|>user\nhello" in _prompt(server, codec)

    with_server(server_settings(model_folder), test, script(codec, cached=3))


def test_an_answer_that_a_limit_ended_is_incomplete(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _create(server, max_output_tokens=1)
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete"

    with_server(server_settings(model_folder), test, script(codec))


def test_a_conversation_goes_on_behind_the_same_prefix(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        first = await _create(server, "one", instructions="Be short.")
        second = await _create(server, "two", previous_response_id=first["id"], instructions="Be short.")
        third = await _create(server, "three", previous_response_id=second["id"], instructions="Be short.")
        requests = server.engine.submitted
        prompts = [list(unpack_tokens(request.prompt)) for request in requests]
        reply = codec.encode("Hello there<|im_end|>", add_special_tokens=False)
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before) + len(reply)] == [*before, *reply]  # which the prefix cache holds
        assert third["previous_response_id"] == second["id"]
        other = await _create(server, "two", previous_response_id=first["id"])
        assert "Be short." not in _prompt(server, codec)  # instructions are those of one response
        assert other["instructions"] is None

    with_server(server_settings(model_folder), test, script(codec))


def test_a_deleted_response_is_gone_and_later_turns_keep_its_context(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        first = await _create(server, "one")
        second = await _create(server, "two", previous_response_id=first["id"])
        deleted = await server.http.delete(f"{PATH}/{first['id']}")
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            gone = await server.http.request(method, f"{PATH}/{first['id']}")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
        broken = await server.http.post(PATH, json=body("x", previous_response_id=first["id"]))
        assert (broken.status_code, broken.json()["error"]["param"]) == (404, "previous_response_id")
        assert broken.json()["error"]["code"] == "previous_response_not_found"
        await _create(server, "three", previous_response_id=second["id"])
        assert "user\none<|im_end|>" in _prompt(server, codec)
        server.context.store.check_integrity()

    with_server(server_settings(model_folder), test, script(codec))


def test_a_stored_response_is_retrieved_unchanged(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _create(server, metadata={"k": "v"})
        found = await server.http.get(f"{PATH}/{answer['id']}")
        assert found.json() == answer
        assert found.headers["content-type"] == "application/json"
        unstored = await _create(server, store=False)
        assert unstored["store"] is False
        assert (await server.http.get(f"{PATH}/{unstored['id']}")).status_code == 404

    with_server(server_settings(model_folder), test, script(codec))


def test_log_probabilities_are_sent_once_and_not_stored(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _create(server, include=["message.output_text.logprobs"], top_logprobs=2)
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in logprobs) == "Hello there"
        assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
        stored = (await server.http.get(f"{PATH}/{answer['id']}")).json()
        assert stored["output"][0]["content"][0]["logprobs"] == []

    with_server(server_settings(model_folder), test, script(codec))


def test_without_room_responses_are_answered_and_not_stored(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _create(server)
        assert answer["store"] is False
        assert server.context.store.num_objects == 0

    with_server(server_settings(model_folder), test, script(codec), stored_responses=0)


def test_only_the_latest_responses_of_a_tenant_are_kept(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        ids = [(await _create(server))["id"] for _ in range(4)]
        statuses = [(await server.http.get(f"{PATH}/{id}")).status_code for id in ids]
        assert statuses == [404, 404, 200, 200]
        metrics = (await server.http.get("/metrics")).text
        assert 'tiercel_forgotten_responses_total{reason="full"} 2.0' in metrics
        assert "tiercel_stored_responses 2.0" in metrics

    with_server(server_settings(model_folder), test, script(codec), stored_responses=2)


def test_a_response_belongs_to_its_tenant_alone(model_folder: Path, codec: TextCodec, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: one}, {name: b, key: two}]\n")
    file.chmod(0o600)

    async def test(server: Running) -> None:
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        answer = (await server.http.post(PATH, json=body(), headers=one)).json()
        path = f"{PATH}/{answer['id']}"
        for method, place in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
            assert (await server.http.request(method, place, headers=two)).status_code == 404
            assert (await server.http.request(method, place)).status_code == 401
        reference = [{"type": "item_reference", "id": answer["output"][0]["id"]}]
        for foreign in (body(previous_response_id=answer["id"]), body(reference)):
            assert (await server.http.post(PATH, json=foreign, headers=two)).status_code == 404
        assert (await server.http.get(path, headers=one)).json() == answer

    with_server(server_settings(model_folder), test, script(codec), tenants_config=str(file))


def test_the_input_is_listed_in_pages(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        own = {"type": "message", "id": "msg_own", **_message("user", "c")}
        talk = [_message("user", "a"), _message("assistant", "b"), own]
        answer = await _create(server, talk)
        path = f"{PATH}/{answer['id']}/input_items"
        page = (await server.http.get(path, params={"limit": 2, "order": "asc"})).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["a", "b"]
        assert [item["content"][0]["type"] for item in page["data"]] == ["input_text", "output_text"]
        assert (page["object"], page["has_more"]) == ("list", True)
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][1]["id"])
        rest = (await server.http.get(path, params={"order": "asc", "after": page["last_id"]})).json()
        assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (["msg_own"], False)
        latest = (await server.http.get(path, params={"limit": 1})).json()
        assert latest["data"][0]["id"] == "msg_own"
        digits = "000000001" + "9" * 5000  # more than int() takes
        for wrong in ({"limit": "0"}, {"limit": "x"}, {"limit": digits}, {"order": "up"}, {"after": "nothing"}):
            refused = await server.http.get(path, params=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))

    with_server(server_settings(model_folder), test, script(codec))


def test_items_of_stored_responses_can_be_referred_to(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await _create(server, "one")
        talk = [
            _message("user", "one"),
            {"type": "item_reference", "id": answer["output"][0]["id"]},
            _message("user", "2"),
        ]
        await _create(server, talk)
        assert "assistant\nHello there<|im_end|>\n<|im_start|>user\n2" in _prompt(server, codec)

    with_server(server_settings(model_folder), test, script(codec))


def test_input_tokens_are_those_of_the_response(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        first = await _create(server, "one")
        request = body("two", previous_response_id=first["id"], instructions="Be short.")
        counted = (await server.http.post(f"{PATH}/input_tokens", json=request)).json()
        second = await _create(server, "two", previous_response_id=first["id"], instructions="Be short.")
        assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}

    with_server(server_settings(model_folder), test, script(codec))


def test_truncation_leaves_out_the_oldest_turns(model_folder: Path, codec: TextCodec) -> None:
    talk = [_message("system", "Be short.")]
    for number in range(12):
        talk += [_message("user", f"question {number}"), _message("assistant", f"answer {number}")]
    talk.append(_message("user", "last"))

    async def test(server: Running) -> None:
        long = await server.http.post(PATH, json=body(talk))
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await _create(server, talk, truncation="auto", max_output_tokens=9))["status"] == "completed"
        prompt = _prompt(server, codec)
        assert "system\nBe short." in prompt
        assert prompt.endswith("user\nlast<|im_end|>\n<|im_start|>assistant\n")
        first = prompt.index("<|im_start|>user\nquestion")
        kept = prompt[first:].split("\n")[1].removeprefix("question ").removesuffix("<|im_end|>")
        assert int(kept) > 0
        assert len(unpack_tokens(server.engine.submitted[-1].prompt)) > 256 - 9 - 60  # no turn more than necessary
        alone = await server.http.post(PATH, json=body("word " * 300, truncation="auto"))
        assert alone.json()["error"]["code"] == "context_length_exceeded"

    with_server(server_settings(model_folder), test, script(codec))


REFUSED: list[tuple[dict[str, object], int, str]] = [
    ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": [5]}, 400, "input"),
    ({"input": [{"type": "computer_call"}]}, 400, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, 400, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_unknown"}]}, 404, "input"),
    ({"input": ["x"] * 2049}, 400, "input"),
    ({"conversation": "conv_1"}, 404, "conversation"),
    ({"prompt": {"id": "p"}}, 400, "prompt"),
    ({"moderation": {"model": "m"}}, 400, "moderation"),
    ({"context_management": [{"type": "compaction"}]}, 400, "context_management"),
    ({"messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
    ({"max_tokens": 5}, 400, "max_tokens"),
    ({"n": 2}, 400, "n"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, 400, "max_output_tokens"),
    ({"top_logprobs": 99}, 400, "top_logprobs"),
    ({"temperature": -1}, 400, "temperature"),
    ({"include": ["everything"]}, 400, "include"),
    ({"truncation": "some"}, 400, "truncation"),
    ({"metadata": {"k": 5}}, 400, "metadata"),
    ({"metadata": {str(key): "v" for key in range(17)}}, 400, "metadata"),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"previous_response_id": "resp_unknown"}, 404, "previous_response_id"),
    ({"model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(
    ("change", "status", "param"), REFUSED, ids=[f"{param}-{n}" for n, (_, _, param) in enumerate(REFUSED)]
)
@pytest.mark.sampled(12)
def test_what_is_not_supported_is_refused_by_name(
    model_folder: Path, change: dict[str, object], status: int, param: str
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(PATH, json={**body(), **change})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
        assert not server.engine.submitted
        assert server.context.store.num_objects == 0

    with_server(server_settings(model_folder), test)


def test_a_failed_response_leaves_nothing_behind(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(PATH, json=body())
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error"
        assert server.context.store.num_objects == 0

    with_server(server_settings(model_folder), test, Script(fail_prompt_with=0))


def test_a_client_that_leaves_before_a_whole_answer_leaves_nothing_behind(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        sending = asyncio.ensure_future(server.http.post(PATH, json=body()))
        await until(lambda: server.context.store.num_objects == 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: server.context.store.num_objects == 0)
        await until(lambda: server.engine.live == 0)

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_a_response_deleted_in_progress_is_not_stored_again(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        async with server.http.stream("POST", PATH, json=body(stream=True)) as answer:
            lines = answer.aiter_lines()
            created = json.loads([await anext(lines), await anext(lines)][1].removeprefix("data: "))
            path = f"{PATH}/{created['response']['id']}"
            assert (await server.http.get(path)).json()["status"] == "in_progress"
            follow = await server.http.post(PATH, json=body(previous_response_id=created["response"]["id"]))
            assert (follow.status_code, follow.json()["error"]["param"]) == (400, "previous_response_id")
            assert (await server.http.delete(path)).status_code == 200
            async for _ in lines:
                pass
        assert (await server.http.get(path)).status_code == 404

    with_server(server_settings(model_folder), test, script(codec, "Hello there, world!", step_s=0.02))


def test_a_client_that_leaves_a_stream_leaves_a_cancelled_response(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        async with (
            httpx.AsyncClient(base_url=server.url) as http,
            http.stream("POST", PATH, json=body(stream=True)) as answer,
        ):
            lines = answer.aiter_lines()
            created = json.loads([await anext(lines), await anext(lines)][1].removeprefix("data: "))
            async for line in lines:
                if "output_text.delta" in line:
                    break
        await until(lambda: server.engine.live == 0)
        stored = (await server.http.get(f"{PATH}/{created['response']['id']}")).json()
        assert stored["status"] == "cancelled"
        assert stored["output"][0]["status"] == "incomplete"
        assert stored["output"][0]["content"][0]["text"]
        server.context.store.check_integrity()

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


async def _ended(server: Running, id: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            found = (await server.http.get(f"{PATH}/{id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


def test_a_response_in_the_background_is_retrieved_until_it_has_ended(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        first = await _create(server, background=True)
        assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
        ended = await _ended(server, first["id"])
        assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "Hello there")
        assert ended["usage"]["output_tokens"] > 0
        await _create(server, "more", previous_response_id=first["id"])
        assert "assistant\nHello there<|im_end|>" in _prompt(server, codec)
        again = await server.http.post(f"{PATH}/{first['id']}/cancel")
        assert (again.status_code, again.json()["status"]) == (200, "completed")

    with_server(server_settings(model_folder), test, script(codec, step_s=0.01))


def test_a_response_in_the_background_can_be_cancelled_and_deleted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        first, second = await _create(server, background=True), await _create(server, background=True)
        await until(
            lambda: all(running.outputs for running in server.engine.running.values()) and server.engine.live == 2
        )
        cancelled = (await server.http.post(f"{PATH}/{first['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert (await server.http.get(f"{PATH}/{first['id']}")).json() == cancelled
        assert (await server.http.delete(f"{PATH}/{second['id']}")).status_code == 200
        assert (await server.http.get(f"{PATH}/{second['id']}")).status_code == 404
        await until(lambda: server.engine.live == 0)
        server.context.store.check_integrity()

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_a_response_in_the_background_that_fails_is_failed(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        ended = await _ended(server, (await _create(server, background=True))["id"])
        assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")

    with_server(server_settings(model_folder), test, Script(fail_prompt_with=0))


def test_what_the_background_needs_is_checked(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        for more in ({"stream": True}, {"store": False}):
            refused = await server.http.post(PATH, json=body(background=True, **more))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
        whole = await _create(server)
        refused = await server.http.post(f"{PATH}/{whole['id']}/cancel")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id")
        refused = await server.http.get(f"{PATH}/{whole['id']}", params={"stream": "true", "starting_after": "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")
        assert (await server.http.post(f"{PATH}/resp_x/cancel")).status_code == 404

    with_server(server_settings(model_folder), test, script(codec))


def test_the_form_of_the_text_constrains_the_answer(model_folder: Path, codec: TextCodec) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    async def test(server: Running) -> None:
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        answer = await _create(server, text={"format": form})
        assert answer["text"] == {"format": form}
        await _create(server, text={"format": {"type": "json_object"}})
        await _create(server, text={"format": {"type": "text"}})
        assert [bool(request.params.grammar) for request in server.engine.submitted] == [True, True, False]
        wrong = {"type": "json_schema", "name": "x", "schema": {"type": "no type"}}
        refused = await server.http.post(PATH, json=body(text={"format": wrong}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format")

    with_server(server_settings(model_folder), test, script(codec))
