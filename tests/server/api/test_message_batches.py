"""/v1/messages/batches: results, cancelling, pages, tenants, restarts, and bodies that are refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, running, server_settings, with_server
from tiercel.server.api.schemas.message_batches import max_requests, read_requests
from tiercel.values.errors import AdmissionError

BATCHES = "/v1/messages/batches"
ONE, TWO = {"x-api-key": "one"}, {"x-api-key": "two"}
TENANTS = "tenants:\n  - {name: acme, key: one}\n  - {name: other, key: two}\n"
FIELDS = {
    "id", "type", "processing_status", "request_counts", "ended_at", "created_at", "expires_at", "archived_at",
    "cancel_initiated_at", "results_url",
}  # fmt: skip
Tree = dict[str, Any]


def entry(number: object, **more: object) -> Tree:
    messages = [{"role": "user", "content": f"hello {number}"}]
    return {"custom_id": f"id-{number}", "params": {"model": MODEL, "max_tokens": 3, "messages": messages, **more}}


async def begin(http: httpx.AsyncClient, requests: list[Tree], headers: dict[str, str] | None = None) -> Tree:
    answer = await http.post(BATCHES, json={"requests": requests}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until_ended(http: httpx.AsyncClient, id: str, headers: dict[str, str] | None = None) -> Tree:
    async with asyncio.timeout(20):
        while True:
            batch = (await http.get(f"{BATCHES}/{id}", headers=headers)).raise_for_status().json()
            assert set(batch) == FIELDS
            if batch["processing_status"] == "ended":
                return batch
            counts = batch["request_counts"]
            assert counts == {**dict.fromkeys(counts, 0), "processing": sum(counts.values())}
            assert batch["results_url"] is None and batch["ended_at"] is None
            await asyncio.sleep(0.01)


async def results(http: httpx.AsyncClient, batch: Tree, headers: dict[str, str] | None = None) -> Tree:
    """Return the results by custom id; each request has one."""
    answer = (await http.get(batch["results_url"], headers=headers)).raise_for_status()
    assert answer.headers["content-type"] == "application/x-jsonl"
    found = [json.loads(line) for line in answer.text.splitlines()]
    by_id = {one["custom_id"]: one["result"] for one in found}
    assert len(by_id) == len(found) == sum(batch["request_counts"].values())
    for kind, count in batch["request_counts"].items():
        assert sum(one["type"] == kind for one in by_id.values()) == count, kind
    return by_id


def test_every_request_has_its_result(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        wrong = [entry("hot", temperature=2), entry("unknown", model="nothing"), entry("odd", messages=1)]
        batch = await begin(server.http, [*(entry(number, stream=False) for number in range(5)), *wrong])
        assert set(batch) == FIELDS and batch["type"] == "message_batch"
        assert batch["id"].startswith("msgbatch_") and batch["processing_status"] == "in_progress"
        assert batch["request_counts"] == {"processing": 8, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
        batch = await until_ended(server.http, batch["id"])
        assert batch["results_url"] == f"{server.url}{BATCHES}/{batch['id']}/results"
        assert batch["created_at"].endswith("Z") and batch["ended_at"] >= batch["created_at"]
        assert batch["cancel_initiated_at"] is None and batch["archived_at"] is None
        found = await results(server.http, batch)
        message = found["id-3"]["message"]
        assert message["type"] == "message" and message["role"] == "assistant" and message["content"]
        for name, kind in (("hot", "invalid_request_error"), ("unknown", "not_found_error")):
            error = found[f"id-{name}"]["error"]
            assert error["type"] == "error" and error["error"]["type"] == kind and error["request_id"]
        assert {request.band for request in server.engine.submitted} == {15}
        proxied = {"x-forwarded-proto": "https", "x-forwarded-host": "llm.example"}
        shown = (await server.http.get(f"{BATCHES}/{batch['id']}", headers=proxied)).json()
        assert shown["results_url"] == f"https://llm.example{BATCHES}/{batch['id']}/results"
        files = (await server.http.get("/v1/files")).json()["data"]
        assert {file["purpose"] for file in files} == {"batch_output"} and len(files) == 2  # the requests are gone
        assert (await server.http.get("/v1/batches")).json()["data"] == []
        assert (await server.http.get(f"/v1/batches/{batch['id']}")).status_code == 404
        deleted = (await server.http.delete(f"{BATCHES}/{batch['id']}")).json()
        assert deleted == {"id": batch["id"], "type": "message_batch_deleted"}
        assert (await server.http.get("/v1/files")).json()["data"] == []
        for method, more in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            answer = await server.http.request(method, f"{BATCHES}/{batch['id']}{more}")
            assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"))


def test_a_cancelled_batch_names_the_requests_that_were_not_answered(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        long = [entry(number, max_tokens=200) for number in range(40)]
        first, behind = await begin(server.http, long), await begin(server.http, [entry(1), entry(2)])
        path = f"{BATCHES}/{first['id']}"
        for method, place, status in (("DELETE", path, 400), ("GET", f"{path}/results", 404)):
            answer = await server.http.request(method, place)
            assert answer.status_code == status and answer.json()["type"] == "error"
        waiting = (await server.http.post(f"{BATCHES}/{behind['id']}/cancel")).json()
        assert waiting["cancel_initiated_at"] is not None
        assert (await server.http.post(f"{path}/cancel")).json()["processing_status"] in ("canceling", "ended")
        batch, waiting = await until_ended(server.http, first["id"]), await until_ended(server.http, behind["id"])
        assert batch["request_counts"]["canceled"] > 0 and waiting["request_counts"]["canceled"] == 2
        assert (await results(server.http, batch)).keys() == {f"id-{number}" for number in range(40)}
        assert (await results(server.http, waiting))["id-1"] == {"type": "canceled"}
        answer = await server.http.post(f"{path}/cancel")
        assert answer.status_code == 400 and "has ended" in answer.json()["error"]["message"]

    settings = server_settings(model_folder)
    with_server(settings, test, Script(step_s=0.02), files_path=str(tmp_path / "files"))


def test_batches_go_on_after_a_restart(model_folder: Path, tmp_path: Path) -> None:
    settings = replace(server_settings(model_folder), files_path=str(tmp_path / "files"))
    begun: list[Tree] = []

    async def start(server: Running) -> None:
        begun.append(await begin(server.http, [entry(number, max_tokens=30) for number in range(20)]))
        begun.append(await begin(server.http, [entry(number) for number in range(3)]))

    async def go_on(server: Running) -> None:
        batch = await until_ended(server.http, begun[0]["id"])
        assert batch["request_counts"]["succeeded"] == 20
        await results(server.http, batch)
        assert (await until_ended(server.http, begun[1]["id"]))["request_counts"]["succeeded"] == 3

    async def both() -> None:
        async with running(settings, Script(step_s=0.02)) as server:
            await start(server)
        async with running(settings) as server:
            await go_on(server)

    asyncio.run(both())


def test_pages_and_tenants(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    path.chmod(0o600)

    async def test(server: Running) -> None:
        http = server.http
        ids = [(await begin(http, [entry(1)], ONE))["id"] for _ in range(5)][::-1]
        theirs = await begin(http, [entry(1)], TWO)

        async def page(query: str) -> tuple[list[str], bool]:
            answer = (await http.get(f"{BATCHES}?{query}", headers=ONE)).raise_for_status().json()
            assert set(answer) == {"data", "has_more", "first_id", "last_id"}
            found = [one["id"] for one in answer["data"]]
            assert (answer["first_id"], answer["last_id"]) == ((found[0], found[-1]) if found else (None, None))
            return found, answer["has_more"]

        assert await page("") == (ids, False)
        assert await page("limit=2") == (ids[:2], True)
        assert await page(f"limit=2&after_id={ids[1]}") == (ids[2:4], True)
        assert await page(f"limit=2&after_id={ids[3]}") == (ids[4:], False)
        assert await page(f"limit=2&before_id={ids[4]}") == (ids[2:4], True)
        assert await page(f"limit=2&before_id={ids[2]}") == (ids[:2], False)
        assert await page(f"before_id={ids[0]}") == ([], False)
        for query in ("limit=0", "limit=1001", "after_id=no", f"before_id={ids[0]}&after_id={ids[1]}"):
            answer = await http.get(f"{BATCHES}?{query}", headers=ONE)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", query
        assert (await http.get(f"{BATCHES}/{theirs['id']}", headers=ONE)).status_code == 404
        assert (await http.get(f"{BATCHES}?after_id={theirs['id']}", headers=ONE)).status_code == 400
        assert (await http.get(BATCHES)).json()["error"]["type"] == "authentication_error"
        await until_ended(http, theirs["id"], TWO)
        assert {request.tenant for request in server.engine.submitted} <= {"acme", "other"}

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"), tenants_config=str(path))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not valid JSON"),
        (b'{"requests": [{"custom_id": "\xff", "params": {}}]}', "not valid JSON"),
        (b"[]", "requests"),
        (b"{}", "requests"),
        (b'{"requests": 1}', "requests: expected a list"),
        (b'{"requests": []}', "1 to 50000"),
        (b'{"requests": [], "model": 1}', "nothing else"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, 5]}', "requests.1: expected an object"),
        (b'{"requests": [{"custom_id": 1, "params": {}}]}', "requests.0: expected an object"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests.0: expected an object"),
        (b'{"requests": [{"custom_id": "a", "params": {}, "odd": 1}]}', "requests.0: expected an object"),
        (b'{"requests": [{"custom_id": "a b", "params": {}}]}', "requests.0.custom_id"),
        (b'{"requests": [{"custom_id": "a", "params": []}]}', "requests.0.params: expected an object"),
        (b'{"requests": [{"custom_id": "a", "params": {"stream": true}}]}', "requests.0.params.stream"),
        (
            b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}',
            "requests.1.custom_id: another request",
        ),
    ],
)
def test_a_body_that_is_no_batch_names_the_place(body: bytes, named: str) -> None:
    with pytest.raises(AdmissionError) as raised:
        read_requests(body)
    assert raised.value.status == 400 and named in raised.value.message
    assert not any(word in raised.value.message for word in ("Object", "`", "$", "missing required"))


def test_the_requests_of_a_body_are_counted_before_they_are_decoded() -> None:
    body = json.dumps({"requests": [entry(number) for number in range(50)]}).encode()
    assert len(read_requests(body)) == 50 <= max_requests(body)
    small = b'{"requests": [' + b",".join(b'{"custom_id":"%d","params":{}}' % number for number in range(50)) + b"]}"
    assert len(read_requests(small)) == max_requests(small) == 50


def test_without_a_folder_or_with_another_type_the_routes_refuse(model_folder: Path, tmp_path: Path) -> None:
    async def refused(server: Running) -> None:
        for method, path in (("POST", BATCHES), ("GET", BATCHES), ("GET", f"{BATCHES}/x"), ("DELETE", f"{BATCHES}/x")):
            answer = await server.http.request(method, path)
            assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
            assert "--files-path" in answer.json()["error"]["message"]

    async def typed(server: Running) -> None:
        answer = await server.http.post(BATCHES, content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]
        crowded = {"requests": [entry(number) for number in range(3)]}
        answer = await server.http.post(BATCHES, json=crowded)
        assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
        assert (await server.http.get(BATCHES)).json()["data"] == []

    with_server(server_settings(model_folder), refused)
    with_server(server_settings(model_folder), typed, files_path=str(tmp_path / "files"), max_tenant_files_bytes=100)
