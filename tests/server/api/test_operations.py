"""The operational routes: health, readiness, version, load and models."""

import asyncio
from pathlib import Path

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, running, server_settings, text_body, until, with_server
from tiercel import __version__
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.request import unpack_tokens


def test_a_loading_server_is_alive_and_reports_its_stage(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=0.4), wait=False) as server:
            await until(lambda: server.context.client.status.stage == "loading weights")
            ready = await server.http.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["stage"] == "loading weights"
            assert ready.json()["error"]["message"] == "Loading model: loading weights"
            assert (await server.http.get("/health")).status_code == 503
            assert (await server.http.get("/health/live")).status_code == 200
            early = await server.http.post("/v1/completions", json=text_body(max_tokens=1))
            assert early.status_code == 200
            assert (await server.http.get("/ready")).json() == {"status": "ready"}
            assert (await server.http.get("/health")).json() == {"status": "ok"}

    asyncio.run(test())


def test_a_dead_engine_is_reported_and_requests_get_503(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        server.engine.die()
        await server.context.client.status.wait_gone()
        for path in ("/health", "/ready", "/ping"):
            assert (await server.http.get(path)).status_code == 503
        answer = await server.http.post("/v1/completions", json=text_body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert "retry-after" in answer.headers

    with_server(server_settings(model_folder), test)


def test_a_hung_engine_is_reported_only_while_work_is_pending(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await asyncio.sleep(0.3)
        assert (await server.http.get("/health")).status_code == 200
        stuck = asyncio.create_task(server.http.post("/v1/completions", json=text_body()))
        await until(lambda: server.engine.steps == 1)
        await asyncio.sleep(0.3)
        assert (await server.http.get("/health")).json()["status"] == "stalled"
        assert (await server.http.get("/ready")).status_code == 503
        stuck.cancel()
        await until(lambda: server.context.client.sequences.num_unfinished == 0)
        assert (await server.http.get("/health")).status_code == 200

    with_server(server_settings(model_folder), test, Script(hang_at_step=1), stall_timeout_s=0.2)


def test_version_load_and_models(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.get("/version")).json() == {"version": __version__}
        running_one = asyncio.create_task(server.http.post("/v1/completions", json=text_body(max_tokens=10)))
        await until(lambda: server.engine.steps > 0)
        assert (await server.http.get("/load")).json() == {"server_load": 1}
        await running_one
        models = (await server.http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [card["id"] for card in models["data"]] == [MODEL, "alias"]
        assert models["data"][0]["max_model_len"] == 256
        assert str(model_folder) not in str(models)

    with_server(server_settings(model_folder), test, Script(step_s=0.05), enable_server_load_tracking=True)


def test_load_is_served_only_when_enabled(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get("/load")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    with_server(server_settings(model_folder), test)


def test_tokenize_and_detokenize_agree_with_generation(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        async def tokens(**body: object) -> dict[str, object]:
            return (await server.http.post("/tokenize", json={"model": MODEL, **body})).json()

        text = await tokens(prompt="hello <|im_end|>", return_token_strs=True)
        expected = codec.encode("hello <|im_end|>", add_special_tokens=True)
        assert (text["tokens"], text["count"], text["max_model_len"]) == (expected, len(expected), 256)
        assert isinstance(text["token_strs"], list)
        bare = await tokens(prompt="hello", add_special_tokens=False)
        assert bare["tokens"] == codec.encode("hello", add_special_tokens=False)
        assert (await tokens(prompt=""))["tokens"] == [0]
        chat = await tokens(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
        await server.http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
        )
        assert list(unpack_tokens(server.engine.submitted[-1].prompt)) == chat["tokens"]
        back = await server.http.post("/detokenize", json={"tokens": text["tokens"]})
        assert back.json() == {"prompt": "<s>hello <|im_end|>"}

    with_server(server_settings(model_folder), test)


def test_valid_request_ids_are_echoed(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        good = await server.http.get("/version", headers={"x-request-id": "a.b-C_1"})
        assert good.headers["x-request-id"] == "a.b-C_1"
        for bad in ("has space", "x" * 65, "a/b", ""):
            answer = await server.http.get("/version", headers={"x-request-id": bad})
            assert len(answer.headers["x-request-id"]) == 32
            assert answer.headers["x-request-id"] != bad

    with_server(server_settings(model_folder), test)


def test_only_ids_of_clients_are_sent_when_own_ones_are_disabled(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert "x-request-id" not in (await server.http.get("/version")).headers
        answer = await server.http.get("/version", headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"

    with_server(server_settings(model_folder), test, enable_request_id_headers=False)


def test_other_origins_are_answered_only_when_allowed(model_folder: Path) -> None:
    async def with_origins(server: Running) -> None:
        answer = await server.http.get("/version", headers={"origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"

    async def without(server: Running) -> None:
        answer = await server.http.get("/version", headers={"origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers

    with_server(server_settings(model_folder), with_origins, allowed_origins=("https://app.example",))
    with_server(server_settings(model_folder), without)


def test_the_documentation_is_off_by_default(model_folder: Path) -> None:
    async def off(server: Running) -> None:
        assert (await server.http.get("/docs")).status_code == 404
        assert (await server.http.get("/openapi.json")).status_code == 404

    async def on(server: Running) -> None:
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        assert "/v1/chat/completions" in paths

    with_server(server_settings(model_folder), off)
    with_server(server_settings(model_folder), on, disable_fastapi_docs=False)
