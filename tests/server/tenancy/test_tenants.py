"""Tenants over HTTP: whose request it is, what their limits answer, and how the table changes under traffic."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server
from tiercel.server.api.context import ServerContext
from tiercel.values.ids import TenantId
from tiercel.values.request import Request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FILE = """
admin_key: boss
secret: s
tenants:
  - {name: acme, key: one, band: 2, group: g}
  - {name: other, keys: [two, three]}
  - {name: friend, key: four, group: g}
  - {name: slow, key: rpm, requests_per_minute: 2}
  - {name: small, key: tpm, tokens_per_minute: 60}
  - {name: single, key: cc, max_concurrency: 1}
  - {name: short, key: qs, queue_share: 0.1}
  - {name: kind, key: be, best_effort: {max_tokens: 2, band: 7}}
"""


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    return path


def _write(file: Path, text: str) -> None:
    file.write_text(text)


async def _ask(server: Running, key: str, route: str = TEXT, **fields: object) -> httpx.Response:
    body = text_body(**fields) if route == TEXT else chat_body(**fields)
    return await server.http.post(route, json=body, headers=_key(key))


async def _idle(server: Running) -> None:
    """Wait until no request is left."""
    await until(lambda: server.context.client.sequences.num_unfinished == 0)
    assert server.context.admission.num_reserved == 0


def test_the_key_chooses_the_tenant_and_nothing_else_does(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> list[Request]:
        for key, user in (("one", "other"), ("two", "acme"), ("three", "acme"), ("four", "x")):
            answer = await _ask(server, key, user=user, max_tokens=1)
            assert answer.status_code == 200
        await _ask(server, "one", CHAT, user="other", max_tokens=1, cache_salt="pepper")
        for key in ("boss", "nobody", "acme"):
            assert (await _ask(server, key)).status_code == 401
        return server.engine.submitted

    requests = with_server(server_settings(model_folder), test, tenants_config=str(file))
    assert [request.tenant for request in requests] == ["acme", "other", "other", "friend", "acme"]
    acme, other, again, friend, salted = (request.scope for request in requests)
    assert other == again
    assert acme == friend
    assert len({acme, other, salted}) == 3


def test_scopes_are_the_same_after_a_restart(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> list[bytes]:
        for fields in ({}, {"cache_salt": "pepper"}):
            await _ask(server, "one", max_tokens=1, **fields)
        return [request.scope for request in server.engine.submitted]

    settings = server_settings(model_folder)
    first = with_server(settings, test, tenants_config=str(file))
    assert with_server(settings, test, tenants_config=str(file)) == first
    file.write_text(FILE.replace("secret: s", "secret: t"))
    assert not set(with_server(settings, test, tenants_config=str(file))) & set(first)


def test_a_prompt_over_the_quota_of_its_tenant_is_refused_by_its_name(model_folder: Path, tmp_path: Path) -> None:
    """Whole blocks count, of 16 tokens and 1024 bytes; the answer may grow up to the quota, whatever its limit."""
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: a, kv_quota_bytes: {hbm: 3071}}, {name: b, key: b}]")

    async def test(server: Running) -> None:
        refused = await _ask(server, "a", prompt=[5] * 33, max_tokens=1)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["message"].startswith(
            "Your prompt contains 33 input tokens, and kv_quota_bytes.hbm of your tenant"
        )
        assert "room for 32." in error["message"]
        assert (error["param"], error["code"]) == ("input_tokens", "context_length_exceeded")
        chat = await _ask(server, "a", CHAT, messages=[{"role": "user", "content": "long " * 40}], max_tokens=1)
        assert (chat.status_code, "kv_quota_bytes.hbm" in chat.json()["error"]["message"]) == (400, True)
        assert not server.engine.submitted
        await _idle(server)
        for key, length in (("a", 32), ("b", 33)):
            assert (await _ask(server, key, prompt=[5] * length, max_tokens=2)).status_code == 200

    with_server(server_settings(model_folder), test, tenants_config=str(file))


@pytest.mark.parametrize(("priority", "band"), [(None, 2), (0, 2), (-9, 2), (2, 2), (5, 5), (99999, 15)])
def test_a_priority_is_clamped_to_the_band_of_the_tenant(
    priority: int | None, band: int, model_folder: Path, file: Path
) -> None:
    async def test(server: Running) -> int:
        fields = {} if priority is None else {"priority": priority}
        assert (await _ask(server, "one", max_tokens=1, **fields)).status_code == 200
        return server.engine.submitted[0].band

    assert with_server(server_settings(model_folder), test, tenants_config=str(file)) == band


def test_a_priority_must_be_a_whole_number(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for wrong in ("high", 1.5, 2**31):
            answer = await server.http.post(TEXT, json=text_body(priority=wrong))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")

    with_server(server_settings(model_folder), test)


def test_the_engine_gets_the_tenants_at_start_and_at_every_change(model_folder: Path, file: Path) -> None:
    async def test() -> None:
        settings = replace(server_settings(model_folder), tenants_config=str(file))
        async with running(settings, Script(load_s=0.2), wait=False) as server:
            assert server.engine.tenants == []
            await server.context.client.status.wait_ready()
            await until(lambda: len(server.engine.tenants) == 1)
            assert await server.context.tenants.reload()
            await until(lambda: len(server.engine.tenants) == 2)
            assert [reported.version for reported in server.engine.tenants] == [1, 2]
            reported = server.engine.tenants[0].tenants
            assert [share.name for share in reported][:2] == ["acme", "other"]
            assert (reported[0].band, reported[0].group) == (2, "g")

    asyncio.run(test())


def test_without_a_file_there_is_one_tenant_and_no_limit(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await _ask(server, "one", max_tokens=1)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith(("x-ratelimit", "x-tiercel"))]
        (request,) = server.engine.submitted
        assert (request.tenant, request.band, request.scope) == ("default", 0, b"")
        await until(lambda: bool(server.engine.tenants))
        assert [share.name for share in server.engine.tenants[0].tenants] == ["default"]

    with_server(server_settings(model_folder), test, api_keys=("one",))


def _check_refusal(answer: httpx.Response) -> None:
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1


def test_requests_a_minute_answer_429_with_headers_on_every_answer(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        first = await _ask(server, "rpm", max_tokens=1)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        second = await _ask(server, "rpm", CHAT, max_tokens=1, stream=True)
        assert (second.status_code, second.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        third = await _ask(server, "rpm", max_tokens=1)
        _check_refusal(third)
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        for route in ("/tokenize", "/detokenize"):
            _check_refusal(await server.http.post(route, json={"prompt": "a", "tokens": [8]}, headers=_key("rpm")))
        assert (await server.http.get("/v1/models", headers=_key("rpm"))).status_code == 200
        await _idle(server)
        text = (await server.http.get("/metrics?detail=tenants")).text
        assert 'tiercel_tenant_throttled_total{tenant="slow"} 3\n' in text
        assert 'tiercel_tenant_throttled_by_reason_total{reason="requests",tenant="slow"} 3\n' in text
        assert 'reason="tenant_requests"} 3.0' in text

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_tokens_per_minute_are_settled_with_the_generated_tokens(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        first = await _ask(server, "tpm", prompt=[8] * 10, max_tokens=40, stop_token_ids=[9])
        assert first.status_code == 200
        await _idle(server)
        second = await _ask(server, "tpm", prompt=[8] * 10, max_tokens=40)
        _check_refusal(second)
        assert second.headers["x-ratelimit-limit-tokens"] == "60"
        assert 10 <= int(second.headers["x-ratelimit-remaining-tokens"]) < 30
        wrong = await _ask(server, "tpm", prompt=[8] * 61, max_tokens=1)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "tenant_limit_exceeded")
        await _idle(server)

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_sequences_at_once_and_places_in_the_queue_answer_429(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        for key in ("cc", "qs"):
            async with server.http.stream("POST", TEXT, json=text_body([8], max_tokens=50), headers=_key(key)):
                pass  # its whole answer was taken: nothing is held by then
            async with asyncio.TaskGroup() as group:
                group.create_task(_ask(server, key, prompt=[8], max_tokens=3))
                await until(lambda: server.context.client.sequences.num_tokenless == 1)
                _check_refusal(await _ask(server, key, prompt=[8], max_tokens=3))
            assert (await _ask(server, key, prompt=[8], max_tokens=1)).status_code == 200
            await _idle(server)
        crowd = await _ask(server, "cc", n=2)
        assert (crowd.status_code, crowd.json()["error"]["param"]) == (400, "n")

    with_server(
        server_settings(model_folder), test, Script(step_s=0.05), tenants_config=str(file), max_num_queued_reqs=10
    )


def test_a_client_that_leaves_gives_its_place_back(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        for _ in range(3):
            async with server.http.stream(
                "POST", TEXT, json=text_body([8], max_tokens=200, stream=True), headers=_key("cc")
            ) as answer:
                assert answer.status_code == 200
                async for _line in answer.aiter_lines():
                    break
            await _idle(server)

    with_server(server_settings(model_folder), test, Script(step_s=0.01), tenants_config=str(file))


class _Counted(ThreadPoolExecutor):
    """Workers that count what they are given."""

    jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self.jobs += 1
        return super().submit(fn, *args, **kwargs)


def test_gate_one_refuses_before_anything_is_tokenised(model_folder: Path, file: Path) -> None:
    workers = _Counted(1)

    def counted(context: ServerContext) -> ServerContext:
        context.workers.shutdown()
        return dataclasses.replace(context, workers=workers)

    async def test() -> None:
        settings = replace(server_settings(model_folder), tenants_config=str(file), max_num_queued_reqs=1)
        async with running(settings, Script(step_s=0.2), changed=counted) as server:
            for _ in range(2):
                assert (await _ask(server, "rpm", max_tokens=1)).status_code == 200
            assert workers.jobs == 2
            for route in (TEXT, CHAT):
                _check_refusal(await _ask(server, "rpm", route))
            async with asyncio.TaskGroup() as group:
                group.create_task(_ask(server, "two", prompt=[8], max_tokens=1))
                await until(lambda: server.context.client.sequences.num_tokenless == 1)
                full = await _ask(server, "three")
                assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
            assert workers.jobs == 2

    asyncio.run(test())


def test_a_refused_request_leaves_no_reservation(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        before = (await _ask(server, "tpm", prompt=[8], max_tokens=1)).headers
        for body in (text_body([1, 5000]), text_body("x", max_tokens=500), text_body("x", min_tokens=9, max_tokens=8)):
            assert (await server.http.post(TEXT, json=body, headers=_key("tpm"))).status_code == 400
        after = (await _ask(server, "tpm", prompt=[8], max_tokens=1)).headers
        left = [int(headers["x-ratelimit-remaining-tokens"]) for headers in (before, after)]
        assert left[1] >= left[0] - 2
        await _idle(server)
        assert server.context.metrics.tenants.sample(TenantId("small")).waiting == 0

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_under_overload_a_shortened_answer_is_marked(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        whole = await _ask(server, "be", prompt=[8], max_tokens=5)
        assert (whole.headers["x-tiercel-service"], whole.json()["usage"]["completion_tokens"]) == ("full", 5)
        async with asyncio.TaskGroup() as group:
            group.create_task(_ask(server, "two", prompt=[8], max_tokens=150))
            await until(lambda: server.engine.live == 1)
            for _ in range(8):
                group.create_task(_ask(server, "two", prompt=[8], max_tokens=1))
            await until(lambda: server.context.client.sequences.num_tokenless == 8)
            for _ in range(15):  # requests show how full the queue is, for long enough
                await asyncio.sleep(0.1)
                await server.http.post("/tokenize", json={"prompt": "a"}, headers=_key("two"))
            cheap = await _ask(server, "be", prompt=[8], max_tokens=5)
        assert cheap.headers["x-tiercel-service"] == "deferred"
        assert cheap.json()["usage"]["completion_tokens"] == 2
        assert cheap.json()["choices"][0]["finish_reason"] == "length"
        assert server.engine.submitted[-1].band == 7

    with_server(
        server_settings(model_folder), test, Script(step_s=0.02, max_running=1),
        tenants_config=str(file), max_num_queued_reqs=10,
    )  # fmt: skip


def test_a_reload_under_traffic_is_all_or_nothing(model_folder: Path, file: Path) -> None:
    tables = {
        "a": "tenants:\n  - {name: x, key: one}\n  - {name: y, key: two}\n",
        "b": "tenants:\n  - {name: y, key: one}\n  - {name: x, key: two}\n",
    }

    async def test(server: Running) -> None:
        is_over = False
        seen: list[int] = []

        async def ask(key: str) -> None:
            while not is_over:
                answer = await _ask(server, key, prompt=[8], max_tokens=2, stream=True)
                seen.append(answer.status_code)
                assert answer.text.endswith("data: [DONE]\n\n")

        async with asyncio.TaskGroup() as group:
            for key in ("one", "two") * 3:
                group.create_task(ask(key))
            for turn in range(30):
                _write(file, tables["ab"[turn % 2]] if turn % 3 else "tenants: [")
                is_good = await server.context.tenants.reload()
                assert is_good == bool(turn % 3)
                names = {key: server.context.tenants.table.find(f"Bearer {key}") for key in ("one", "two")}
                found = {tenant.name for tenant in names.values() if tenant is not None}
                assert found == {"x", "y"}
                assert (await server.http.get("/ready")).status_code == 200
            is_over = True
        assert set(seen) == {200}
        assert server.context.tenants.table.version == 1 + 20
        await _idle(server)
        text = (await server.http.get("/metrics")).text
        assert "tiercel_tenants_config_version 21\n" in text
        assert "tiercel_tenants_config_errors_total 10\n" in text

    file.write_text(tables["a"])
    with_server(server_settings(model_folder), test, Script(step_s=0.002), tenants_config=str(file))


def test_a_bad_reload_is_logged_and_streams_of_a_removed_tenant_continue(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        stream = server.http.stream("POST", TEXT, json=text_body(stream=True, max_tokens=40), headers=_key("two"))
        async with stream as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            _write(file, FILE.replace("weight", "wait").replace("band: 2", "band: 99"))
            assert not await server.context.tenants.reload()
            assert (await server.http.get("/v1/models", headers=_key("two"))).status_code == 200
            _write(file, "tenants: [{name: new, key: five}]")
            assert await server.context.tenants.reload()
            assert (await server.http.get("/v1/models", headers=_key("two"))).status_code == 401
            assert (await server.http.get("/v1/models", headers=_key("five"))).status_code == 200
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await _idle(server)

    with structlog.testing.capture_logs() as logs:
        with_server(server_settings(model_folder), test, Script(step_s=0.01), tenants_config=str(file))
    (bad,) = [entry for entry in logs if entry["event"] == "tenants_refused"]
    assert bad["reason"] == f"{file}: tenant acme: band 99: expected a whole number from 0 to 15"
    assert bad["version"] == 1
    (good,) = [entry for entry in logs if entry["event"] == "tenants_changed"]
    assert (good["version"], good["tenants"]) == (2, 1)
    assert [entry["tenant"] for entry in logs if entry["event"] == "request_done"] == ["other"]


def test_figures_of_the_tenants_that_were_seen(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> str:
        assert "tiercel_tenant_" not in _samples((await server.http.get("/metrics")).text)
        await _ask(server, "one", prompt=[8, 9], max_tokens=3)
        async with asyncio.TaskGroup() as group:
            group.create_task(_ask(server, "two", prompt=[8], max_tokens=20))
            await until(lambda: server.context.metrics.tenants.sample(TenantId("other")).running == 1)
            return (await server.http.get("/metrics?detail=tenants")).text

    script = Script(step_s=0.02, extra={"queued_s": 0.001})
    text = with_server(server_settings(model_folder), test, script, tenants_config=str(file))
    for line in (
        'running{tenant="acme"} 0',
        'running{tenant="other"} 1',
        'waiting{tenant="other"} 0',
        'weight{tenant="acme"} 1.0',
        'prompt_tokens_total{tenant="acme"} 2',
        'generation_tokens_total{tenant="acme"} 3',
        'queue_seconds_total{tenant="acme"} 0.001',
        'ttft_seconds_bucket{le="10.0",tenant="acme"} 1',
        'ttft_seconds_bucket{le="+Inf",tenant="acme"} 1',
        'ttft_seconds_count{tenant="acme"} 1',
    ):
        assert f"tiercel_tenant_{line}\n" in text
    assert "single" not in text


def _samples(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def test_a_prompt_that_cannot_meet_its_goal_is_refused_at_gate_two(model_folder: Path, file: Path) -> None:
    file.write_text("tenants: [{name: fast, key: one, slo: {ttft_s: 0.01}}, {name: bulk, key: two}]")

    async def test(server: Running) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(_ask(server, "two", prompt=[8] * 200, max_tokens=30))
            await until(lambda: server.context.client.sequences.num_started == 3)  # the speed is known by now
            answer = await _ask(server, "one", prompt=[8], max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        await _idle(server)
        assert (await _ask(server, "one", prompt=[8], max_tokens=1)).status_code == 200

    script = Script(step_s=0.01, max_running=1)
    with_server(server_settings(model_folder), test, script, tenants_config=str(file), scheduling_policy="fcfs")


def test_keys_are_not_logged_and_not_shown(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> str:
        await _ask(server, "three")
        return (await server.http.get("/metrics")).text + json.dumps(
            (await server.http.get("/admin/tenants", headers=_key("boss"))).json()
        )

    with structlog.testing.capture_logs() as logs:
        text = with_server(server_settings(model_folder), test, tenants_config=str(file))
    for secret in ("three", "boss"):
        assert secret not in text + str(logs)
