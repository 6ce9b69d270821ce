"""Whole answers are the sums of their streams, in each API, wherever an answer is cut."""

import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from pydantic_core import from_json

from tiercel.server.api.delta_encoder import ReplyShape
from tiercel.server.api.replies.chat import ChatShape
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.replies.message_shape import MessageShape
from tiercel.server.api.replies.partial_json import partial_object
from tiercel.server.api.replies.response_shape import ResponseShape
from tiercel.server.api.replies.responses import ReasoningBody, ResponseBody
from tiercel.server.api.replies.usage import UsageBody
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.client.logprobs import DrawnTokens, PackedLogprobs
from tiercel.server.text.answer.formats import FORMATS
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.server.text.tokenizer import TextCodec

CALL = '{"name": "add", "arguments": {"a": ["ü\\"}"]}}'
TEXTS = {
    "hermes": f"<think>\nHm.\n</think>\n\nOh\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}",
    "llama3_json": f"<think>Hm.</think>{CALL}; {CALL[:40]}",
    "mistral": f"Sure. [TOOL_CALLS] [{CALL}, {CALL}]",
    "json": f"[{CALL}, {CALL}]",
    "heads": '[TOOL_CALLS]add[ARGS]{"a": [1, 2]}[TOOL_CALLS]add{"a": "[TOOL_CALLS]"}',
    "malformed": f'<tool_call>{{"name": "add", "arguments": {{"a": 1]}}</tool_call> <tool_call>{CALL}</tool_call>',
}
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", '"name"')
USAGE = UsageBody(1, 1, 2)
Api = Literal["chat", "responses", "messages"]
Tree = dict[str, Any]


def _reader(name: str) -> AnswerReader:
    form = FORMATS[{"heads": "mistral", "malformed": "hermes"}.get(name, name)]
    return AnswerReader(form, {"add"}, has_thoughts="think" in TEXTS[name])


def _shape(api: Api, reader: AnswerReader) -> ReplyShape:
    numbers = itertools.count()
    match api:
        case "chat":
            head = ReplyHead(id="a", created=1, model="m", with_logprobs=False, with_details=False, role="assistant")
            return ChatShape(head, reader)
        case "messages":
            return MessageShape("a", "m", "r", reader)
        case "responses":
            body = ResponseBody(
                id="a", created_at=1, status="in_progress", background=False, instructions=None, max_output_tokens=None,
                max_tool_calls=None, metadata={}, model="m", output=[], parallel_tool_calls=True,
                previous_response_id=None, prompt_cache_key=None, reasoning=ReasoningBody(), safety_identifier=None,
                service_tier="default", store=False, temperature=1.0, text={}, tool_choice="auto", tools=[],
                top_logprobs=0, top_p=1.0, truncation="disabled", user=None,
            )  # fmt: skip
            new_id: Callable[[str], str] = lambda prefix: f"{prefix}{next(numbers)}"  # noqa: E731
            return ResponseShape(body, lambda _: None, new_id, lambda: 1.0, reader=reader, with_logprobs=False)


def _delta(codec: TextCodec, text: str, reason: str | None = None, stop: str | None = None) -> ChoiceDelta:
    none = DrawnTokens(PackedLogprobs(), codec.vocabulary)
    return ChoiceDelta(choice=0, text=text, logprobs=none, num_outputs=1, finish_reason=reason, stop_reason=stop)


def _whole(api: Api, name: str, delta: ChoiceDelta) -> Tree:
    """Return the parts of a whole answer."""
    reply: Tree = json.loads(msgspec.json.encode(_shape(api, _reader(name)).reply([delta], USAGE)))
    match api:
        case "chat":
            (choice,) = reply["choices"]
            message = choice["message"]
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
            return _parts(
                message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]
            )
        case "responses":
            return _of_items(reply)
        case "messages":
            texts = [one["text"] for one in reply["content"] if one["type"] == "text"]
            thoughts = [one["thinking"] for one in reply["content"] if one["type"] == "thinking"]
            calls = [(one["name"], one["input"]) for one in reply["content"] if one["type"] == "tool_use"]
            return _parts("".join(texts), "".join(thoughts), calls, reply["stop_reason"])


def _object(text: str) -> Tree:
    return json.loads(bytes(partial_object(text)))


def _of_items(response: Tree) -> Tree:
    items: list[Tree] = response["output"]
    texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    thoughts = [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]
    calls = [(item["name"], item["arguments"], item["status"]) for item in items if item["type"] == "function_call"]
    return _parts("".join(texts), "".join(thoughts), calls, response["status"])


def _parts(content: str, thoughts: str, calls: list[Any], reason: str) -> Tree:
    return {"content": content, "thoughts": thoughts, "calls": calls, "reason": reason}


def _streamed(api: Api, name: str, deltas: list[ChoiceDelta]) -> Tree:
    """Return the parts that a client adds up."""
    shape = _shape(api, _reader(name))
    sent = shape.opening(USAGE) + b"".join(shape.event(one) for delta in deltas for one in shape.chunks(delta, None))
    sent += shape.closing(USAGE)
    lines = [line[6:] for line in sent.decode().split("\n") if line.startswith("data: {")]
    events: list[Tree] = [json.loads(line) for line in lines]
    if api == "responses":
        return _summed(events)
    content, thoughts, reason, calls = "", "", "", list[list[str]]()
    for event in events:
        for choice in event.get("choices", ()):
            piece = choice["delta"]
            content += piece.get("content") or ""
            thoughts += piece.get("reasoning_content") or ""
            for call in piece.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
        piece = event.get("delta", {}) if api == "messages" else {}
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        content += piece.get("text", "")
        thoughts += piece.get("thinking", "")
        if "partial_json" in piece:
            calls[-1][1] += piece["partial_json"]
        reason = piece.get("stop_reason", reason)
    if api == "messages":
        return _parts(content, thoughts, [(call, _object(text)) for call, text in calls], reason)
    return _parts(content, thoughts, [(call, text) for call, text in calls], reason)


def _summed(events: list[Tree]) -> Tree:
    """Return the parts of a streamed response, by its deltas, which are also those of its last event."""
    content = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    thoughts = "".join(one["delta"] for one in events if one["type"] == "response.reasoning_text.delta")
    parts = _of_items(events[-1]["response"])
    assert (parts["content"], parts["thoughts"]) == (content, thoughts)
    return parts


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.sampled(6)
def test_a_whole_answer_is_the_sum_of_its_stream_at_every_cut(codec: TextCodec, api: Api, name: str) -> None:
    text = TEXTS[name]
    uncut = _whole(api, name, _delta(codec, text, "stop"))
    pieces = [codec.decode([token]) for token in codec.encode(text, add_special_tokens=False)]
    pieces_by_length = {len("".join(pieces[:count])): pieces[:count] for count in range(len(pieces) + 1)}
    for length in range(len(text) + 1):
        cut = text[:length]
        for reason, stop in (("length", None), ("stop", text[length : length + 3] or "!")):
            whole = _whole(api, name, _delta(codec, cut, reason, stop))
            assert uncut["content"].startswith(whole["content"]), (length, reason)
            assert not [mark for mark in MARKS if mark in whole["content"] + whole["thoughts"]], (length, reason)
            if reason == "length" or length % 7 == 0:
                by_token = pieces_by_length.get(length, [])
                parts = by_token if "".join(by_token) == cut else list(cut)
                deltas = [*(_delta(codec, part) for part in parts), _delta(codec, "", reason, stop)]
                assert _streamed(api, name, deltas) == whole, (length, reason)


@pytest.mark.parametrize("text", [TEXTS["hermes"], CALL, '{"a": "x', '{"a": 12', '{"a": tru', '{"a": {"b": [', ""])
def test_a_cut_object_is_read_as_the_client_reads_the_pieces(text: str) -> None:
    for length in range(len(text) + 1):
        try:
            expected: object = from_json(text[:length], allow_partial=True)
        except ValueError:
            expected = {}
        assert _object(text[:length]) == (expected if isinstance(expected, dict) else {}), length


def test_text_that_is_no_json_is_read_up_to_its_fault() -> None:
    assert _object('{"a": 1, "b": }') == {"a": 1}
    assert _object('{"a": [1}}') == {"a": [1]}
    assert _object("[1") == {}
    assert _object('{"a": NaN}') == {}
    assert _object('{"a": 1, "b": ' + "1" * 40) == {"a": 1, "b": int("1" * 40)}
