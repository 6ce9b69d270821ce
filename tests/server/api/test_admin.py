"""/admin/tenants: access, what is shown, and changes that are made whole or not at all."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.server.harness import Running, running, server_settings, text_body, with_server

ADMIN = "/admin/tenants"
FILE = "admin_key: boss\nsecret: s\ntenants: [{name: acme, key: one, weight: 2, queue_share: 0.5}]\n"
OTHER = "tenants: [{name: new, keys: [two, three]}]\n"


def _headers(key: str | None = "boss", kind: str = "application/yaml") -> dict[str, str]:
    return ({} if key is None else {"authorization": f"Bearer {key}"}) | {"content-type": kind}


async def _put(server: Running, text: str | bytes, key: str | None = "boss", kind: str = "application/yaml") -> Any:
    return await server.http.put(ADMIN, content=text, headers=_headers(key, kind))


async def _status(server: Running, key: str) -> int:
    return (await server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    return path


def test_admin_routes_need_the_admin_key(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        for key in (None, "one", "nobody"):
            for answer in (await server.http.get(ADMIN, headers=_headers(key)), await _put(server, OTHER, key)):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.context.tenants.table.version == 1
        for key in ("boss", "deputy"):
            assert (await server.http.get(ADMIN, headers=_headers(key))).status_code == 200
            assert await _status(server, key) == 401

    with_server(server_settings(model_folder), test, tenants_config=str(file), admin_key="deputy")


def test_admin_routes_are_disabled_without_an_admin_key(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        for key in (None, "one"):
            answer = await server.http.get(ADMIN, headers=_headers(key))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_disabled")

    with_server(server_settings(model_folder), test, api_keys=("one",))
    with_server(server_settings(model_folder), test)
    file.write_text(FILE.replace("admin_key: boss\n", ""))
    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_tenants_are_shown_with_everything_but_their_keys(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> httpx.Response:
        return await server.http.get(ADMIN, headers=_headers())

    answer = with_server(server_settings(model_folder), test, tenants_config=str(file))
    digest = hashlib.sha256(b"one").hexdigest()
    assert answer.json() == {
        "version": 1,
        "source": "file",
        "tenants": [
            {
                "name": "acme",
                "keys_sha256": [f"{digest[:8]}…"],
                "weight": 2.0,
                "band": 0,
                "group": None,
                "requests_per_minute": None,
                "tokens_per_minute": None,
                "max_concurrency": None,
                "queue_share": 0.5,
                "queue_timeout_s": None,
                "kv_quota_bytes": {"hbm": None, "ddr": None, "ssd": None},
                "slo": {"class": "interactive", "ttft_s": None, "tbt_s": None},
                "best_effort": None,
            }
        ],
    }
    assert digest[:9] not in answer.text


@pytest.mark.parametrize("kind", ["application/yaml", "text/plain", "application/json", "application/json; charset=x"])
def test_a_document_replaces_the_tenants(kind: str, model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        text = OTHER if "json" not in kind else json.dumps({"tenants": [{"name": "new", "keys": ["two", "three"]}]})
        before = server.context.tenants.table
        answer = await _put(server, text, kind=kind)
        assert (answer.status_code, answer.json()["version"], answer.json()["source"]) == (200, 2, "request")
        assert [tenant["name"] for tenant in answer.json()["tenants"]] == ["new"]
        assert [await _status(server, key) for key in ("one", "two", "three")] == [401, 200, 200]
        after = server.context.tenants.table
        assert (after.secret, after.admin_digests) == (before.secret, before.admin_digests)
        assert await server.context.tenants.reload()
        assert [await _status(server, key) for key in ("one", "two")] == [200, 401]
        assert server.context.tenants.table.version == 3

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_a_new_admin_key_is_accepted_beside_the_one_of_the_settings(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        assert (await _put(server, f"admin_key: chief\n{OTHER}")).status_code == 200
        statuses = [(await server.http.get(ADMIN, headers=_headers(key))).status_code for key in ("boss", "chief")]
        assert statuses == [401, 200]
        assert (await server.http.get(ADMIN, headers=_headers("deputy"))).status_code == 200

    with_server(server_settings(model_folder), test, tenants_config=str(file), admin_key="deputy")


def test_a_server_without_a_tenants_file_accepts_tenants(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.post("/v1/completions", json=text_body(max_tokens=1))).status_code == 200
        assert (await _put(server, OTHER)).status_code == 200
        assert (await server.http.post("/v1/completions", json=text_body(max_tokens=1))).status_code == 401
        assert await _status(server, "two") == 200
        assert not await server.context.tenants.reload()
        assert await _status(server, "two") == 200

    with_server(server_settings(model_folder), test, admin_key="boss")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("tenants: [{name: a, key: x, weight: -1}]", "application/yaml", "request body: tenant a: weight -1: expected"),
        ("tenants: [{name: a, key: boss}]", "application/yaml", "the admin has it too"),
        ("a: *b", "application/yaml", "request body: line 1: aliases are not supported"),
        ("{", "application/json", "request body: not JSON"),
        ("", "application/json", "request body: not JSON"),
        ("", "text/yaml", "request body: expected fields"),
        (OTHER, "application/json", "request body: not JSON"),
        (OTHER, "image/png", "Unsupported Media Type"),
        ("x" * (1024 * 1024 + 1), "text/plain", "at most 1,048,576"),
    ],
)
def test_a_wrong_document_changes_nothing(text: str, kind: str, words: str, model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        answer = await _put(server, text, kind=kind)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_tenants")
        assert words in error["message"]
        assert (server.context.tenants.table.version, await _status(server, "one")) == (1, 200)
        refused = 0 if kind == "image/png" else 1
        assert f"config_errors_total {refused}\n" in (await server.http.get("/metrics")).text
        assert (await server.http.get("/ready")).status_code == 200

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_concurrent_changes_are_made_one_by_one(model_folder: Path, file: Path) -> None:
    async def test() -> None:
        async with running(replace(server_settings(model_folder), tenants_config=str(file))) as server:
            texts = [f"tenants: [{{name: t{index}, key: k{index}}}]" for index in range(10)]
            answers = await asyncio.gather(*(_put(server, text) for text in texts))
            assert sorted(answer.json()["version"] for answer in answers) == list(range(2, 12))
            last = max(answers, key=lambda answer: answer.json()["version"]).json()["tenants"][0]["name"]
            assert server.context.tenants.table.tenants[0].name == last

    asyncio.run(test())
