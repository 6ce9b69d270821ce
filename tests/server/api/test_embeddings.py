"""/v1/embeddings, /v1/score and /v1/rerank over a fake engine, whose vector is (mean of the tokens, their number)."""

import asyncio
import base64
import json
import math
import re
from array import array
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, running, server_settings, until, with_server
from tiercel.server.api.pooling import PoolingStyle, read_pooling
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.request import unpack_tokens

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
Tree = dict[str, object]


def vector_of(tokens: list[int], dimensions: int = 2) -> list[float]:
    """Return what the fake engine pools, cut and scaled to length 1."""
    pooled = [sum(tokens) / len(tokens), float(len(tokens))][:dimensions]
    return [number / math.hypot(*pooled) for number in pooled]


def test_texts_and_token_ids_alone_and_in_lists(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        tokens = codec.encode("hello world", add_special_tokens=True)
        for given, expected in (
            ("hello world", [tokens]),
            (["hello world", "a"], [tokens, codec.encode("a", add_special_tokens=True)]),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5, 6], [8]], [[5, 6], [8]]),
        ):
            answer = await server.http.post(EMBEDDINGS, json={"model": MODEL, "input": given, "user": "me"})
            assert answer.status_code == 200, answer.text
            body = cast(Tree, answer.json())
            count = sum(map(len, expected))
            assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
            assert (body["object"], body["model"]) == ("list", MODEL)
            data = cast(list[Tree], body["data"])
            assert [(entry["object"], entry["index"]) for entry in data] == [
                ("embedding", index) for index in range(len(expected))
            ]
            for entry, sent in zip(data, expected, strict=True):
                assert entry["embedding"] == pytest.approx(vector_of(sent))
        odd = await server.http.post(EMBEDDINGS, json={"input": [5], "odd": 1})
        assert odd.headers["x-tiercel-ignored-fields"] == "odd"
        request = server.engine.submitted[-1]
        assert (request.params.pooling, request.params.max_tokens) == ("last", 0)
        assert "total;dur=" in answer.headers["server-timing"]
        counted = (await server.http.get("/metrics")).text
        assert f'handler="{EMBEDDINGS}",method="POST",status="2xx"}} 5.0' in counted

    with_server(server_settings(model_folder), test)


def test_base64_equals_float(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = {"input": [[5, 6, 9], [7, 7, 2, 1]]}
        floats = (await server.http.post(EMBEDDINGS, json=body)).json()["data"]
        coded = (await server.http.post(EMBEDDINGS, json={**body, "encoding_format": "base64"})).json()["data"]
        for one, other in zip(floats, coded, strict=True):
            assert one["embedding"] == list(array("f", base64.b64decode(other["embedding"])))

    with_server(server_settings(model_folder), test)


def test_fewer_dimensions_are_scaled_again(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        for dimensions in (1, 2):
            answer = await server.http.post(EMBEDDINGS, json={"input": [5, 6, 9], "dimensions": dimensions})
            (entry,) = answer.json()["data"]
            assert entry["embedding"] == pytest.approx(vector_of([5, 6, 9], dimensions))

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (EMBEDDINGS, {}, "input", "this field is required"),
        (EMBEDDINGS, {"input": ""}, "input", "The input must not be empty"),
        (EMBEDDINGS, {"input": []}, "input", "must not be empty"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input", "must not be empty"),
        (EMBEDDINGS, {"input": [[1], []]}, "input", "must not be empty"),
        (EMBEDDINGS, {"input": {"a": 1}}, "input", "input must be a string"),
        (EMBEDDINGS, {"input": ["a", 1]}, "input", "input must be a string"),
        (EMBEDDINGS, {"input": [1024]}, "input", "out of vocabulary"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "at most 2048"),
        (EMBEDDINGS, {"input": [5] * 257}, "input_tokens", "maximum context length"),
        (EMBEDDINGS, {"input": "word " * 2000}, "input_tokens", "maximum context length"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": 9}, "dimensions", "9 of a model with 8"),
        (SCORE, {"text_1": "a"}, "text_2", "this field is required"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "one text, or 3"),
        (RERANK, {"query": "a", "documents": []}, "documents", "documents"),
        (RERANK, {"documents": ["a"]}, "query", "query"),
    ],
)
def test_refusals(path: str, body: Tree, param: str, words: str, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))

    async def test(server: Running) -> None:
        answer = await server.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        assert words in error["message"]
        assert server.engine.submitted == []
        assert (await server.http.post(path, json={**body, "model": "other"})).status_code in (400, 404)

    with_server(server_settings(folder), test)


def test_an_input_may_fill_the_context(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.post(EMBEDDINGS, json={"input": [5] * 256})).status_code == 200

    with_server(server_settings(model_folder), test)


def test_the_order_of_documents(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        texts = ["hello", "one two three four", "hello hello"]
        vectors = [vector_of(codec.encode(text, add_special_tokens=True)) for text in ["hello", *texts]]
        scores = [sum(map(lambda a, b: a * b, vectors[0], vector)) for vector in vectors[1:]]
        order = sorted(range(3), key=lambda index: -scores[index])
        answer = (await server.http.post(RERANK, json={"query": "hello", "documents": texts})).json()
        assert [entry["index"] for entry in answer["results"]] == order
        assert answer["results"][0] == {
            "index": 0,
            "document": {"text": "hello"},
            "relevance_score": pytest.approx(1.0),
        }
        body = {"query": "hello", "documents": texts, "top_n": 2, "return_documents": False}
        first = (await server.http.post(RERANK, json=body)).json()["results"]
        assert [set(entry) for entry in first] == [{"index", "relevance_score"}] * 2
        scored = (await server.http.post(SCORE, json={"text_1": "hello", "text_2": texts})).json()
        assert [entry["score"] for entry in scored["data"]] == pytest.approx(scores)
        pairs = (await server.http.post(SCORE, json={"text_1": texts, "text_2": texts})).json()
        assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1.0, 1.0, 1.0])
        for path, fields in ((RERANK, body), (SCORE, {"text_1": "a", "text_2": "b"})):
            said = (await server.http.post(path, json=fields)).headers["x-tiercel-score"]
            assert said == "cosine; model=generative"
        assert "x-tiercel-score" not in (await server.http.post(EMBEDDINGS, json={"input": "a"})).headers

    with_server(server_settings(model_folder), test)


def test_every_name_of_a_route_gives_the_same_answer(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for paths, body in (
            (("/score", "/v1/score"), {"text_1": "a", "text_2": ["b", "hello world"]}),
            (("/rerank", "/v1/rerank", "/v2/rerank"), {"query": "a", "documents": ["b", "hello world"]}),
            (("/rerank", "/v1/rerank", "/v2/rerank"), {"query": "a", "texts": ["b", "hello world"]}),
        ):
            answers: list[str] = []
            for path in paths:
                answer = await server.http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                answers.append(re.sub('"id":"[^"]*",', "", answer.text))
            assert all(one == answers[0] for one in answers)

    with_server(server_settings(model_folder), test)


def test_a_ranking_in_the_form_of_tei(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        texts = ["hello", "one two three four", "hello hello"]
        ranked = (await server.http.post(RERANK, json={"query": "hello", "documents": texts})).json()["results"]
        body = {"query": "hello", "texts": texts}
        raw = await server.http.post("/rerank", json={**body, "raw_scores": True, "return_text": True})
        assert raw.headers["x-tiercel-score"] == "cosine; model=generative"
        assert raw.json() == [
            {"index": one["index"], "score": one["relevance_score"], "text": one["document"]["text"]} for one in ranked
        ]
        answer = await server.http.post("/rerank", json=body)
        assert answer.headers["x-tiercel-score"] == "sigmoid of cosine; model=generative"
        assert answer.json() == [
            {"index": one["index"], "score": pytest.approx(1 / (1 + math.exp(-one["relevance_score"])))}
            for one in ranked
        ]
        both = await server.http.post("/rerank", json={**body, "documents": texts})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "texts")
        long = {"query": "hello", "texts": ["word " * 500]}
        refused = await server.http.post("/rerank", json=long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        sent: list[list[int]] = []
        for direction in (None, "Right", "left"):
            fields = {**long, "truncate": True, "truncation_direction": direction}
            assert (await server.http.post("/rerank", json=fields)).status_code == 200
            sent.append(list(unpack_tokens(server.engine.submitted[-1].prompt)))
        assert [len(one) for one in sent] == [256] * 3
        assert sent[0] == sent[1] != sent[2]

    with_server(server_settings(model_folder), test)


def test_keys_limits_and_clients_that_leave(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: ka, requests_per_minute: 1}, {name: b, key: kb}]\n")
    file.chmod(0o600)

    async def test(server: Running) -> None:
        body = {"input": [[5, 6], [7]]}
        assert (await server.http.post(EMBEDDINGS, json=body)).status_code == 401
        key = {"authorization": "Bearer ka"}
        assert (await server.http.post(EMBEDDINGS, json=body, headers=key)).status_code == 200
        assert (await server.http.post(EMBEDDINGS, json=body, headers=key)).status_code == 429
        other = {"authorization": "Bearer kb"}
        many = {"input": [[5]] * 5}
        refused = await server.http.post(EMBEDDINGS, json=many, headers=other)
        assert (refused.status_code, "this server holds 4" in refused.text) == (400, True)
        assert refused.json()["error"]["param"] == "input"
        waiting = asyncio.create_task(server.http.post(EMBEDDINGS, json={"input": [[5]] * 3}, headers=other))
        await until(lambda: server.engine.live == 3)
        waiting.cancel()
        await until(lambda: server.engine.live == 0 and server.context.client.sequences.num_unfinished == 0)
        assert server.context.answers.held_bytes == 0
        assert server.context.client.sequences.num_tokenless == 0
        late = await server.http.post(EMBEDDINGS, json={**body, "timeout": 0.01}, headers=other)
        assert late.status_code == 504

    async def run() -> None:
        settings = replace(server_settings(model_folder), tenants_config=str(file), max_num_queued_reqs=4)
        async with running(settings, Script(step_s=0.1)) as server:
            await test(server)

    asyncio.run(run())


def test_the_memory_of_vectors_is_limited(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(EMBEDDINGS, json={"input": [[5]] * 200})
        assert answer.status_code == 503
        assert (await server.http.post(EMBEDDINGS, json={"input": [[5]]})).status_code == 200

    with_server(server_settings(model_folder), test, max_answer_bytes=2**20)


def test_the_pooling_of_a_model(tmp_path: Path, model_folder: Path) -> None:
    assert read_pooling(tmp_path, "auto") == PoolingStyle("last", None)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 12}, "hidden_size": 3}))
    assert read_pooling(tmp_path, "mean") == PoolingStyle("mean", 12)
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in names.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    for fields, pooling in (
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, None),
    ):
        config.write_text(json.dumps(fields))
        assert read_pooling(tmp_path, "auto").pooling == pooling
        assert read_pooling(tmp_path, "mean").score == "cosine; model=embedding"
    modules.append({"type": "sentence_transformers.models.Dense", "path": "3_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    style = read_pooling(tmp_path, "auto")
    assert (style.pooling, style.reason) == (None, "its modules.json has a module Dense")


def test_the_pooling_of_the_settings(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.post(EMBEDDINGS, json={"input": [5, 6]})).status_code == 200
        assert server.engine.submitted[0].params.pooling == "mean"
        assert list(unpack_tokens(server.engine.submitted[0].prompt)) == [5, 6]

    with_server(server_settings(model_folder), test, pooling="mean")
