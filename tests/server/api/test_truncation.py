"""`truncate_prompt_tokens` on every route that has it, and `add_special_tokens` for conversations."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from tokenizers import processors

from tests.server.builders import build_byte_level
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, with_server
from tiercel.server.text.tokenizer import TextCodec, Truncation
from tiercel.values.request import unpack_tokens

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
LONG = "one two three four five six seven eight nine ten"


def _sent(server: Running) -> list[int]:
    return list(unpack_tokens(server.engine.submitted[-1].prompt))


def test_a_text_keeps_its_last_tokens_and_those_that_the_tokenizer_adds(codec: TextCodec) -> None:
    bos, *rest = codec.encode(LONG, add_special_tokens=True)
    assert codec.encode(LONG, add_special_tokens=False) == rest
    for count, expected in ((1, [bos]), (2, [bos, rest[-1]]), (4, [bos, *rest[-3:]]), (999, [bos, *rest])):
        assert codec.framed(rest, add_special_tokens=True, truncation=Truncation(count)) == expected
    right = Truncation(4, "right")
    assert codec.framed(rest, add_special_tokens=True, truncation=right) == [bos, *rest[:3]]
    assert codec.framed(rest, add_special_tokens=False, truncation=Truncation(3)) == rest[-3:]
    assert codec.framed(rest, add_special_tokens=False) == rest


def test_tokens_behind_a_text_stay() -> None:
    tokenizer = build_byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    codec = TextCodec(tokenizer.to_str(), {}, None)
    whole = codec.encode(LONG, add_special_tokens=True)
    plain = whole[1:-1]
    assert codec.framed(plain, add_special_tokens=True) == whole
    assert codec.framed(plain, add_special_tokens=True, truncation=Truncation(4)) == [0, *plain[-2:], 1]
    assert codec.framed(plain, add_special_tokens=True, truncation=Truncation(1)) == [1]


def test_prompts_of_completions(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        bos, *rest = codec.encode(LONG, add_special_tokens=True)
        for given, fields, expected in (
            (LONG, {}, [bos, *rest[-4:]]),
            (LONG, {"add_special_tokens": False}, rest[-5:]),
            (LONG, {"truncation_side": "right"}, [bos, *rest[:4]]),
            ([5, 6, 7, 8, 9, 10], {}, [6, 7, 8, 9, 10]),
            ([[5, 6, 7, 8, 9, 10]], {"truncation_side": "right"}, [5, 6, 7, 8, 9]),
            ("a", {}, codec.encode("a", add_special_tokens=True)),
        ):
            body = text_body(given, truncate_prompt_tokens=5, max_tokens=1, **fields)
            answer = await server.http.post(TEXT, json=body)
            assert answer.status_code == 200, answer.text
            assert _sent(server) == expected
            assert answer.json()["usage"]["prompt_tokens"] == len(expected)
            assert "x-tiercel-ignored-fields" not in answer.headers
        echoed = text_body(LONG, truncate_prompt_tokens=4, max_tokens=1, echo=True, logprobs=0)
        (choice,) = (await server.http.post(TEXT, json=echoed)).json()["choices"]
        assert choice["text"].startswith("<s>" + codec.decode(rest[-3:]))
        assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"])

    with_server(server_settings(model_folder), test)


def test_a_text_beyond_the_context_is_truncated(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        text = "word " * 2000
        assert (await server.http.post(TEXT, json=text_body(text, max_tokens=4))).status_code == 400
        for route, body, expected in (
            (TEXT, text_body(text, max_tokens=4), 252),
            (TEXT, text_body([5] * 400, max_tokens=4), 252),
            (TEXT, text_body([5] * 400), 240),  # 16 outputs
            (TEXT, text_body([5] * 400, max_tokens=0, echo=True), 256),
            (CHAT, chat_body(messages=[{"role": "user", "content": text}], max_completion_tokens=6), 250),
            (CHAT, chat_body(messages=[{"role": "user", "content": text}]), 255),
            (EMBEDDINGS, {"input": text}, 256),
            (EMBEDDINGS, {"input": [5] * 400}, 256),
            ("/rerank", {"query": "a", "documents": [text]}, 256),
            ("/score", {"text_1": "a", "text_2": text}, 256),
        ):
            answer = await server.http.post(route, json={**body, "truncate_prompt_tokens": -1})
            assert answer.status_code == 200, f"{route} {answer.text}"
            assert len(_sent(server)) == expected

    with_server(server_settings(model_folder), test)


def test_a_text_that_is_truncated_has_a_limit_too(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        text = "é0x " * 150_000  # more tokens than a body may have values
        for route, body in (
            (TEXT, text_body(text)),
            (CHAT, chat_body(messages=[{"role": "user", "content": text}])),
            (EMBEDDINGS, {"input": text}),
            ("/tokenize", {"prompt": text}),
        ):
            more = {} if route == "/tokenize" else {"truncate_prompt_tokens": 8}
            answer = await server.http.post(route, json={**body, **more})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "at most 262144 are read" in answer.json()["error"]["message"]

    with_server(server_settings(model_folder), test)


def test_the_tenants_quota_is_what_minus_one_stands_for(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: ka, kv_quota_bytes: {hbm: 2048}}]\n")
    file.chmod(0o600)

    async def test(server: Running) -> None:
        key = {"authorization": "Bearer ka"}
        body = text_body([5] * 400, truncate_prompt_tokens=-1, max_tokens=1)
        answer = await server.http.post(TEXT, json=body, headers=key)
        assert answer.status_code == 200, answer.text
        assert len(_sent(server)) == 32

    with_server(replace(server_settings(model_folder), tenants_config=str(file)), test)


@pytest.mark.parametrize(
    ("route", "body", "value", "words"),
    [
        (TEXT, text_body(max_tokens=6), 251, "max_model_len - max_tokens = 250"),
        (TEXT, text_body(), 241, "= 240"),
        (TEXT, text_body(), 10**18, "smaller truncation size"),
        (TEXT, text_body(), -2, "at least -1"),
        (TEXT, text_body(), 0, "at least 1"),
        (TEXT, text_body(), True, "an integer"),
        (TEXT, text_body(), 2**63, "at most"),
        (CHAT, chat_body(), 257, "= 256"),
        (EMBEDDINGS, {"input": "a"}, 257, "= 256"),
        ("/rerank", {"query": "a", "documents": ["b"]}, 257, "= 256"),
        ("/score", {"text_1": "a", "text_2": "b"}, 0, "at least 1"),
        ("/v1/responses", {"input": "a"}, 5, "not supported"),
        ("/v1/messages", chat_body(max_tokens=3), 5, "not supported"),
        ("/tokenize", text_body(), 5, "not supported"),
    ],
)
def test_refusals(route: str, body: dict[str, object], value: int, words: str, model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(route, json={**body, "truncate_prompt_tokens": value})
        assert answer.status_code == 400, answer.text
        assert words in answer.text
        assert "truncate_prompt_tokens" in answer.text
        assert server.engine.submitted == []

    with_server(server_settings(model_folder), test)


def test_messages_with_the_tokenizers_special_tokens(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        for messages in ([{"role": "user", "content": "hello"}], [{"role": "user", "content": "a <|im_end|> b"}]):
            given = {"model": MODEL, "messages": messages}
            plain = (await server.http.post("/tokenize", json=given)).json()["tokens"]
            both = (await server.http.post("/tokenize", json={**given, "add_special_tokens": True})).json()["tokens"]
            bos = codec.encode("", add_special_tokens=True)
            assert both == [*bos, *plain]
            for fields, expected in (({}, plain), ({"add_special_tokens": True}, both)):
                more = {"max_tokens": 1, **fields}
                assert (await server.http.post(CHAT, json={**given, **more})).status_code == 200
                assert _sent(server) == expected
            truncated = {**given, "max_tokens": 1, "truncate_prompt_tokens": 4}
            assert (await server.http.post(CHAT, json=truncated)).status_code == 200
            assert _sent(server) == plain[-4:]

    with_server(server_settings(model_folder), test)


def test_an_empty_text_and_messages_that_are_null(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        empty = (await server.http.post("/tokenize", json={"prompt": "", "messages": None})).json()
        assert (empty["tokens"], empty["count"]) == ([0], 1)
        bare = await server.http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})
        assert bare.json()["tokens"] == []
        assert (await server.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    with_server(server_settings(model_folder), test)


def test_the_tokenizers_configuration_behind_its_flag(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get("/tokenizer_info")
        if not server.context.settings.tokenizer_info_endpoint:
            assert answer.status_code == 404
            return
        fields = answer.json()
        assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert (fields["bos_token"], fields["eos_token"]) == ("<s>", "</s>")
        assert fields["chat_template"] == server.context.codec.chat_template
        assert str(model_folder) not in answer.text

    for is_enabled in (False, True):
        with_server(server_settings(model_folder), test, tokenizer_info_endpoint=is_enabled)
