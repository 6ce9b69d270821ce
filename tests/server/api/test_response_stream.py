"""The events of a streamed response: their order, numbers and ids."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.api.test_responses import PATH, body, script
from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, with_server
from tiercel.server.text.tokenizer import TextCodec

TEXT_ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def events_of(text: str) -> list[dict[str, Any]]:
    """Check the framing, names, numbers and ids of a stream; return its events."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    events: list[dict[str, Any]] = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        one = json.loads(data.removeprefix("data: "))
        assert name == f"event: {one['type']}"
        assert one["sequence_number"] == number
        events.append(one)
    assert len({one["response"]["id"] for one in events if "response" in one}) == 1
    return events


def shape_of(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, each run of deltas once."""
    names = [one["type"] for one in events]
    return [name for name, before in zip(names, [None, *names], strict=False) if name != before]


def check_items(events: list[dict[str, Any]]) -> None:
    """Check that the deltas of each item make up its parts, and that the last event has all items."""
    output = events[-1]["response"]["output"]
    done = [one for one in events if one["type"] == "response.output_item.done"]
    assert [one["output_index"] for one in done] == list(range(len(output)))
    assert [one["item"] for one in done] == output
    for index, item in enumerate(output):
        of_item = [one for one in events if one.get("output_index") == index]
        assert {one.get("item_id", item["id"]) for one in of_item} == {item["id"]}
        deltas = "".join(one["delta"] for one in of_item if one["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_a_text_answer_has_its_events_in_order(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(PATH, json=body(stream=True, metadata={"a": "b"}))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = events_of(answer.text)
        assert shape_of(events) == TEXT_ORDER
        check_items(events)
        assert events[0]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == [] and "usage" not in events[0]["response"]
        assert events[2]["item"]["content"] == []
        assert events[3]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        final = events[-1]["response"]
        assert (final["status"], final["output"][0]["content"][0]["text"]) == ("completed", "Hello there, world!")
        assert final["usage"]["output_tokens"] > 0
        assert (await server.http.get(f"{PATH}/{final['id']}")).json() == final

    with_server(server_settings(model_folder), test, script(codec, "Hello there, world!", step_s=0.005))


def test_a_stream_that_a_limit_ends_is_incomplete(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        events = events_of((await server.http.post(PATH, json=body(stream=True, max_output_tokens=2))).text)
        assert shape_of(events) == [*TEXT_ORDER[:-1], "response.incomplete"]
        assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert events[-2]["item"]["status"] == "incomplete"
        check_items(events)

    with_server(server_settings(model_folder), test, script(codec, "Hello there, world!", step_s=0.005))


def test_an_answer_without_text_has_an_empty_message(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        events = events_of((await server.http.post(PATH, json=body(stream=True))).text)
        assert shape_of(events) == [name for name in TEXT_ORDER if not name.endswith("delta")]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
        whole = (await server.http.post(PATH, json=body())).json()
        assert whole["output"][0]["content"][0]["text"] == ""

    with_server(server_settings(model_folder), test, script(codec, ""))


def test_a_dead_engine_ends_a_stream_with_an_error_and_a_failed_response(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        events = events_of((await server.http.post(PATH, json=body(stream=True))).text)
        assert shape_of(events)[-2:] == ["error", "response.failed"]
        error, failed = events[-2], events[-1]["response"]
        assert error["message"] == error["error"]["message"] == failed["error"]["message"]
        assert error["code"] == error["error"]["code"] == "engine_dead"
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert failed["output"][0]["status"] == "incomplete"
        assert (await server.http.get(f"{PATH}/{failed['id']}")).json() == failed

    with_server(server_settings(model_folder), test, Script(step_s=0.02, die_at_step=3))


def test_log_probabilities_are_in_the_deltas_alone(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        request = body(stream=True, include=["message.output_text.logprobs"], top_logprobs=1)
        events = events_of((await server.http.post(PATH, json=request)).text)
        deltas = [one for one in events if one["type"] == "response.output_text.delta"]
        assert "".join(entry["token"] for one in deltas for entry in one["logprobs"]) == "Hello there"
        assert all(len(entry["top_logprobs"]) == 1 for one in deltas for entry in one["logprobs"])
        assert all(one["logprobs"] == [] for one in events if one["type"] == "response.output_text.done")

    with_server(server_settings(model_folder), test, script(codec, step_s=0.005))


@pytest.mark.parametrize("writes_bodies", [True, False])
def test_a_burst_of_tokens_loses_nothing(model_folder: Path, codec: TextCodec, *, writes_bodies: bool) -> None:
    async def test(server: Running) -> None:
        for _ in range(3):
            events = events_of((await server.http.post(PATH, json=body(stream=True))).text)
            assert shape_of(events) == TEXT_ORDER
            check_items(events)

    text = "The quick brown fox jumps over the lazy dog. 🙂 你好 \u2028 end"
    with_server(server_settings(model_folder), test, script(codec, text))


def test_structs_of_events_name_their_types() -> None:
    from tiercel.server.api.replies.response_events import OutputTextDelta, event_name

    delta = OutputTextDelta(sequence_number=0, output_index=0, item_id="m", content_index=0, delta="x")
    assert json.loads(msgspec.json.encode(delta))["type"] == event_name(delta) == "response.output_text.delta"
