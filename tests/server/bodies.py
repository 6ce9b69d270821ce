"""Bodies of requests for fuzzing: valid ones, with changes to their values and to their bytes."""

import copy
import json
import random
from collections.abc import Callable
from typing import cast

from tests.server.harness import MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

_ODD: list[object] = [
    *[None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1.0, 1e308, 2**31, 2**63, -(2**63) - 1, 2**64, 10**40, 10**400],
    *[float("nan"), float("inf"), float("-inf")],
    *["", "x", "5", "true", "null", "ü🙂", "\u0000", "\ud800", "\udfff\ud800", "\u2028", "<|im_end|>", "a" * 5000],
    *[[], {}, [[]], [{}], [None], [1], ["a"], [[1], [2]], [1, "a", None], {"a": None}, {"type": "text"}, {"5": 1}],
    *[list(range(300)), ["x"] * 300, {str(key): key for key in range(320)}],
]
_NAMES = [
    *["model", "messages", "prompt", "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop"],
    *["max_completion_tokens", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "seed", "user"],
    *["stop_token_ids", "ignore_eos", "cache_salt", "priority", "timeout", "echo", "tools", "response_format", "audio"],
    *["chat_template_kwargs", "add_generation_prompt", "continue_final_message", "skip_special_tokens", "unknown"],
    *["system", "stop_sequences", "thinking", "tool_choice", "input", "tool_use_id", "output_config", "metadata"],
    *["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "json_schema"],
    *[
        "ebnf",
        "json",
        "json_object",
        "choice",
        "grammar",
        "whitespace_pattern",
        "schema",
        "strict",
        "enum",
        "properties",
    ],
    *["tool_choice", "parallel_tool_calls", "function", "arguments", "parameters", "tool_call_id", "reasoning_effort"],
    *[
        "input",
        "instructions",
        "previous_response_id",
        "max_output_tokens",
        "include",
        "store",
        "background",
        "reasoning",
    ],
    *["truncation", "call_id", "arguments", "output", "summary", "id", "refusal", "format", "schema"],
    *["tokens", "return_token_strs", "add_special_tokens", "role", "content", "name", "type", "text", "tool_calls"],
]
_BYTES = [b"", b"\xff", b"\xed\xa0\x80", b"\x00", b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"NaN", b"-"]
_BYTES += [b"9" * 400, b"1e999", b'"n":1,"n":2,', b"[" * 70, b'{"a":' * 70, b"\xf0\x9f\x99\x82", b"\xef\xbb\xbf", b"//"]

_TALK: list[object] = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]},
    {"role": "assistant", "content": "hi", "name": "a"},
    {"role": "user", "content": "ü🙂 and so on"},
]
_TURNS: list[object] = [
    {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}]},
]
_ITEMS: list[object] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}, {"type": "input_text", "text": "world"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "user", "content": "ü🙂 and so on"},
]
_RESPONSE: dict[str, object] = {
    "max_output_tokens": 2,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "text": {"format": {"type": "text"}},
    "reasoning": {"summary": "auto"},
    "store": True,
    "seed": 5,
}
_SAMPLING: dict[str, object] = {
    "max_tokens": 3,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["a", "b"],
    "seed": 5,
    "ignore_eos": True,
    "logit_bias": {"5": 1.5},
    "stop_token_ids": [7],
    "presence_penalty": 0.1,
    "min_tokens": 1,
    "user": "me",
}
_TOOLS: dict[str, object] = {
    "tools": [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "now", "strict": False}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
}
_CALLS: list[object] = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "3"},
]
_STREAM: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": [1, "two", None]}},
    "required": ["name"],
}
_FORMAT: dict[str, object] = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "strict": True, "schema": _SCHEMA},
}
VALID: list[tuple[str, str, dict[str, object]]] = [
    ("POST", CHAT, {"model": MODEL, "messages": _TALK, "logprobs": True, "top_logprobs": 2, **_SAMPLING}),
    ("POST", CHAT, {"model": MODEL, "messages": _TALK[3:], "max_completion_tokens": 2, **_STREAM}),
    ("POST", CHAT, {"model": MODEL, "messages": _CALLS, "max_tokens": 2, **_TOOLS}),
    ("POST", TEXT, {"model": MODEL, "prompt": "hello", "logprobs": 2, **_SAMPLING}),
    ("POST", TEXT, {"model": MODEL, "prompt": [[5, 6], [7]], "max_tokens": 2, **_STREAM}),
    ("POST", TEXT, {"prompt": ["one", "two"], "max_tokens": 2, "timeout": 5}),
    ("POST", CHAT, {"messages": _TALK[3:], "max_tokens": 2, "response_format": _FORMAT}),
    (
        "POST",
        TEXT,
        {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": _SCHEMA, "whitespace_pattern": " ?"}},
    ),
    ("POST", TEXT, {"prompt": "a", "max_tokens": 2, "guided_choice": ["yes", "no"]}),
    ("POST", TEXT, {"prompt": "a", "max_tokens": 2, "regex": "[a-z]{1,5}"}),
    ("POST", TEXT, {"prompt": "a", "max_tokens": 2, "structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "hello", "return_token_strs": True}),
    ("POST", "/tokenize", {"model": MODEL, "messages": _TALK, "add_generation_prompt": True}),
    ("POST", "/v1/responses", {"model": MODEL, "input": _ITEMS, "instructions": "short", **_RESPONSE}),
    ("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 2, "stream": True, "truncation": "auto"}),
    ("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 2, "background": True, "metadata": {"a": "b"}}),
    ("POST", "/v1/responses/input_tokens", {"model": MODEL, "input": _ITEMS, "instructions": "short"}),
    ("POST", "/v1/responses/resp_1/cancel", {}),
    ("POST", "/v1/messages", {"model": MODEL, "messages": _TURNS, "system": "short", "max_tokens": 3, "top_k": 2}),
    (
        "POST",
        "/v1/messages",
        {
            "messages": _TURNS[:1],
            "max_tokens": 2,
            "stream": True,
            "stop_sequences": ["a"],
            "thinking": {"type": "adaptive"},
        },
    ),
    ("POST", "/v1/embeddings", {"input": ["hello", "one two"], "encoding_format": "base64", "dimensions": 2}),
    ("POST", "/v1/embeddings", {"model": MODEL, "input": [[5, 6], [7]], "priority": 1, "cache_salt": "a"}),
    ("POST", "/v1/score", {"text_1": "hello", "text_2": ["one", "two"], "timeout": 5}),
    ("POST", "/v1/rerank", {"query": "hello", "documents": ["one", "two"], "top_n": 1, "return_documents": True}),
    ("POST", "/v1/messages/count_tokens", {"messages": _TURNS, "system": [{"type": "text", "text": "be"}]}),
    ("POST", "/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
    ("POST", "/ping", {}),
    ("POST", "/admin/reload", {}),
    ("PUT", "/admin/tenants", {"tenants": [{"name": "a", "keys": ["k"], "weight": 2, "slo": {"ttft_s": 1}}]}),
    ("PATCH", "/admin/config", {"max-num-queued-reqs": 512, "stream-interval": 1}),
]
"""Method, route and body: every route that takes a body, and every POST route."""


def fuzzed(rng: random.Random) -> tuple[str, str, bytes]:
    """Return a method, a route and a body; some bodies are valid."""
    method, route, valid = rng.choice(VALID)
    body = copy.deepcopy(valid)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        _change(rng, body)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        text = _spoil(rng, text)
    return method, route, text


def _change(rng: random.Random, body: dict[str, object]) -> None:
    """Change one value, at any depth."""
    places = _places(body)
    container = rng.choice(places)
    if isinstance(container, dict):
        name = rng.choice([*container, *_NAMES]) if rng.random() < 0.7 else rng.choice(_NAMES)
        if rng.random() < 0.2:
            container.pop(name, None)
        else:
            container[name] = _value(rng, body)
    elif container and rng.random() < 0.5:
        container[rng.randrange(len(container))] = _value(rng, body)
    else:
        container.insert(rng.randrange(len(container) + 1), _value(rng, body))


def _value(rng: random.Random, body: dict[str, object]) -> object:
    """Return an odd value, a nest of lists or objects, or a part of the body itself."""
    choice = rng.random()
    if choice < 0.8:
        return copy.deepcopy(rng.choice(_ODD))
    if choice < 0.9:
        nest: object = rng.choice((1, "x", None))
        wraps: list[Callable[[object], object]] = [lambda one: [one], lambda one: {"a": one}]
        for _ in range(rng.choice((3, 62, 66, 200))):
            nest = rng.choice(wraps)(nest)
        return nest
    return copy.deepcopy(rng.choice(list(body.values()) or [None]))


def _places(value: object) -> list[dict[str, object] | list[object]]:
    """Return all objects and lists in a value."""
    places: list[dict[str, object] | list[object]] = []
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            places.append(cast(dict[str, object], one))
            rest += cast(dict[str, object], one).values()
        elif isinstance(one, list):
            places.append(cast(list[object], one))
            rest += cast(list[object], one)
    return places


def _spoil(rng: random.Random, text: bytes) -> bytes:
    """Change bytes: cut, insert, repeat, flip."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice((0, 1, 2, 10, 100)))
    match rng.randrange(4):
        case 0:
            return text[:start]
        case 1:
            return text[:start] + rng.choice(_BYTES) + text[end:]
        case 2:
            return text[:end] + text[start:end] * rng.choice((1, 3)) + text[end:]
        case _:
            return text[:start] + bytes(byte ^ (1 << rng.randrange(8)) for byte in text[start:end]) + text[end:]
