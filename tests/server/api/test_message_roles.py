"""Messages of which a chat template shows nothing, and special tokens that no parser reads, in all APIs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.server.builders import build_byte_level
from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, with_server
from tiercel.server.text.tokenizer import TextCodec, load_text_codec
from tiercel.values.request import unpack_tokens

Tree = dict[str, Any]
FIRST = (  # shows a system message in the first place only
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
ROOMY = Script(max_model_len=2048, blocks_total=256)


def _messages(roles: str) -> list[Tree]:
    return [{"role": role, "content": f"c{index}"} for index, role in enumerate(roles.split())]


def _typed(roles: str) -> list[Tree]:
    return [{"type": "message", **message} for message in _messages(roles)]


def test_a_developer_message_is_a_system_message_where_the_template_knows_no_other(
    model_folder: Path, codec: TextCodec
) -> None:
    bodies: list[tuple[str, Tree]] = [
        ("/v1/chat/completions", {**chat_body(), "messages": _messages("developer user")}),
        ("/v1/responses", {"model": "tiny", "input": _typed("developer user")}),
    ]

    async def test(server: Running) -> None:
        for path, body in bodies:
            answer = await server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            prompt = codec.decode(list(unpack_tokens(server.engine.submitted[-1].prompt)))
            assert prompt == "[c0]user: c1<|im_end|>"
        body = {"messages": _messages("developer user"), "add_generation_prompt": False}
        tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
        assert codec.decode(tokens) == "[c0]user: c1<|im_end|>"

    with_server(server_settings(model_folder), test, ROOMY, chat_template=FIRST)


@pytest.mark.parametrize(
    ("path", "body", "param", "start"),
    [
        ("/v1/chat/completions", {"messages": _messages("user assistant developer")}, "messages", "messages.2: "),
        ("/tokenize", {"messages": _messages("system developer user")}, "messages", "messages.1: "),
        ("/v1/responses", {"input": _typed("user developer")}, "input", "input.1: "),
        ("/v1/responses", {"input": _typed("developer user"), "instructions": "Be brief."}, "input", "input.0: "),
        ("/v1/responses/input_tokens", {"input": _typed("user developer")}, "input", "input.1: "),
    ],
)
def test_a_message_without_a_trace_is_refused_by_its_place(
    model_folder: Path, path: str, body: Tree, param: str, start: str
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(path, json={"model": "tiny", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(start)
        assert " the role developer " in error["message"]

    with_server(server_settings(model_folder), test, ROOMY, chat_template=FIRST)


@pytest.mark.parametrize(
    ("body", "start"),
    [
        ({"system": "Be brief.", "messages": _messages("user")}, "system: "),
        ({"messages": _messages("user user assistant user")}, "messages.2: "),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_places_of_messages_are_those_of_its_turns(model_folder: Path, path: str, body: Tree, start: str) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"

    async def test(server: Running) -> None:
        sent = {"model": "tiny", **body} | ({"max_tokens": 5} if path == "/v1/messages" else {})
        answer = await server.http.post(path, json=sent)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(start)

    with_server(server_settings(model_folder), test, ROOMY, chat_template=template)


def _marked_folder(model_folder: Path, folder: Path, marks: Sequence[str]) -> TextCodec:
    tokenizer = build_byte_level()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((model_folder / "tokenizer_config.json").read_text())
    return load_text_codec(folder)


@pytest.mark.parametrize("stream", [False, True])
def test_marks_of_an_unknown_format_are_content(model_folder: Path, tmp_path: Path, stream: bool) -> None:
    """They are special tokens. Hidden, the thoughts would run into the answer."""
    codec = _marked_folder(model_folder, tmp_path, ("[THINK]", "[/THINK]", "<|call|>", "<|unused|>"))
    template = (
        "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{% if m.reasoning_content %}"
        "[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{% for c in m.tool_calls or [] %}<|call|>"
        "{{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
    )
    text = "[THINK]Hm.[/THINK]Sure.<|call|>add"
    end = codec.encode("</s>", add_special_tokens=False)[0]
    reply = (*codec.encode(f"<|unused|>{text}", add_special_tokens=False), end)
    tools = [{"type": "function", "function": {"name": "add"}}]

    async def test(server: Running) -> None:
        mores: list[Tree] = [{}, {"tools": tools}]
        for more in mores:
            answer = await server.http.post("/v1/chat/completions", json=chat_body(stream=stream, **more))
            assert answer.status_code == 200, answer.text
            if stream:
                assert text in "".join(
                    piece.split('"content":"')[1].split('"')[0]
                    for piece in answer.text.split("\n")
                    if '"content":"' in piece
                )
            else:
                assert answer.json()["choices"][0]["message"]["content"] == text
        refused = await server.http.post("/v1/chat/completions", json=chat_body(tools=tools, tool_choice="required"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")

    script = Script(reply=reply, end_token=end, max_model_len=2048, blocks_total=256)
    with_server(server_settings(tmp_path), test, script, chat_template=template)
