"""Every answer has null and absent fields only where the types of the official SDKs allow them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from tests.server.api.reply_shapes import OWN, SHAPES, fields_of, shape_of, structs_in
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, with_server
from tiercel.server.api.contract import Contract
from tiercel.server.api.openapi import DocumentedApp
from tiercel.server.app import create_app

APIS = (
    "/v1/chat/", "/v1/completions", "/v1/conversations", "/v1/embeddings", "/v1/responses", "/v1/messages",
    "/v1/models", "/v1/files", "/v1/batches",
)  # fmt: skip
"""The beginnings of the paths whose answers an official SDK reads."""


@pytest.fixture(scope="module")
def contracts(model_folder: Path) -> dict[tuple[str, str], Contract]:
    async def test(server: Running) -> dict[tuple[str, str], Contract]:
        app = create_app(server.context)
        assert isinstance(app, DocumentedApp)
        return {key: contract for key, contract in app.contracts.items() if key[0].startswith(APIS)}

    return with_server(server_settings(model_folder), test)


def _kinds(contracts: dict[tuple[str, str], Contract]) -> Iterator[type[Struct]]:
    for contract in contracts.values():
        events = () if contract.events is None else (contract.events,)
        for kind in (*contract.all_answers.values(), *events):
            yield from structs_in(kind)


def test_every_answer_is_compared_and_fits(contracts: dict[tuple[str, str], Contract]) -> None:
    """No field can be null or absent that an SDK does not expect to be; none that it expects is missing."""
    kinds = set(_kinds(contracts))
    ours = {kind for kind in kinds if kind not in SHAPES}
    assert {kind.__name__ for kind in ours} <= {"PromptLogprob", "MessageFaultDetails", "BatchFault"}
    for kind in kinds - ours:
        expected, sent, own = shape_of(kind), fields_of(kind), set(OWN.get(kind, "").split())
        assert not own & expected.keys(), kind
        assert sent.keys() - expected.keys() == own, f"{kind.__name__}: fields that no SDK has"
        for name, field in expected.items():
            place = f"{kind.__name__}.{name}"
            assert name in sent or field.may_be_absent, f"{place} is missing"
            if name in sent:
                assert field.may_be_null or not sent[name].may_be_null, f"{place} may be null"
                assert field.may_be_absent or not sent[name].may_be_absent, f"{place} may be left out"


def _tree(value: Any) -> Any:  # Any: JSON
    return json.loads(msgspec.json.encode(value))


def _check(kind: object, text: bytes | str) -> None:
    """Check that a body is exactly what its type says: no field more or less, and null only where it may be."""
    assert _tree(msgspec.json.decode(text, type=kind, strict=True)) == json.loads(text)


def test_answers_are_what_their_types_say(model_folder: Path, contracts: dict[tuple[str, str], Contract]) -> None:
    """Answers of all kinds, whole and streamed: also parts that are written without their types."""
    messages = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    own = {"return_token_ids": True, "prompt_logprobs": 1}
    cases = [
        *(
            ("/v1/chat/completions", chat_body(max_tokens=4, **more))
            for more in _variants(logprobs=True, top_logprobs=2)
        ),
        *(("/v1/completions", text_body(max_tokens=4, **more)) for more in _variants(logprobs=2, echo=True)),
        *(
            ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 4, **more})
            for more in _variants(include=["message.output_text.logprobs"], top_logprobs=1)
        ),
        *(("/v1/messages", {**messages, **more}) for more in ({}, {"stream": True})),
        ("/v1/chat/completions", chat_body(max_tokens=4, **own)),
        ("/v1/completions", text_body(max_tokens=4, **own)),
        ("/v1/completions", text_body(max_tokens=4, stream=True, stream_options={"include_usage": True})),
        *((path, {"model": "unknown", "input": "", **messages}) for path in ("/v1/chat/completions", "/v1/messages")),
        ("/v1/responses", {"model": "unknown", "input": "hello"}),
    ]

    async def test(server: Running) -> None:
        for path, body in cases:
            answer, contract = await server.http.post(path, json=body), contracts[path, "post"]
            if answer.headers["content-type"].startswith("text/event-stream"):
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
                assert len(lines) > 3
                for line in lines:
                    if line != "[DONE]":
                        _check(contract.events, line)
            else:
                _check(contract.all_answers[answer.status_code], answer.content)
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            answer = await server.http.get("/v1/models", headers=headers)
            kind = contracts["/v1/models", "get"].all_answers[200]
            _check(
                next(one for one in structs_in(kind) if ("Message" in one.__name__) == bool(headers)), answer.content
            )

    with_server(server_settings(model_folder), test)


def _variants(**logprobs: object) -> list[dict[str, Any]]:  # Any: JSON
    return [{**more, **one} for more in ({}, {"stream": True}) for one in ({}, logprobs)]
